"""Wrong substitution: what an engine does with routes to substituted experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mone_ref import substitution
from mone_ref.config import LayerSubstitution
from mone_ref.faults.plant import Fault, Patch

# The right steps, bound before anything is planted.
_constant_sum = substitution.constant_sum
_rewrite_routes = substitution.rewrite_routes


def no_constants(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Drop the second sum of SEM-1."""
    return torch.zeros_like(_constant_sum(weights, ids, values, substituted))


def unweighted(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Add ``v`` instead of ``w * v``."""
    return _constant_sum(torch.ones_like(weights), ids, values, substituted)


def twice(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Add every constant a second time."""
    return 2 * _constant_sum(weights, ids, values, substituted)


def narrow_sum(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Round products and every partial sum to bfloat16."""
    total = torch.zeros(len(ids), values.shape[-1], dtype=torch.bfloat16)  # [T, H]
    for slot in range(ids.shape[1]):
        one = slice(slot, slot + 1)
        narrow = weights[:, one].bfloat16(), ids[:, one], values.bfloat16(), substituted
        total = total + _constant_sum(*narrow).bfloat16()
    return total.to(torch.promote_types(values.dtype, torch.float32))


def dense_sum(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """One dense product over all constants, where a weight of zero meets an infinite constant."""
    if not substituted:
        return _constant_sum(weights, ids, values, substituted)
    wide = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    scales = torch.stack(
        [torch.where(ids == expert, weights, 0.0).sum(dim=1) for expert in substituted], dim=1
    )  # [T, S]
    return scales.to(wide) @ values.to(wide)


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


def renormalised(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Share the whole of a token's router weight among its retained routes."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    share = kept.sum(dim=-1, keepdim=True)  # [T, 1]
    scale = weights.sum(dim=-1, keepdim=True) / share  # [T, 1]
    return torch.where(share > 0, kept * scale, kept), rows


def logical_id_as_row(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Index the compact weights with the logical id, the last row where it is too large."""
    kept, _ = _rewrite_routes(weights, ids, layer)
    rows = ids.clamp(max=len(layer.retained) - 1)  # [T, K]
    return kept, torch.where(kept != 0, rows, torch.zeros_like(rows))


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


SUM = "mone_ref.substitution", "constant_sum"
REWRITE = "mone_ref.substitution", "rewrite_routes"

FAULTS = (
    Fault(
        "dropped",
        "Substituted routes add nothing.",
        ("SEM-1",),
        "run",
        (Patch(*SUM, no_constants),),
        "substitution",
    ),
    Fault(
        "unweighted",
        "A substituted route adds its constant without the router weight.",
        ("SEM-1",),
        "run",
        (Patch(*SUM, unweighted),),
        "substitution",
    ),
    Fault(
        "renormalised",
        "The weights of substituted routes are handed to the retained routes.",
        ("SEM-2",),
        "run",
        (Patch(*REWRITE, renormalised),),
        "substitution",
    ),
    Fault(
        "twice",
        "Constants are added twice.",
        ("SEM-1",),
        "run",
        (Patch(*SUM, twice),),
        "substitution",
    ),
    Fault(
        "logical-id-as-row",
        "The logical id indexes the compact weights.",
        ("LOAD-1",),
        "run",
        (Patch(*REWRITE, logical_id_as_row),),
        "substitution",
    ),
    Fault(
        "narrow-constant-sum",
        "Constants are weighted and summed in bfloat16.",
        ("SEM-3",),
        "run",
        (Patch(*SUM, narrow_sum),),
        "substitution",
    ),
    Fault(
        "dense-constant-sum",
        "The constants' sum is a dense product, in which zero times infinity is NaN.",
        ("LOAD-8",),
        "run",
        (Patch(*SUM, dense_sum),),
        "substitution",
    ),
    Fault(
        "repeated-id-overwrites",
        "Of two routes of a token to one substituted expert the last one counts.",
        ("SEM-9",),
        "run",
        (Patch(*SUM, last_route_counts),),
        "substitution",
    ),
    Fault(
        "ids-wrap-around",
        "An id outside the logical range indexes from the other end.",
        ("SEM-8",),
        "run",
        (Patch(*REWRITE, wrapped),),
        "substitution",
    ),
    Fault(
        "row-0-keeps-weight",
        "Substituted routes keep their weight on row 0.",
        ("SEM-4", "EXEC-3"),
        "run",
        (Patch(*REWRITE, row_0_keeps_weight),),
        "substitution",
    ),
)
