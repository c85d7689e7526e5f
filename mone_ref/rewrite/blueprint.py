"""What a rewrite will write, down to the byte, before anything is written.

The one thing that prune, substitute and convert produce, and that the forecast, the writer
and ``verify`` read: none of them knows about experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` (absolute, end excluded) of a file that exists."""

    path: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class OutputTensor(NamedTuple):
    """One tensor of the output: its header entry, and the pieces that are its bytes in order.

    ``dtype`` is the file's own word and may be unknown. The pieces of a tensor that passes
    whole are one; a router that lost rows has one per run of kept rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum([end - begin for _, begin, end in self.pieces])


@dataclass(frozen=True)
class OutputShard:
    """One safetensors file of the output; ``metadata`` is its ``__metadata__``."""

    name: str
    metadata: Mapping[str, str]
    tensors: tuple[OutputTensor, ...]


@dataclass(frozen=True)
class Blueprint:
    """A whole output directory.

    ``documents`` are files whose bytes are made (``config.json``, the index), ``copies``
    auxiliary files of ``source`` that pass through, by their paths relative to it.
    """

    source: Path
    shards: tuple[OutputShard, ...]
    documents: Mapping[str, bytes]
    copies: tuple[str, ...]

    @property
    def tensors(self) -> list[OutputTensor]:
        """Those of every shard, in their order."""
        return [tensor for shard in self.shards for tensor in shard.tensors]

    @property
    def tensor_bytes(self) -> int:
        """What all of them take, headers apart."""
        return sum(tensor.size for tensor in self.tensors)
