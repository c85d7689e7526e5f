"""The per-expert loop over compact weights: the first sum of SEM-1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.precision import Precision, product


@dataclass
class ExpertWeights:
    """Retained experts of one layer, stacked by physical row (EXEC-1, EXEC-2).

    ``gate`` and ``up`` ``[R, I, H]``, ``down`` ``[R, H, I]``.
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def rows(self) -> int:
        """Number of physical rows, R."""
        return len(self.gate)


def interior(x: Tensor, experts: ExpertWeights, row: int, precision: Precision) -> Tensor:
    """Inside one expert, ``silu(gate(x)) * up(x)``: ``[N, H]`` -> ``[N, I]``."""
    gate = product(x, experts.gate[row], precision)  # [N, I]
    up = product(x, experts.up[row], precision)  # [N, I]
    return torch.nn.functional.silu(gate) * up


def mlp(x: Tensor, experts: ExpertWeights, row: int, precision: Precision) -> Tensor:
    """One expert on its tokens, unweighted: ``[N, H]`` -> ``[N, H]``."""
    return product(interior(x, experts, row, precision), experts.down[row], precision)


def paid(
    x: Tensor, weights: Tensor, experts: ExpertWeights, row: int, precision: Precision
) -> Tensor:
    """``w * expert(x)`` of one expert on its tokens, weights ``[N]``: ``[N, H]`` -> ``[N, H]``."""
    output = mlp(x, experts, row, precision)  # [N, H]
    return weights[:, None].to(precision.wide) * output


def weighted_sum(
    x: Tensor, weights: Tensor, rows: Tensor, experts: ExpertWeights, precision: Precision
) -> Tensor:
    """Sum of ``w * expert(x)`` over the retained routes of each token: ``[T, H]``.

    ``weights`` and physical ``rows`` ``[T, K]`` as ``rewrite_routes`` returns them. A
    zero-weight route is not computed at all, so that a row 0 that overflows stays without
    effect on the tokens that never chose it (SEM-4, SEM-5).
    """
    dtype = precision.between if precision.round_each_route else precision.wide
    total = torch.zeros(x.shape, dtype=dtype, device=x.device)  # [T, H]
    for row in range(experts.rows):
        tokens, slots = torch.where((rows == row) & (weights != 0))  # [N], [N]
        if len(tokens) == 0:
            continue
        output = paid(x[tokens], weights[tokens, slots], experts, row, precision)  # [N, H]
        total.index_add_(0, tokens, output.to(dtype))
    return total
