"""Wrong parallelism: which rank computes and adds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref import layer as right
from mone_ref import moe
from mone_ref.backend import LayerSpec
from mone_ref.experts import ExpertWeights
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.layer import Rank
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision

# The right steps, bound before anything is planted.
_build = right.build
_constants = moe.constants
_partial = right.partial
_shard = right.shard


# -- who adds the constants


def every_rank(tp: Rank) -> bool:
    """Add constants whatever the rank."""
    return True


def no_rank(tp: Rank) -> bool:
    """Leave the constants to another rank, on every rank."""
    return False


def unless_alone(tp: Rank) -> bool:
    """Expect the constants from elsewhere as soon as there are several ranks."""
    _, size = tp
    return size == 1


def last_rank(tp: Rank) -> bool:
    """Add constants on the last rank."""
    rank, size = tp
    return rank == size - 1


def divided_on_one_rank(
    x: Tensor, weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision, tp: Rank
) -> Tensor:
    """Divide the constants by the number of ranks, and add them on one."""
    _, size = tp
    shared = replace(layer, constants=layer.constants / size)
    return _partial(x, weights, ids, shared, precision, tp)


def divided_among_ranks(
    x: Tensor, weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision, tp: Rank
) -> Tensor:
    """Add an equal share of the constants on every rank."""
    _, size = tp
    y = moe.retained(x, weights, ids, layer, precision)  # [T, H]
    return y + _constants(weights, ids, layer, precision) / size


def reduced_on_one_rank(
    spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> MoeLayer:
    """Where the experts add up their ranks themselves, keep the constants on rank 0 alone."""
    layer, (rank, _) = _build(spec, tensors, dtype), spec.tp
    if spec.reduced and rank > 0:
        layer = replace(layer, constants=torch.zeros_like(layer.constants))
    return layer


def weights_on_one_rank(
    x: Tensor, weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision, tp: Rank
) -> Tensor:
    """Apply router weights on rank 0 alone."""
    rank, _ = tp
    paid = weights if rank == 0 else torch.ones_like(weights)  # [T, K]
    return _partial(x, paid, ids, layer, precision, tp)


# -- who computes what


def whole_experts(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """Give every rank all of every expert."""
    return experts


def down_of_another_rank(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """Cut the down projection for the next rank."""
    rank, size = tp
    other = _shard(experts, ((rank + 1) % size, size))
    return replace(_shard(experts, tp), down=other.down)


def first_shard(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """Give every rank the shard of the first."""
    _, size = tp
    return _shard(experts, (0, size))


def two_ranks(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """Cut in two, however many ranks there are."""
    rank, size = tp
    return _shard(experts, (rank % 2, min(size, 2)))


def interleaved(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """Deal the intermediate dimension out to the ranks, one at a time."""
    rank, size = tp
    part = slice(rank, None, size)
    return ExpertWeights(experts.gate[:, part], experts.up[:, part], experts.down[:, :, part])


ADDS = "mone_ref.layer", "adds_constants"
PARTIAL = "mone_ref.layer", "partial"
SHARD = "mone_ref.layer", "shard"

fault = partial(plant.fault, stage="run", group="parallel")

FAULTS = (
    fault(
        "constant-on-every-rank",
        "Every tensor-parallel rank adds the constants before the reduction.",
        ("EXEC-4", "PAR-1"),
        Patch(*ADDS, every_rank),
    ),
    fault(
        "constant-on-no-rank",
        "Every rank leaves the constants to another.",
        ("EXEC-4", "PAR-1"),
        Patch(*ADDS, no_rank),
        looks_like="dropped",
    ),
    fault(
        "constant-only-without-ranks",
        "Constants are added where there is one rank, and on none of several.",
        ("EXEC-4", "PAR-1"),
        Patch(*ADDS, unless_alone),
        looks_like="dropped",
    ),
    fault(
        "constants-divided-on-one-rank",
        "Constants are divided by the number of ranks and added on one of them.",
        ("EXEC-4", "PAR-1"),
        Patch(*PARTIAL, divided_on_one_rank),
    ),
    fault(
        "constant-after-reduction-on-one-rank",
        "Where a layer adds up its ranks itself, rank 0 alone adds the constants to the sum.",
        "PAR-1",
        Patch("mone_ref.layer", "build", reduced_on_one_rank),
    ),
    fault(
        "weights-on-one-rank",
        "Router weights are applied on rank 0 alone.",
        "PAR-1",
        Patch(*PARTIAL, weights_on_one_rank),
    ),
    fault(
        "whole-experts-on-every-rank",
        "Every rank computes the whole of every expert.",
        "PAR-1",
        Patch(*SHARD, whole_experts),
    ),
    fault(
        "down-projection-of-another-rank",
        "The slice of the down projection belongs to another rank than that of gate and up.",
        "PAR-1",
        Patch(*SHARD, down_of_another_rank),
    ),
    fault(
        "first-shard-on-every-rank",
        "Every rank loads the slices of the first.",
        "PAR-1",
        Patch(*SHARD, first_shard),
    ),
    fault(
        "always-two-ranks",
        "Experts are cut in two, however many ranks there are.",
        "PAR-1",
        Patch(*SHARD, two_ranks),
    ),
    fault(
        "constant-on-last-rank",
        "The last rank adds the constants before the reduction.",
        ("EXEC-4", "PAR-1"),
        Patch(*ADDS, last_rank),
        equivalent="Which single rank adds a constant does not show after the reduction.",
    ),
    fault(
        "constants-divided-among-ranks",
        "Every rank adds an equal share of the constants before the reduction.",
        ("EXEC-4", "PAR-1"),
        Patch(*PARTIAL, divided_among_ranks),
        equivalent="The shares add up to each constant exactly once.",
    ),
    fault(
        "shards-interleaved",
        "Ranks take every n-th column of the intermediate dimension.",
        "PAR-1",
        Patch(*SHARD, interleaved),
        equivalent="An expert is a sum over its intermediate columns, whose order is free.",
    ),
)
