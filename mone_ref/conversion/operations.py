"""Reversible operations between parts and a whole, each as a shape and as views.

A *join* makes one tensor of several. ``shape`` tells that of the whole; ``split`` gives the
views of the whole in which the parts lie, and moves nothing. That is all a loader needs: it
allocates the whole and reads every part straight into its view, so the parts themselves never
exist.

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

Shape = tuple[int, ...]
Grid = list[list[Tensor]]
"""Tensors ``[pattern][index]``."""
Shapes = list[list[Shape]]
"""Their shapes, likewise."""


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
    def shape(self, parts: Sequence[Shape]) -> Shape:
        """That of the whole. Raises ValueError where the parts do not fit together."""

    @abstractmethod
    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """The views of ``whole`` in which its ``count`` parts lie."""


@dataclass(frozen=True)
class MergeModulelist(Join):
    """Stack the tensors of one pattern, ascending by index, along a new axis."""

    across_patterns: ClassVar[bool] = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """``n`` tensors -> one with a new axis of ``n``."""
        part = _same(parts, self.dim)
        return (*part[: self.dim], len(parts), *part[self.dim :])

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """One view per index; the axis goes, all others stay, those of size 1 too."""
        return list(whole.unbind(self.dim))


@dataclass(frozen=True)
class Concatenate(Join):
    """Lay the patterns one behind the other, in their order.

    Parts are of equal size along ``dim`` unless ``sizes`` says how long each one is.
    """

    sizes: tuple[int, ...] = ()

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """Parts -> their concatenation."""
        part = _same([_resized(part, self.dim, 0) for part in parts])
        lengths = tuple(part[self.dim] for part in parts)
        _same([lengths, self.sizes or lengths[:1] * len(lengths)])
        return _resized(part, self.dim, sum(lengths))

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """Consecutive slices."""
        sizes = self.sizes or (_share(whole, self.dim, count),) * count
        return list(torch.split(whole, list(sizes), self.dim))


@dataclass(frozen=True)
class Interleave(Join):
    """Take one slice of each pattern in turn: gate 0, up 0, gate 1, up 1, ..."""

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """Equal parts -> one that alternates between them."""
        part = _same(parts, self.dim + 1)
        return _resized(part, self.dim, len(parts) * part[self.dim])

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

    def shape(self, part: Shape) -> Shape:
        """With both axes swapped. Raises ValueError where there is no such axis."""
        axes = list(range(len(part)))
        try:
            axes[self.first], axes[self.second] = axes[self.second], axes[self.first]
        except IndexError:
            raise ValueError(f"shape {part} has too few axes") from None
        return tuple(part[axis] for axis in axes)


Operation = Join | Split | Transpose


def joined(shapes: Shapes, operation: Join | Transpose) -> Shapes:
    """One step from parts to the whole. Raises ValueError where the parts do not fit."""
    if isinstance(operation, Transpose):
        return [[operation.shape(shape) for shape in row] for row in shapes]
    if operation.across_patterns:
        return [[operation.shape(column) for column in zip(*shapes, strict=True)]]
    return [[operation.shape(row)] for row in shapes]


def split(grid: Grid, operation: Join | Transpose, count: int) -> Grid:
    """One step from the whole to views of it: ``joined`` undone."""
    if isinstance(operation, Transpose):
        first, second = operation.first, operation.second
        return [[cell.transpose(first, second) for cell in row] for row in grid]
    if operation.across_patterns:
        ((*cells,),) = grid
        columns = [operation.split(cell, count) for cell in cells]
        return [list(row) for row in zip(*columns, strict=True)]
    return [operation.split(cell, count) for (cell,) in grid]


def _same(shapes: Sequence[Shape], axes: int = 0) -> Shape:
    """What all shapes are. Raises ValueError where one differs or has fewer axes."""
    first, *others = shapes
    if any(shape != first for shape in others) or len(first) < axes:
        raise ValueError(f"shapes {list(shapes)} do not fit together")
    return first


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    """The shape with another size along one axis. Raises ValueError without that axis."""
    if len(shape) <= dim:
        raise ValueError(f"parts of shape {shape} do not fit together along axis {dim}")
    return (*shape[:dim], size, *shape[dim + 1 :])


def _share(whole: Tensor, dim: int, count: int) -> int:
    """The size of one of ``count`` equal parts. Raises ValueError when it does not divide."""
    share, rest = divmod(whole.shape[dim], count)
    if rest:
        raise ValueError(f"{whole.shape[dim]} along axis {dim} are not {count} equal parts")
    return share
