"""Wrong steps of a single layer: what shows only where routes or one rank can be handed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mone_ref import substitution
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights, mlp
from mone_ref.precision import Precision

# The right steps, bound before anything is planted.
_constant_sum = substitution.constant_sum
_rewrite_routes = substitution.rewrite_routes


def narrow_sum(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Round products and every partial sum to bfloat16."""
    total = torch.zeros(len(ids), values.shape[-1], dtype=torch.bfloat16)  # [T, H]
    for slot in range(ids.shape[1]):
        one = slice(slot, slot + 1)
        narrow = weights[:, one].bfloat16(), ids[:, one], values.bfloat16(), substituted
        total = total + _constant_sum(*narrow).bfloat16()
    return total.to(torch.promote_types(values.dtype, torch.float32))


def last_route_counts(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Scatter weights by expert, so that the last of two routes overwrites the first."""
    by_expert = torch.zeros(len(ids), max(substituted, default=0) + 1, dtype=weights.dtype)
    for slot in range(ids.shape[1]):
        here = torch.isin(ids[:, slot], torch.tensor(substituted))  # [T]
        by_expert[here, ids[here, slot]] = weights[here, slot]
    every = torch.arange(by_expert.shape[1]).expand(len(ids), -1)
    return _constant_sum(by_expert, every, values, substituted)


def dense_sum(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """One dense product over all constants, where a weight of zero meets an infinite constant."""
    if not substituted:
        return _constant_sum(weights, ids, values, substituted)
    wide = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    scales = torch.stack(
        [torch.where(ids == expert, weights, 0.0).sum(dim=1) for expert in substituted], dim=1
    )  # [T, S]
    return scales.to(wide) @ values.to(wide)


def wrapped(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Let an id outside the logical range index from the other end."""
    return _rewrite_routes(weights, ids % layer.num_logical, layer)


def row_0_keeps_weight(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Point substituted routes at row 0 and leave them their weight."""
    _, rows = _rewrite_routes(weights, ids, layer)
    outside = (ids < 0) | (ids >= layer.num_logical)  # [T, K]
    return torch.where(outside, 0.0, weights), rows


def weight_zero_computed(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Compute every route and multiply by its weight, zero or not."""
    total = torch.zeros(x.shape, dtype=precision.wide)  # [T, H]
    for slot in range(rows.shape[1]):
        for row in range(experts.rows):
            here = rows[:, slot] == row  # [T]
            paid = weights[here, slot, None].to(precision.wide)  # [N, 1]
            total[here] += paid * mlp(x[here], experts, row, precision)  # [N, H]
    return total


def every_rank(rank: int) -> bool:
    """Add constants whatever the rank."""
    return True
