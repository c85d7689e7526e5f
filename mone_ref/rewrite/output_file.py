"""The files of a blueprint as one kind of thing: bytes that are made, then bytes copied."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mone_ref.checkpoint import dtypes
from mone_ref.checkpoint.header import LENGTH_BYTES
from mone_ref.checkpoint.ordinary import METADATA
from mone_ref.rewrite.blueprint import Blueprint, OutputShard, OutputTensor, Piece

HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class OutputFile:
    """One file of the output: ``head`` is made, ``pieces`` follow it in order."""

    name: str
    head: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.head) + sum(piece.size for piece in self.pieces)


def files(blueprint: Blueprint) -> tuple[OutputFile, ...]:
    """Every file of the output but the manifest.

    Raises OSError when an auxiliary file cannot be looked at.
    """
    shards = [
        OutputFile(shard.name, header(shard), coalesced(pieces_of(shard)))
        for shard in blueprint.shards
    ]
    made = [OutputFile(name, content, ()) for name, content in blueprint.documents.items()]
    copied = [OutputFile(name, b"", (_whole(blueprint, name),)) for name in blueprint.copies]
    return (*shards, *made, *copied)


def ordered(shard: OutputShard) -> list[OutputTensor]:
    """Tensors in the order of the file: wide types first, so that each starts aligned (F16)."""
    return sorted(shard.tensors, key=lambda tensor: -dtypes.alignment(tensor.dtype))


def header(shard: OutputShard) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to eight bytes."""
    document: dict[str, Any] = {METADATA: dict(shard.metadata)} if shard.metadata else {}
    begin = 0
    for tensor in ordered(shard):
        end = begin + tensor.size
        offsets = [begin, end]
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def pieces_of(shard: OutputShard) -> list[Piece]:
    """The pieces of all tensors in the order of the file."""
    return [piece for tensor in ordered(shard) for piece in tensor.pieces]


def coalesced(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces with neighbours of one file joined, empty ones dropped."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.path == piece.path and last.end == piece.begin:
            joined[-1] = Piece(last.path, last.begin, piece.end)
        elif piece.size:
            joined.append(piece)
    return tuple(joined)


def _whole(blueprint: Blueprint, name: str) -> Piece:
    path = blueprint.source / name
    return Piece(path, 0, path.stat().st_size)
