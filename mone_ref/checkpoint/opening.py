"""Opening files of a checkpoint: regular files only, never through a link that leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError, also for a directory, pipe or device; a pipe is not waited for.
    """
    if "\0" in str(path):  # os.open would raise ValueError
        raise OSError(errno.EINVAL, "a NUL in the path", str(path))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not os.path.isfile(handle):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. Raises OSError, as ``open_regular``."""
    with open_regular(path) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Before a library opens a file that it would wait for. Raises OSError, as ``open_regular``."""
    open_regular(path).close()


def leaves(path: Path, directory: Path) -> bool:
    """Whether the real file behind ``path`` lies outside the checkpoint.

    One link out is legitimate, that of the Hugging Face cache: a checkpoint is
    ``<repository>/snapshots/<revision>/`` and each file in it a link to
    ``<repository>/blobs/<hash>``. Blobs of another repository do not count.
    """
    root, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if root in target.parents:
        return False
    in_cache = root.parent.name == "snapshots"
    return not (in_cache and target.parent == root.parent.parent / "blobs")


def is_plain_name(name: str) -> bool:
    """Whether a name from the index is a file name in the directory and nothing else.

    Refused on every system: separators of any system, drive letters, ``.``, ``..``, NUL
    and the empty name.
    """
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")
