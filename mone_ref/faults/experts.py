"""Wrong experts: how an engine computes and sums the retained ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref import experts as right
from mone_ref.experts import ExpertWeights
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.precision import Precision, product

# The right steps, bound before anything is planted.
_interior = right.interior
_paid = right.paid
_weighted_sum = right.weighted_sum


# -- inside one expert


def swapped(x: Tensor, experts: ExpertWeights, row: int, precision: Precision) -> Tensor:
    """Activate the up projection instead of the gate."""
    return _interior(x, replace(experts, gate=experts.up, up=experts.gate), row, precision)


def ungated(x: Tensor, experts: ExpertWeights, row: int, precision: Precision) -> Tensor:
    """Leave out the up projection."""
    return torch.nn.functional.silu(product(x, experts.gate[row], precision))  # [N, I]


def gelu(x: Tensor, experts: ExpertWeights, row: int, precision: Precision) -> Tensor:
    """Activate with GELU."""
    gate = product(x, experts.gate[row], precision)  # [N, I]
    return torch.nn.functional.gelu(gate) * product(x, experts.up[row], precision)  # [N, I]


# -- what its output counts


def unweighted(
    x: Tensor, weights: Tensor, experts: ExpertWeights, row: int, precision: Precision
) -> Tensor:
    """Pay every route with one."""
    return _paid(x, torch.ones_like(weights), experts, row, precision)


def squared(
    x: Tensor, weights: Tensor, experts: ExpertWeights, row: int, precision: Precision
) -> Tensor:
    """Apply the weight a second time."""
    return _paid(x, weights.square(), experts, row, precision)


def weighted_input(
    x: Tensor, weights: Tensor, experts: ExpertWeights, row: int, precision: Precision
) -> Tensor:
    """Apply the weight to what goes into the expert."""
    return unweighted(x * weights[:, None].to(x.dtype), weights, experts, row, precision)


# -- which routes are computed


def last_row_counts(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Of several rows of a token the highest overwrites the others."""
    highest = rows.where(weights != 0, -1).amax(dim=-1, keepdim=True)  # [T, 1]
    return _weighted_sum(x, weights.where(rows == highest, 0.0), rows, experts, precision)


def row_0_skipped(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Take every route to row 0 for padding."""
    return _weighted_sum(x, weights.where(rows != 0, 0.0), rows, experts, precision)


def last_row_skipped(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """End the loop one row early."""
    last = experts.rows - 1
    return _weighted_sum(x, weights.where(rows != last, 0.0), rows, experts, precision)


def weight_zero_computed(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Compute every route and multiply by its weight, zero or not."""
    total = torch.zeros(x.shape, dtype=precision.wide)  # [T, H]
    for slot in range(rows.shape[1]):
        for row in range(experts.rows):
            here = rows[:, slot] == row  # [T]
            total[here] += _paid(x[here], weights[here, slot], experts, row, precision)  # [N, H]
    return total


# -- nothing that shows


def rows_from_the_end(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Add up the rows in descending order."""
    mirrored = ExpertWeights(*(part.flip(0) for part in (experts.gate, experts.up, experts.down)))
    return _weighted_sum(x, weights, experts.rows - 1 - rows, mirrored, precision)


INTERIOR = "mone_ref.experts", "interior"
PAID = "mone_ref.experts", "paid"
LOOP = "mone_ref.experts", "weighted_sum"

fault = partial(plant.fault, stage="run", group="experts")

FAULTS = (
    fault(
        "activation-on-up-projection",
        "The activation is applied to the up projection.",
        "SEM-1",
        Patch(*INTERIOR, swapped),
    ),
    fault(
        "up-projection-missing",
        "Experts have no up projection.",
        "SEM-1",
        Patch(*INTERIOR, ungated),
    ),
    fault(
        "gelu-for-silu",
        "Experts are activated with GELU.",
        "SEM-1",
        Patch(*INTERIOR, gelu),
    ),
    fault(
        "retained-unweighted",
        "Outputs of retained experts are added without the router weight.",
        "SEM-1",
        Patch(*PAID, unweighted),
    ),
    fault(
        "retained-weight-squared",
        "Outputs of retained experts are weighted twice.",
        "SEM-1",
        Patch(*PAID, squared),
    ),
    fault(
        "weight-on-expert-input",
        "Router weights multiply what goes into an expert.",
        "SEM-1",
        Patch(*PAID, weighted_input),
    ),
    fault(
        "retained-route-overwrites",
        "Of several retained routes of a token only the one to the highest row counts.",
        "SEM-1",
        Patch(*LOOP, last_row_counts),
    ),
    fault(
        "row-0-is-padding",
        "Routes to row 0 are never computed.",
        "SEM-1",
        Patch(*LOOP, row_0_skipped),
    ),
    fault(
        "last-row-is-skipped",
        "Routes to the last row are never computed.",
        "SEM-1",
        Patch(*LOOP, last_row_skipped),
    ),
    fault(
        "weight-zero-is-computed",
        "Routes of weight zero are computed, and zero times infinity is added.",
        "SEM-5",
        Patch(*LOOP, weight_zero_computed),
    ),
    fault(
        "rows-summed-from-the-end",
        "Outputs of retained experts are added in descending order of rows.",
        "SEM-1",
        Patch(*LOOP, rows_from_the_end),
        equivalent="Precision and order of the retained sum are free (SEM-3).",
    ),
)
