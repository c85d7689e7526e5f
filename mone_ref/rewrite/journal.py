"""What a partial output holds already, so that a killed rewrite goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mone_ref.checkpoint.opening import read_regular

NAME = "journal.json"
LONGEST = 200  # bytes of a name to which more is added; file systems allow 255


@dataclass
class Journal:
    """The rewrite that a partial output belongs to, and its finished files.

    ``finished`` maps a file to its size in bytes and its sha256; a file stands there only when
    it is on the disk under its own name.
    """

    identity: str
    states: dict[str, list[int]]
    finished: dict[str, tuple[int, str]] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Replace the journal in one step. Raises OSError."""
        write_durably(directory / NAME, json.dumps(asdict(self)).encode())


def load(directory: Path) -> Journal | None:
    """The journal of a partial output; None where there is none that can be read."""
    try:
        document: Any = json.loads(read_regular(directory / NAME))
        finished = {
            name: (int(size), str(sha)) for name, (size, sha) in document["finished"].items()
        }
        states = {
            path: [int(size), int(changed), int(inode)]
            for path, (size, changed, inode) in document["states"].items()
        }
        return Journal(str(document["identity"]), states, finished)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_durably(path: Path, content: bytes) -> None:
    """A small file that is there whole, or not at all, whatever happens. Raises OSError."""
    beside = unfinished(path)
    with beside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """Where a file lies until it is whole. Hidden: no file of a source has such a name in an
    output (``auxiliary.find``). A name that is nearly as long as names may be is hashed."""
    name = os.fsencode(path.name)
    if len(name) > LONGEST:
        name = hashlib.sha256(name).hexdigest().encode()
    return path.with_name(f".{os.fsdecode(name)}.unfinished")


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
