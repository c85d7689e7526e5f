"""What a blueprint is, as one hash: the same bytes from the same places, wherever they lie."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mone_ref.rewrite.output_file import OutputFile
from mone_ref.version import VERSION

TOOL = f"mone-ref {VERSION}"


def of(files: Sequence[OutputFile], source: Path) -> str:
    """sha256 over every name, head and piece of the output, and the tool's version."""
    labels = {
        path: label(path, source) for path in {one.path for file in files for one in file.pieces}
    }
    described = [
        [
            file.name,
            hashlib.sha256(file.head).hexdigest(),
            [[labels[path], begin, end] for path, begin, end in file.pieces],
        ]
        for file in files
    ]
    return hashlib.sha256(json.dumps([TOOL, described]).encode()).hexdigest()


def label(path: Path, source: Path) -> str:
    """A file by its path in the source, one from elsewhere (constants) by its name alone.

    However both are spelled; but a file keeps its own name where it is a link, as in the cache of
    the Hugging Face Hub.
    """
    root, place = Path(os.path.realpath(source)), Path(os.path.realpath(path.parent), path.name)
    if place.is_relative_to(root):
        return place.relative_to(root).as_posix()
    return f"../{path.name}"
