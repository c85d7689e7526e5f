"""The other files of a checkpoint, which an output carries over."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mone_ref.checkpoint import index
from mone_ref.checkpoint.findings import flaw, unreadable
from mone_ref.checkpoint.opening import leaves
from mone_ref.checkpoint.text import some
from mone_ref.checkpoint.weight_files import PICKLE_SUFFIXES
from mone_ref.config import FILE
from mone_ref.errors import Code, Problem, Severity
from mone_ref.rewrite import manifest

WEIGHTS = (index.SUFFIX, *PICKLE_SUFFIXES, ".gguf", ".msgpack", ".h5", ".onnx", ".onnx_data")
"""Endings of weights in any format: beside an output they would be another model's."""

INDEX_SUFFIX = ".index.json"


def find(directory: Path) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """Files to copy, relative and sorted, nested ones included; and a note on what is left out,
    or an error (UNREADABLE) for each file or directory that cannot be looked into.

    Left out: weights in any format, weight indexes, hidden files and directories, links that
    leave the checkpoint, linked directories. config.json and a manifest are written anew.
    """
    copied: list[str] = []
    left: list[str] = []
    closed: list[OSError] = []
    for root, directories, files in os.walk(directory, onerror=closed.append):
        here = Path(root)
        left += [_relative(here / name, directory) for name in directories if _is_left(here, name)]
        directories[:] = sorted(name for name in directories if not _is_left(here, name))
        for name in sorted(files):
            relative = _relative(here / name, directory)
            if relative in (FILE, index.NAME, manifest.NAME) or (
                here == directory and _is_shard(name)
            ):
                continue
            try:
                (copied if _is_copied(here / name, directory) else left).append(relative)
            except OSError as error:
                closed.append(error)
    unread = [unreadable(_relative(Path(error.filename), directory), error) for error in closed]
    return tuple(sorted(copied)), (*unread, *_omitted(sorted(left)))


def _is_copied(path: Path, directory: Path) -> bool:
    """Whether a file goes into the output. Raises OSError where it should and cannot be read."""
    is_ours = not path.name.startswith(".") and not path.name.endswith((*WEIGHTS, INDEX_SUFFIX))
    if not is_ours or not path.is_file() or leaves(path, directory):
        return False
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return True


def _is_left(here: Path, name: str) -> bool:
    return name.startswith(".") or ((here / name).is_dir() and (here / name).is_symlink())


def _is_shard(name: str) -> bool:
    """Weights of the source itself; strays among them are reported where files are read."""
    return name.endswith(index.SUFFIX)


def _relative(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def _omitted(left: list[str]) -> list[Problem]:
    if not left:
        return []
    expected = "no weights, indexes, hidden files or outward links: these are not copied"
    note = Severity.NOTE
    return [flaw(Code.OMITTED_FILE, left[0], "file", some(left, "other file"), expected, note)]
