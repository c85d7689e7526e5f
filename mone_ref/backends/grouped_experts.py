"""One MoE layer on ``torch.nn.functional.grouped_mm``: fast where the oracle is plain.

Retained routes are sorted by physical row, so that each product over all experts is one call.
A route of weight zero is not scheduled: a substituted expert costs no product (SEM-4), and its
constant comes from a table. Equal to ``mone_ref.moe`` within rounding (SEM-1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mone_ref import moe
from mone_ref.backends import left_products
from mone_ref.experts import ExpertWeights
from mone_ref.integrations.substituted_experts import look_up, tables
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision, product

ROW_BYTES = 16
"""grouped_mm takes matrices whose rows are a multiple of this long."""

FEW_ROWS = 8
"""Rows per expert up to which transposing costs less than it saves (measured with AMX)."""


@dataclass
class GroupedLayer:
    """A ``MoeLayer`` whose retained experts lie in two stacks.

    ``gate_up`` ``[R, 2I, H+]``, gate above up, and ``down`` ``[R, H, I+]``: H+ and I+ are H and
    I, or wider by zeros where ``ROW_BYTES`` asks for it. ``layer.experts`` are views of them.
    ``row_of`` and ``constant_of`` ``[E]`` take a logical id to its row or its constant; R and S
    stand for none.
    """

    layer: MoeLayer
    gate_up: Tensor
    down: Tensor
    row_of: Tensor
    constant_of: Tensor


def build(layer: MoeLayer) -> GroupedLayer:
    """Stack the experts of a layer, on its device and in its dtype."""
    old, constants = layer.experts, layer.constants
    rows, inner, hidden = old.gate.shape
    gate_up = old.gate.new_zeros(rows, 2 * inner, aligned(hidden, old.gate.dtype))  # [R, 2I, H+]
    down = old.down.new_zeros(rows, hidden, aligned(inner, old.down.dtype))  # [R, H, I+]
    views = ExpertWeights(
        gate=gate_up[:, :inner, :hidden], up=gate_up[:, inner:, :hidden], down=down[:, :, :inner]
    )
    for view, tensor in ((views.gate, old.gate), (views.up, old.up), (views.down, old.down)):
        view.copy_(tensor)
    places = {name: t.to(constants.device) for name, t in tables(layer.substitution).items()}
    return GroupedLayer(replace(layer, experts=views), gate_up, down, **places)


def aligned(size: int, dtype: torch.dtype) -> int:
    """The least row length from ``size`` on that grouped_mm takes."""
    step = ROW_BYTES // dtype.itemsize
    return -(-size // step) * step


def forward(x: Tensor, grouped: GroupedLayer, precision: Precision, record: Record) -> Tensor:
    """The whole layer, router and shared experts included: ``[T, H]`` -> ``[T, H]``."""
    layer = grouped.layer
    logits = product(x, layer.router, precision)  # [T, E]
    weights, ids = moe.routes(logits, layer, precision)  # [T, K]
    y = forward_routed(x, weights, ids, grouped)  # [T, H]
    if layer.shared is not None:
        y = y + moe.shared(x, layer.shared, precision)

    record("moe_in", x)
    record("router_weights", weights)
    record("router_ids", ids)
    record("moe_out", y)
    return y


def forward_routed(
    x: Tensor, weights: Tensor, ids: Tensor, grouped: GroupedLayer, constants: bool = True
) -> Tensor:
    """Both sums of SEM-1 from routes over logical experts ``[T, K]``: ``[T, H]`` -> ``[T, H]``.

    Without ``constants``, the retained sum alone: what the other ranks give (EXEC-4).
    """
    y = retained_sum(x, *rewrite_routes(weights, ids, grouped), grouped)  # [T, H]
    if not constants or len(grouped.layer.constants) == 0:
        return y
    return y + constant_sum(weights, ids, grouped).to(y.dtype)


def rewrite_routes(weights: Tensor, ids: Tensor, grouped: GroupedLayer) -> tuple[Tensor, Tensor]:
    """Weights and physical rows ``[T, K]``; what is not retained is weight 0 on row 0 (EXEC-3)."""
    none = len(grouped.gate_up)
    rows = look_up(grouped.row_of, ids, none)  # [T, K]
    absent = rows == none  # [T, K]
    return weights.masked_fill(absent, 0), rows.masked_fill(absent, 0)


def retained_sum(x: Tensor, weights: Tensor, rows: Tensor, grouped: GroupedLayer) -> Tensor:
    """Sum of ``w * expert(x)`` over the routes of each token that weigh anything: ``[T, H]``.

    ``weights`` and physical ``rows`` ``[T, K]``; N of the ``T * K`` routes are scheduled.
    """
    scheduled = weights != 0  # [T, K]
    routes = scheduled.flatten().nonzero()[:, 0]  # [N]
    row_of_route = rows.flatten()[routes]  # [N]
    routes = routes[row_of_route.argsort(stable=True)]  # [N], by row
    counts = row_of_route.bincount(minlength=len(grouped.gate_up))  # [R]
    outputs = expert_outputs(x, routes // weights.shape[1], counts, grouped)  # [N, H]

    places = torch.empty_like(rows)  # [T, K]
    places.view(-1)[routes] = torch.arange(len(routes), device=routes.device)
    return sum_by_token(outputs, places, weights, scheduled)


def expert_outputs(x: Tensor, tokens: Tensor, counts: Tensor, grouped: GroupedLayer) -> Tensor:
    """What the expert of each scheduled route makes of its token: ``[N, H]``.

    ``tokens`` ``[N]`` by physical row; ``counts`` ``[R]``: how many of them each row has.
    """
    inner = grouped.gate_up.shape[1] // 2
    if left_products.pays(x, len(tokens), len(counts)):
        gate_up, down = grouped.gate_up[..., : x.shape[1]], grouped.down[..., :inner]
        return left_products.outputs(x, tokens, counts, gate_up, down)
    ends = counts.cumsum(0, dtype=torch.int32)  # [R]
    inputs = widened(x, grouped.gate_up).index_select(0, tokens)  # [N, H+]
    gate, up = grouped_product(inputs, grouped.gate_up, ends).chunk(2, dim=1)  # [N, I] each
    inside = functional.silu(gate, inplace=True).mul_(up)  # [N, I]
    return grouped_product(widened(inside, grouped.down), grouped.down, ends).contiguous()


def widened(x: Tensor, matrices: Tensor) -> Tensor:
    """Activations as wide as the matrices that they meet: ``[T, H]`` -> ``[T, H+]``."""
    missing = matrices.shape[2] - x.shape[1]
    return functional.pad(x, (0, missing)) if missing else x


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row of ``x`` ``[N, in+]`` times the matrix of its group: ``[N, out]``.

    ``matrices`` ``[R, out, in+]``; ``ends`` ``[R]`` int32: where the rows of each group end.
    On a CPU, few rows in a 16-bit type are faster with the matrix on the left: the result is
    then the transposed view of ``[out, N]``.
    """
    few = 0 < len(x) <= FEW_ROWS * len(matrices)
    if few and x.device.type == "cpu" and x.dtype.itemsize == 2:
        return functional.grouped_mm(matrices, x.T, offs=ends).T
    return functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)


def constant_sum(weights: Tensor, ids: Tensor, grouped: GroupedLayer) -> Tensor:
    """Sum of ``w * v`` over substituted routes, ``[T, H]`` in float32 or wider (SEM-3)."""
    values = grouped.layer.constants  # [S, H]
    wide = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    places = look_up(grouped.constant_of, ids, len(values))  # [T, K]
    return sum_by_token(values.to(wide), places, weights, places < len(values))


def sum_by_token(table: Tensor, places: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Sum of ``w * table[place]`` over the chosen routes of each token: ``[T, H]``.

    ``places``, ``weights`` and ``chosen`` ``[T, K]``. An embedding bag gathers, weighs and adds
    in one pass, in float32 or wider; weights are rounded to the dtype of the table first.
    """
    counts = chosen.sum(dim=1)  # [T]
    return functional.embedding_bag(
        places[chosen],
        table,
        counts.cumsum(0) - counts,  # [T], where the routes of each token begin
        mode="sum",
        per_sample_weights=weights[chosen].to(table.dtype),
    )
