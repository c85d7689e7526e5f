"""Changes over ranks: all of them, or none (PAR-3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import layout, updates
from mone_ref.config import Config
from mone_ref.errors import Problem, Rejected
from mone_ref.parallel.shards import Shard


def update(
    config: Config, dtype: torch.dtype, held: Sequence[Shard], tensors: Mapping[str, Tensor]
) -> None:
    """Change constants on the ranks held. Raises ``Rejected``, as ``updates.update`` does.

    Every rank checks every tensor, of its own stage or not: they all come to one conclusion.
    """
    if found := problems(config, dtype, tensors):
        raise Rejected(found)
    for shard in held:
        write_own(shard, tensors)


def problems(config: Config, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> list[Problem]:
    """What is wrong with an update of the whole model, whoever holds its constants."""
    shapes = layout.constants(config)
    places = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    return [
        problem
        for name, value in tensors.items()
        for problem in updates.update_problems(name, value, places.get(name))
    ]


def write_own(shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Write what this rank holds of an update, to every expert that shares it (FMT-29)."""
    places = updates.constant_places(shard)
    updates.write({name: tensors[name] for name in tensors if name in places}, places)


def reload(held: Sequence[Shard], path: str | Path) -> None:
    """Refuse a layerwise reload; also a stage without a listed layer does (UPD-4, PAR-3)."""
    for shard in held:
        updates.reload(shard, path)
