"""One rule: source patterns -> target patterns, and the operations between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mone_ref.conversion import operations
from mone_ref.conversion.operations import (
    Grid,
    Join,
    MergeModulelist,
    Operation,
    Shape,
    Shapes,
    Split,
    Transpose,
)
from mone_ref.conversion.patterns import Pattern


class WeightConverter:
    """How stored tensors become tensors of a model, and back.

    First joins, then splits, with transposes anywhere: in the middle stands one tensor, the
    *whole*, of which sources and targets are views. Without operations a converter renames.
    A field that sources and targets share tells groups apart; the one field that only one
    side has is the index that ``MergeModulelist`` or ``SplitModulelist`` runs over. Example:

        WeightConverter(
            ["{layer}.experts.{expert}.w1.weight", "{layer}.experts.{expert}.w3.weight"],
            ["{layer}.experts.gate_up_proj"],
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        )

    Raises ``ValueError`` where patterns and operations do not fit each other.
    """

    def __init__(
        self, sources: Sequence[str], targets: Sequence[str], steps: Sequence[Operation] = ()
    ) -> None:
        self.sources = tuple(map(Pattern, sources))
        self.targets = tuple(map(Pattern, targets))
        self.steps = tuple(steps)
        first = next((i for i, step in enumerate(steps) if isinstance(step, Split)), len(steps))
        self.joins = [step for step in self.steps[:first] if not isinstance(step, Split)]
        self.splits = [step.reverse for step in self.steps[first:] if not isinstance(step, Join)]
        if len(self.joins) + len(self.splits) != len(self.steps):
            raise ValueError(f"{self} joins after it has split")
        self.source_index = self._index(self.sources, self.targets, self.joins)
        self.target_index = self._index(self.targets, self.sources, self.splits)
        if self.source_index and self.target_index:
            raise ValueError(f"{self} runs over an index on both sides")
        self.key = tuple(f for f in self.sources[0].fields if f != self.source_index)

    @property
    def reverse(self) -> WeightConverter:
        """From targets to sources."""
        sources, targets = ([pattern.text for pattern in p] for p in (self.sources, self.targets))
        return WeightConverter(targets, sources, [step.reverse for step in reversed(self.steps)])

    def shape(self, sources: Shapes) -> Shape:
        """That of the whole. Raises ValueError where those of the sources do not fit."""
        for step in self.joins:
            sources = operations.joined(sources, step)
        return sources[0][0]

    def places(self, whole: Tensor, columns: int) -> Grid:
        """The view of ``whole`` in which each source lies, ``columns`` of them per pattern."""
        return _views(whole, list(reversed(self.joins)), len(self.sources), columns)

    def results(self, whole: Tensor, columns: int) -> Grid:
        """The view of ``whole`` that is each target, ``columns`` of them per pattern."""
        return _views(whole, self.splits, len(self.targets), columns)

    def __repr__(self) -> str:
        return f"WeightConverter({list(self.sources)} -> {list(self.targets)})"

    def _index(
        self, side: Sequence[Pattern], other: Sequence[Pattern], steps: Sequence[Join | Transpose]
    ) -> str:
        """The field that only one side has, or ``""``; checks that side against its steps."""
        fields = {frozenset(pattern.fields) for pattern in side}
        if len(fields) != 1 or len({pattern.text for pattern in side}) != len(side):
            raise ValueError(f"{self}: patterns of one side share their fields, and differ")
        own = fields.pop() - frozenset(other[0].fields)
        joins = [step for step in steps if isinstance(step, Join)]
        if len(own) != sum(isinstance(step, MergeModulelist) for step in joins):
            raise ValueError(f"{self}: an index needs one MergeModulelist or SplitModulelist")
        if (len(side) > 1) != (sum(step.across_patterns for step in joins) == 1):
            raise ValueError(f"{self}: several patterns need one operation between them")
        return next(iter(own), "")


def _views(whole: Tensor, steps: Sequence[Join | Transpose], rows: int, columns: int) -> Grid:
    grid = [[whole]]
    for step in steps:
        across = isinstance(step, Join) and step.across_patterns
        grid = operations.split(grid, step, rows if across else columns)
    return grid
