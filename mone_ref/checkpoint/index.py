"""``model.safetensors.index.json``: which shard holds which tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mone_ref import strict_json
from mone_ref.checkpoint.entry import TensorEntry
from mone_ref.checkpoint.findings import LFS_START, flaw, lfs_pointer, most, unreadable
from mone_ref.checkpoint.opening import is_plain_name, open_regular
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.errors import Code, Problem, Severity, show

NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Index:
    """A well-formed index: tensor name -> shard, and the declared total, None if unusable.

    ``metadata`` is the whole object that holds the total.
    """

    weight_map: Mapping[str, str]
    total_size: int | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def shards(self) -> dict[str, list[str]]:
        """Shard -> the tensors that the index expects in it, both in the index's order."""
        shards: dict[str, list[str]] = defaultdict(list)
        for name, shard in self.weight_map.items():
            shards[shard].append(name)
        return dict(shards)


def read(directory: Path) -> tuple[Index | None, list[Problem]]:
    """Read the index of a directory; no index when it, or a name in it, cannot be trusted.

    Codes: INDEX, UNSAFE_PATH, LFS_POINTER, UNREADABLE.
    """
    try:
        with open_regular(directory / NAME) as stream:
            text = stream.read()
    except OSError as error:
        return None, [unreadable(NAME, error)]
    if text.startswith(LFS_START):
        return None, [lfs_pointer(NAME)]
    try:
        parsed = strict_json.parse(text)
    except strict_json.StrictJsonError as error:
        return None, [flaw(Code.INDEX, NAME, "$", str(error), "valid JSON")]
    problems = [
        flaw(Code.INDEX, NAME, key, "a key that stands more than once", "each key once")
        for key in parsed.duplicates
    ]
    problems += most(_weight_map_problems(parsed.value))
    if problems:
        return None, problems
    total_size, problems = _total_size(parsed.value)
    metadata = parsed.value.get("metadata")
    kept = metadata if isinstance(metadata, dict) else {}
    return Index(parsed.value["weight_map"], total_size, kept), problems


def _weight_map_problems(document: object) -> Iterator[Problem]:
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        where = "$.weight_map" if isinstance(document, dict) else "$"
        expected = "an object that maps tensor names to files"
        yield flaw(Code.INDEX, NAME, where, show(weight_map), expected)
        return
    named: set[str] = set()
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in named:
            continue  # one bad file name is one fault, not one per tensor
        where = strict_json.child("$.weight_map", name)
        if not isinstance(shard, str):
            yield flaw(Code.INDEX, NAME, where, show(shard), "a file name")
        else:
            named.add(shard)
            if not is_plain_name(shard):
                expected = "the name of a file in the directory"
                yield flaw(Code.UNSAFE_PATH, NAME, where, show(shard), expected)
            elif not shard.endswith(SUFFIX):
                yield flaw(Code.INDEX, NAME, where, show(shard), f"a {SUFFIX} file")


def _total_size(document: dict[str, Any]) -> tuple[int | None, list[Problem]]:
    """``metadata.total_size``: informative, so a fault in it is no error."""
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        expected = "the sum of all tensor bytes"
        note = Severity.NOTE
        return None, [flaw(Code.INDEX, NAME, "$.metadata.total_size", "nothing", expected, note)]
    if type(total) is not int:
        found, warning = show(total), Severity.WARNING
        where = "$.metadata.total_size"
        return None, [flaw(Code.INDEX, NAME, where, found, "an integer", warning)]
    return total, []


def disagreements(index: Index, stored: Mapping[str, tuple[TensorEntry, ...]]) -> Iterator[Problem]:
    """What the index says against what its shards hold (shard -> entries).

    Codes: INDEX, as an error where a tensor is not where the index says or is not in the
    index at all (readers that follow the index and readers that follow the files would
    load different models), as a warning where only ``total_size`` is wrong.
    """
    held = {entry.name: shard for shard, entries in stored.items() for entry in entries}
    if held == index.weight_map:
        return
    names = {shard: {entry.name for entry in entries} for shard, entries in stored.items()}
    for name, shard in index.weight_map.items():
        if name not in names.get(shard, ()):
            others = ", ".join(plain(other) for other, held in names.items() if name in held)
            found = f"the tensor in {others}" if others else "the tensor in no file"
            yield flaw(Code.INDEX, NAME, name, found, f"it in {plain(shard)}")
    for shard, entries in stored.items():
        unlisted = [entry.name for entry in entries if entry.name not in index.weight_map]
        if unlisted:
            expected = "every tensor of the shard in the index"
            found = f"{some(unlisted, 'tensor')} not in the index"
            yield flaw(Code.INDEX, shard, unlisted[0], found, expected)


def wrong_total(index: Index, tensor_bytes: int, file_bytes: int) -> Iterator[Problem]:
    """A ``total_size`` that is not the sum of tensor bytes."""
    if index.total_size not in (None, tensor_bytes):
        found = f"{index.total_size}"
        if index.total_size == file_bytes:
            found += " (the size of the files, headers included)"
        where, expected = "$.metadata.total_size", f"{tensor_bytes}, the sum of all tensor bytes"
        yield flaw(Code.INDEX, NAME, where, found, expected, Severity.WARNING)


def missing_shards(index: Index, present: set[str]) -> Iterator[Problem]:
    """Every shard that the index names and the directory lacks, with what it would hold."""
    for shard, names in index.shards.items():
        if shard not in present:
            found = f"no such file, for {count(len(names), 'tensor')}"
            yield flaw(Code.MISSING_SHARD, shard, "file", found, f"the shard that {NAME} names")
