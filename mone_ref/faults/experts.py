"""Wrong experts: how an engine computes and sums the retained ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mone_ref.experts import ExpertWeights, mlp
from mone_ref.faults.plant import Fault, Patch
from mone_ref.precision import Precision


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


LOOP = "mone_ref.experts", "weighted_sum"

FAULTS = (
    Fault(
        "weight-zero-is-computed",
        "Routes of weight zero are computed, and zero times infinity is added.",
        ("SEM-5",),
        "run",
        (Patch(*LOOP, weight_zero_computed),),
        "experts",
    ),
)
