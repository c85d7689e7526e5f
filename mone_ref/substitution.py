"""Routes to substituted experts: what they add, and what the expert loop sees instead.

``constant_sum`` is the second sum of SEM-1; ``rewrite_routes`` is EXEC-3. Neither
changes its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mone_ref.config import LayerSubstitution


def constant_sum(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Sum of ``w * v`` over the substituted routes of each token (SEM-1, SEM-3).

    ``weights`` and logical ``ids`` ``[T, K]`` as the router returned them, ``values``
    ``[S, H]`` in ascending order of the ``substituted`` ids. Returns ``[T, H]``, formed in
    float32 or wider with no rounding between routes. A repeated id counts once per route
    (SEM-9), and a constant reaches only the tokens that route to it (LOAD-8).
    """
    wide = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    total = torch.zeros(len(ids), values.shape[-1], dtype=wide, device=values.device)  # [T, H]
    for row, expert in enumerate(substituted):
        tokens, slots = torch.where(ids == expert)  # [N], [N]
        paid = weights[tokens, slots].to(wide)  # [N]
        total.index_add_(0, tokens, paid[:, None] * values[row].to(wide))  # [N, H]
    return total


def rewrite_routes(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Logical routes -> routes over physical rows, ``[T, K]`` kept (EXEC-3).

    A retained expert becomes its row, its position among the retained ids (EXEC-2). Every
    other route, substituted or outside ``[0, E)`` (SEM-8), becomes row 0 with weight 0.
    """
    kept = torch.zeros_like(weights)  # [T, K]
    rows = torch.zeros_like(ids)  # [T, K]
    for row, expert in enumerate(layer.retained):
        here = ids == expert  # [T, K]
        kept[here] = weights[here]
        rows[here] = row
    return kept, rows
