"""Which files of a directory hold the weights."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mone_ref.checkpoint import index
from mone_ref.checkpoint.findings import flaw, most
from mone_ref.checkpoint.index import SUFFIX, Index
from mone_ref.checkpoint.opening import leaves
from mone_ref.checkpoint.text import some
from mone_ref.errors import Code, Problem, Severity, reason, show

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NUMBERED = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]+)-of-(?P<total>[0-9]+)\.safetensors")


@dataclass(frozen=True)
class WeightFiles:
    """The files to read, in order, and the index that names them, if there is one.

    ``files`` is empty where the directory cannot tell, or where one of them is unsafe.
    """

    files: tuple[str, ...]
    index: Index | None
    problems: tuple[Problem, ...]


def find(directory: Path) -> WeightFiles:
    """Decide which files count; opens nothing but the index.

    Codes: NOT_A_CHECKPOINT, NO_WEIGHTS, PICKLE, UNSAFE_PATH, STRAY_FILE, MISSING_SHARD,
    AMBIGUOUS_FILES, and those of the index.
    """
    try:
        present = sorted(_files(directory))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        found = f"{show(str(directory))}: {reason(error).lower()}"
        expected = "a directory with weights"
        return WeightFiles((), None, (flaw(Code.NOT_A_CHECKPOINT, ".", "path", found, expected),))
    weights = [name for name in present if name.endswith(SUFFIX)]
    pickles = list(_pickles(present, weights))
    if index.NAME in present:
        chosen = _from_index(directory, weights)
    elif weights:
        chosen = _from_names(weights)
    else:
        chosen = WeightFiles((), None, () if pickles else (_no_weights(present),))
    unsafe = tuple(_unsafe_links(directory, chosen.files))
    files = () if unsafe else chosen.files
    return WeightFiles(files, chosen.index, (*pickles, *chosen.problems, *unsafe))


def _files(directory: Path) -> Iterator[str]:
    """Names of everything that is no directory; a broken link counts, so that it is noticed.

    Hidden files do not: ``*.safetensors`` matches none, and tools leave copies under such names.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_dir() and not entry.name.startswith("."):
                yield entry.name


def _no_weights(present: list[str]) -> Problem:
    found = some(present, "file") if present else "an empty directory"
    return flaw(Code.NO_WEIGHTS, ".", "path", found, f"at least one {SUFFIX} file")


def _pickles(present: list[str], weights: list[str]) -> Iterator[Problem]:
    """Opening a pickle runs code, so it is never opened; harmless beside safetensors."""
    found = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    if found:
        severity = Severity.NOTE if weights else Severity.ERROR
        expected = f"{SUFFIX} files only (pickles are not opened)"
        yield flaw(Code.PICKLE, found[0], "file", some(found, "pickle"), expected, severity)


def _from_index(directory: Path, weights: list[str]) -> WeightFiles:
    """With an index only the files that it names count."""
    if leaves(directory / index.NAME, directory):
        return WeightFiles((), None, (_unsafe_link(index.NAME),))
    read, problems = index.read(directory)
    if read is None:
        return WeightFiles((), None, tuple(problems))
    shards = read.shards
    problems += most(index.missing_shards(read, set(weights)))
    for name in weights:
        if name not in shards:
            found, expected = f"a file that {index.NAME} does not name", "only files of the index"
            problems.append(flaw(Code.STRAY_FILE, name, "file", found, expected, Severity.WARNING))
    files = tuple(name for name in weights if name in shards)
    return WeightFiles(files, read, tuple(problems))


def _from_names(weights: list[str]) -> WeightFiles:
    """Without an index: one single file, or one complete set of numbered shards."""
    sets: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for name in weights:
        shard = NUMBERED.fullmatch(name)
        key = (shard["prefix"], int(shard["total"])) if shard else (name, 1)
        sets[key].setdefault(int(shard["number"]) if shard else 1, name)
    if len(sets) > 1 or sum(map(len, sets.values())) != len(weights):
        found = f"more than one set in {some(weights, 'file')}"
        expected = "one file, one set of shards, or an index that says which files count"
        return WeightFiles((), None, (flaw(Code.AMBIGUOUS_FILES, ".", "path", found, expected),))
    (((_, total), shards),) = sets.items()
    complete = min(shards) == 1 and max(shards) == total == len(shards)
    if not complete:
        found, expected = some(weights, "shard"), f"shards 1 to {total}, each once"
        return WeightFiles((), None, (flaw(Code.MISSING_SHARD, ".", "path", found, expected),))
    return WeightFiles(tuple(shards[number] for number in sorted(shards)), None, ())


def _unsafe_links(directory: Path, files: tuple[str, ...]) -> Iterator[Problem]:
    for name in files:
        if leaves(directory / name, directory):
            yield _unsafe_link(name)


def _unsafe_link(name: str) -> Problem:
    found = "a link out of the directory"
    return flaw(Code.UNSAFE_PATH, name, "file", found, "a file in the directory")
