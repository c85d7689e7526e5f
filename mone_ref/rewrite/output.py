"""Output tensors and documents -> a whole directory: shards, index, auxiliary files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mone_ref.checkpoint import Checkpoint, dtypes, index
from mone_ref.checkpoint.header import LONGEST_HEADER
from mone_ref.config import FILE
from mone_ref.rewrite.blueprint import Blueprint, OutputShard, OutputTensor
from mone_ref.rewrite.config_edit import encode

SINGLE = "model.safetensors"
ENTRY_BYTES = 120  # of a header entry, without name and shape; rounded up
SIZE_BYTES = 21  # of one size in a shape


def assemble(
    source: Checkpoint,
    tensors: Mapping[str, Sequence[OutputTensor]],
    config: Mapping[str, Any],
    copies: tuple[str, ...],
    longest_header: int = LONGEST_HEADER,
) -> Blueprint:
    """The blueprint; ``tensors`` maps source files to what the output has of each.

    Shards follow the source's, without those that became empty, and are numbered anew. A
    source of one file without index stays one. A header never gets longer than readers accept.
    """
    parts = [
        (source.metadata.get(file, {}), part)
        for file in source.files
        for part in split(tensors.get(file, ()), longest_header)
    ]
    sharded = source.index is not None or len(source.files) > 1 or len(parts) > 1
    shards = tuple(
        OutputShard(_name(number, len(parts), sharded), {**metadata, "format": "pt"}, part)
        for number, (metadata, part) in enumerate(parts, start=1)
    )
    documents = {FILE: encode(config)}
    if sharded:
        documents[index.NAME] = encode(_index(source, shards))
    return Blueprint(source.directory, shards, documents, copies)


def split(
    tensors: Sequence[OutputTensor], longest_header: int
) -> Iterator[tuple[OutputTensor, ...]]:
    """Tensors in the order of a file, cut where the header would become too long (F13).

    Wide types come first, so that every tensor starts at a multiple of its element size (F16).
    """
    part: list[OutputTensor] = []
    length = ENTRY_BYTES
    narrowness = {dtype: -dtypes.alignment(dtype) for dtype in {one.dtype for one in tensors}}
    for tensor in sorted(tensors, key=lambda one: narrowness[one.dtype]):
        added = len(json.dumps(tensor.name)) + SIZE_BYTES * len(tensor.shape) + ENTRY_BYTES
        if part and length + added > longest_header:
            yield tuple(part)
            part, length = [], ENTRY_BYTES
        part.append(tensor)
        length += added
    if part:
        yield tuple(part)


def _name(number: int, count: int, sharded: bool) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors" if sharded else SINGLE


def _index(source: Checkpoint, shards: tuple[OutputShard, ...]) -> dict[str, Any]:
    """The source's metadata with the sums of the output, and where each tensor lies."""
    metadata = dict(source.index.metadata) if source.index else {}
    metadata["total_size"] = sum(tensor.size for shard in shards for tensor in shard.tensors)
    before = metadata.get("total_parameters")
    if type(before) is int:
        was = sum(math.prod(entry.shape) for entry in source.tensors.values())
        now = sum(math.prod(tensor.shape) for shard in shards for tensor in shard.tensors)
        metadata["total_parameters"] = before - was + now
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
