"""Tensors of the output as byte ranges of tensors that exist: whole, or some of their rows.

The first dimension of a stored tensor is its slowest, so rows are byte ranges whatever the
dtype: FP8, packed 4-bit blocks and types that nobody here knows are cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from mone_ref.checkpoint import TensorEntry
from mone_ref.rewrite.blueprint import OutputTensor, Piece


@lru_cache(maxsize=256)
def _path(directory: Path, file: str) -> Path:
    """One object per shard: joining paths for 10^5 tensors takes longer than reading headers."""
    return directory / file


def whole(entry: TensorEntry, directory: Path, name: str | None = None) -> OutputTensor:
    """A tensor as it is, under its own or another name."""
    piece = Piece(_path(directory, entry.file), entry.begin, entry.end)
    return OutputTensor(name or entry.name, entry.dtype, entry.shape, (piece,))


def has_rows(entry: TensorEntry, count: int) -> bool:
    """Whether a tensor consists of ``count`` rows of whole bytes; ``[1, count]`` counts too."""
    rows = entry.shape[:1] == (count,) or entry.shape == (1, count)
    return rows and entry.size % count == 0


def rows(entry: TensorEntry, directory: Path, keep: Sequence[int], count: int) -> OutputTensor:
    """The rows ``keep``, ascending, of a tensor for which ``has_rows(entry, count)`` holds."""
    size = entry.size // count
    path = _path(directory, entry.file)
    pieces = tuple(
        Piece(path, entry.begin + first * size, entry.begin + last * size)
        for first, last in runs(keep)
    )
    shape = (1, len(keep)) if entry.shape == (1, count) else (len(keep), *entry.shape[1:])
    return OutputTensor(entry.name, entry.dtype, shape, pieces)


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ids as half-open runs: ``[0, 1, 2, 5]`` is ``[(0, 3), (5, 6)]``."""
    breaks = [at for at, (left, right) in enumerate(pairwise(ids), 1) if right != left + 1]
    bounds = [0, *breaks, len(ids)]
    return [(ids[begin], ids[end - 1] + 1) for begin, end in pairwise(bounds) if begin < end]
