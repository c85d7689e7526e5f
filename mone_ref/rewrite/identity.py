"""What a blueprint is, as one hash: the same bytes from the same places, wherever they lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from mone_ref.rewrite.output_file import OutputFile
from mone_ref.version import VERSION

TOOL = f"mone-ref {VERSION}"


def of(files: Sequence[OutputFile], source: Path) -> str:
    """sha256 over every name, head and piece of the output, and the tool's version."""
    described = [
        [
            file.name,
            hashlib.sha256(file.head).hexdigest(),
            [[label(piece.path, source), piece.begin, piece.end] for piece in file.pieces],
        ]
        for file in files
    ]
    return hashlib.sha256(json.dumps([TOOL, described]).encode()).hexdigest()


def label(path: Path, source: Path) -> str:
    """A file by its path in the source; one from elsewhere (constants) by its name alone."""
    if path.is_relative_to(source):
        return path.relative_to(source).as_posix()
    return f"../{path.name}"
