"""Whether the files that a rewrite reads are still those that it was planned on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mone_ref.checkpoint.findings import flaw, unreadable
from mone_ref.config import FILE
from mone_ref.errors import Code, Problem, Rejected
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.output_file import OutputFile

FIELDS = ("size", "time of change", "inode")

States = Mapping[str, list[int]]
"""Real path, however it was spelled -> size in bytes, modification time in ns, inode."""


def inputs(blueprint: Blueprint, files: Iterable[OutputFile]) -> list[Path]:
    """Every file whose bytes reach the output or decide about it, sorted."""
    read = {piece.path for file in files for piece in file.pieces}
    return sorted(read | {path for path in [blueprint.source / FILE] if path.exists()})


def look(paths: Iterable[Path]) -> dict[str, list[int]]:
    """The state of each file now. Raises ``Rejected`` (UNREADABLE)."""
    states, problems = dict[str, list[int]](), list[Problem]()
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            problems.append(unreadable(str(path), error))
        else:
            states[os.path.realpath(path)] = [found.st_size, found.st_mtime_ns, found.st_ino]
    if problems:
        raise Rejected(problems)
    return states


def require_same(before: States, after: States) -> None:
    """Raises ``Rejected`` (SOURCE_CHANGED) that names every file that is another one now."""
    problems = []
    for path in sorted({*before, *after}):
        was, now = before.get(path, [0, 0, 0]), after.get(path, [0, 0, 0])
        for field, old, new in zip(FIELDS, was, now, strict=True):
            if old != new:
                found, expected = f"{field} {new}", f"{old}, as when the rewrite began"
                problems.append(flaw(Code.SOURCE_CHANGED, path, "file", found, expected))
                break
    if problems:
        raise Rejected(problems)
