"""What a blueprint will take, against what its source takes: nothing is written for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.components import Classifier, sizes
from mone_ref.rewrite.structure import Structure


@dataclass(frozen=True)
class Totals:
    """Bytes by component, and how many tensors in how many shards."""

    components: Mapping[str, int]
    tensors: int
    shards: int

    @property
    def size(self) -> int:
        """All tensor bytes: what an engine holds in memory for the weights."""
        return sum(self.components.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "bytes": self.size}


@dataclass(frozen=True)
class Forecast:
    """Source and output; ``copied`` are bytes of auxiliary files."""

    before: Totals
    after: Totals
    copied: int

    @property
    def saved(self) -> int:
        """Bytes of weights that the output does not need; negative if it needs more."""
        return self.before.size - self.after.size

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.before.as_dict(),
            "output": self.after.as_dict(),
            "saved_bytes": self.saved,
            "copied_bytes": self.copied,
        }


def forecast(structure: Structure, blueprint: Blueprint) -> Forecast:
    """Count a blueprint."""
    made = blueprint.tensors
    stored, known = structure.checkpoint, Classifier(structure)
    before = Totals(sizes(known, stored.tensors.values()), len(stored.tensors), len(stored.files))
    after = Totals(sizes(known, made), len(made), len(blueprint.shards))
    copied = sum((blueprint.source / path).stat().st_size for path in blueprint.copies)
    return Forecast(before, after, copied)
