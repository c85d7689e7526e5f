"""Reversible operations between parts and a whole, each as a join and as views.

A *join* makes one tensor of several and defines the operation in torch's own words;
``split`` is its inverse and moves nothing: it gives the views of the whole in which the
parts lie. That is all a loader needs: it allocates the whole and reads every part straight
into its view, so the parts themselves never exist.

Parts form a grid, one row per pattern and one column per index. ``MergeModulelist`` joins
along a row, the experts of one projection; ``Concatenate`` and ``Interleave`` join along a
column, the projections of one expert. ``Transpose`` changes every cell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Grid = list[list[Tensor]]
"""Tensors ``[pattern][index]``."""


@dataclass(frozen=True)
class Join(ABC):
    """Several tensors into one, along the axis ``dim`` of the whole."""

    dim: int = 0
    across_patterns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim counts from 0, got {self.dim}")

    @property
    def reverse(self) -> Split:
        """The operation that undoes this one."""
        return Split(self)

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole."""

    @abstractmethod
    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """The views of ``whole`` in which its ``count`` parts lie."""


@dataclass(frozen=True)
class MergeModulelist(Join):
    """Stack the tensors of one pattern, ascending by index, along a new axis."""

    across_patterns: ClassVar[bool] = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """``n`` tensors -> one with a new axis of ``n``."""
        return torch.stack(list(parts), self.dim)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """One view per index; the axis goes, all others stay, those of size 1 too."""
        return list(whole.unbind(self.dim))


@dataclass(frozen=True)
class Concatenate(Join):
    """Lay the patterns one behind the other, in their order.

    Parts are of equal size along ``dim`` unless ``sizes`` says how long each one is.
    """

    sizes: tuple[int, ...] = ()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts -> their concatenation."""
        return torch.cat(list(parts), self.dim)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """Consecutive slices."""
        sizes = self.sizes or (_share(whole, self.dim, count),) * count
        return list(torch.split(whole, list(sizes), self.dim))


@dataclass(frozen=True)
class Interleave(Join):
    """Take one slice of each pattern in turn: gate 0, up 0, gate 1, up 1, ..."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Equal parts -> one that alternates between them."""
        return torch.stack(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """Every ``count``-th slice, from each start."""
        share = _share(whole, self.dim, count)
        shape = (*whole.shape[: self.dim], share, count, *whole.shape[self.dim + 1 :])
        return list(whole.view(shape).unbind(self.dim + 1))


@dataclass(frozen=True)
class Split:
    """One tensor into several: a join read backwards."""

    reverse: Join


def SplitModulelist(dim: int = 0) -> Split:
    """One tensor per index."""
    return MergeModulelist(dim).reverse


def Chunk(dim: int = 0, sizes: tuple[int, ...] = ()) -> Split:
    """Consecutive slices, one per target pattern."""
    return Concatenate(dim, sizes).reverse


def Deinterleave(dim: int = 0) -> Split:
    """Alternating slices, one set per target pattern."""
    return Interleave(dim).reverse


@dataclass(frozen=True)
class Transpose:
    """Swap two axes of every tensor; its own reverse."""

    first: int
    second: int

    @property
    def reverse(self) -> Transpose:
        """Itself."""
        return self


Operation = Join | Split | Transpose


def joined(grid: Grid, operation: Join | Transpose) -> Grid:
    """One step from parts to the whole."""
    if isinstance(operation, Transpose):
        return _transposed(grid, operation)
    if operation.across_patterns:
        return [[operation.join(column) for column in zip(*grid, strict=True)]]
    return [[operation.join(row)] for row in grid]


def split(grid: Grid, operation: Join | Transpose, count: int) -> Grid:
    """One step from the whole to views of it: ``joined`` undone."""
    if isinstance(operation, Transpose):
        return _transposed(grid, operation)
    if operation.across_patterns:
        ((*cells,),) = grid
        columns = [operation.split(cell, count) for cell in cells]
        return [list(row) for row in zip(*columns, strict=True)]
    return [operation.split(cell, count) for (cell,) in grid]


def _transposed(grid: Grid, operation: Transpose) -> Grid:
    return [[cell.transpose(operation.first, operation.second) for cell in row] for row in grid]


def _share(whole: Tensor, dim: int, count: int) -> int:
    """The size of one of ``count`` equal parts. Raises ValueError when it does not divide."""
    share, rest = divmod(whole.shape[dim], count)
    if rest:
        raise ValueError(f"{whole.shape[dim]} along axis {dim} are not {count} equal parts")
    return share
