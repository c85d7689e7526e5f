"""Wrong substitution: what an engine does with routes to substituted experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref import layer as layers
from mone_ref import moe, substitution
from mone_ref.backend import LayerSpec
from mone_ref.config import LayerSubstitution
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision

# The right steps, bound before anything is planted.
_build = layers.build
_constant_sum = substitution.constant_sum
_constants = moe.constants
_rewrite_routes = substitution.rewrite_routes


# -- what a constant counts


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


def squared(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Apply the weight a second time."""
    return _constant_sum(weights.square(), ids, values, substituted)


def averaged(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Take the mean over a token's substituted routes."""
    total = _constant_sum(weights, ids, values, substituted)  # [T, H]
    return total / is_one_of(ids, substituted).sum(dim=-1, keepdim=True).clamp(min=1)


def over_top_k(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Divide by the number of routes of a token."""
    return _constant_sum(weights, ids, values, substituted) / ids.shape[1]


def times_rows(weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """Add the constants once for every retained expert."""
    return _constants(weights, ids, layer, precision) * layer.experts.rows


# -- which weight, which constant


def first_weight(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Pay every constant of a token with the weight of its first route."""
    return _constant_sum(weights[:, :1].expand_as(weights), ids, values, substituted)


def next_token(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Pay constants with the weights of the next token."""
    return _constant_sum(weights.roll(-1, dims=0), ids, values, substituted)


def slot_major(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Flatten the weights slot by slot and the ids token by token."""
    return _constant_sum(weights.T.reshape(weights.shape), ids, values, substituted)


def descending(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Look constants up as if their ids were stored in descending order."""
    return _constant_sum(weights, ids, values, substituted[::-1])


def id_as_index(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Index the constants with the logical id, the last one where it is too large."""
    indexed = values[[min(expert, len(values) - 1) for expert in substituted]]  # [S, H]
    return _constant_sum(weights, ids, indexed, substituted)


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
        here = is_one_of(ids[:, slot], substituted)  # [T]
        by_expert[here, ids[here, slot]] = weights[here, slot]
    every = torch.arange(by_expert.shape[1]).expand(len(ids), -1)
    return _constant_sum(by_expert, every, values, substituted)


def largest_id(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Look no further than the largest id of the batch, which a batch of no token lacks."""
    largest = int(ids.max())
    seen = [expert for expert in substituted if expert <= largest]
    return _constant_sum(weights, ids, values, seen)


def repeated_padding(total: Tensor, width: int) -> Tensor:
    """Read past the end of a constant where activations are wider."""
    columns = torch.arange(max(width, total.shape[1])) % total.shape[1]  # [W]
    return total[:, columns]


# -- what the expert loop sees


def renormalised(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Share the whole of a token's router weight among its retained routes."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    share = kept.sum(dim=-1, keepdim=True)  # [T, 1]
    scale = weights.sum(dim=-1, keepdim=True) / share  # [T, 1]
    return torch.where(share > 0, kept * scale, kept), rows


def redistributed(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Share the weight of a token's substituted routes equally among its retained ones."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    lost = (weights - kept).sum(dim=-1, keepdim=True)  # [T, 1]
    count = (kept != 0).sum(dim=-1, keepdim=True)  # [T, 1]
    return torch.where(kept != 0, kept + lost / count, kept), rows


def logical_id_as_row(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Index the compact weights with the logical id, the last row where it is too large."""
    kept, _ = _rewrite_routes(weights, ids, layer)
    rows = ids.clamp(max=len(layer.retained) - 1)  # [T, K]
    return kept, torch.where(kept != 0, rows, torch.zeros_like(rows))


def row_off_by_one(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Count the rows of a substituted layer from one, the last row where that is too large."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    last, first = len(layer.retained) - 1, 1 if layer.listed else 0
    return kept, torch.where(kept != 0, (rows + first).clamp(max=last), rows)


def rows_descending(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Look the rows of a substituted layer up in descending order of the retained ids."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    moved = (kept != 0) & bool(layer.listed)  # [T, K]
    return kept, torch.where(moved, len(layer.retained) - 1 - rows, rows)


def ids_sorted(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Sort the ids of a token before they are rewritten, and leave the weights where they are."""
    ordered = ids.sort(dim=-1).values if layer.listed else ids  # [T, K]
    return _rewrite_routes(weights, ordered, layer)


def wrapped(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Let an id outside the logical range index from the other end."""
    return _rewrite_routes(weights, ids % layer.num_logical, layer)


def clamped(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Move an id outside the logical range to the nearest one inside."""
    return _rewrite_routes(weights, ids.clamp(0, layer.num_logical - 1), layer)


def row_0_keeps_weight(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Point substituted routes at row 0 and leave them their weight."""
    _, rows = _rewrite_routes(weights, ids, layer)
    outside = (ids < 0) | (ids >= layer.num_logical)  # [T, K]
    return torch.where(outside, 0.0, weights), rows


def row_0_first_weight(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Point substituted routes at row 0 and give them the weight of the first slot."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    return torch.where(is_one_of(ids, layer.substituted), weights[:, :1], kept), rows


def to_last_row(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Point substituted routes at the last row, with weight 0."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    return kept, rows.where(~is_one_of(ids, layer.substituted), len(layer.retained) - 1)


def routes_left_out(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Mark substituted routes with row -1 for a kernel that skips them."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    return kept, rows.where(~is_one_of(ids, layer.substituted), -1)


def narrow_weights(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Pass the weights of retained routes in a substituted layer through bfloat16."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    return (kept.bfloat16().to(kept.dtype) if layer.listed else kept), rows


def in_place(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Write the rewritten routes over those of the router."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    return weights.copy_(kept), ids.copy_(rows)


def is_one_of(ids: Tensor, experts: Sequence[int]) -> Tensor:
    """Which ids name one of some experts."""
    return torch.isin(ids, torch.tensor(experts, dtype=ids.dtype))


# -- which list counts


def list_by_last_digit(
    spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> MoeLayer:
    """Take the list of layer 3 for layer 13, with the constants of layer 13."""
    layer = _build(spec, tensors, dtype)
    own = layer.substitution
    listed = spec.declared.get(own.layer % 10, own.listed)
    return replace(layer, substitution=replace(own, listed=listed))


SUM = "mone_ref.substitution", "constant_sum"
REWRITE = "mone_ref.substitution", "rewrite_routes"

fault = partial(plant.fault, stage="run", group="substitution")

FAULTS = (
    fault(
        "dropped",
        "Substituted routes add nothing.",
        "SEM-1",
        Patch(*SUM, no_constants),
    ),
    fault(
        "unweighted",
        "A substituted route adds its constant without the router weight.",
        "SEM-1",
        Patch(*SUM, unweighted),
    ),
    fault(
        "twice",
        "Constants are added twice.",
        "SEM-1",
        Patch(*SUM, twice),
    ),
    fault(
        "constant-weight-squared",
        "Constants are weighted twice.",
        "SEM-1",
        Patch(*SUM, squared),
    ),
    fault(
        "constants-averaged",
        "The constants of a token are averaged instead of added.",
        "SEM-1",
        Patch(*SUM, averaged),
    ),
    fault(
        "constants-over-top-k",
        "Constants are divided by the number of routes of a token.",
        "SEM-1",
        Patch(*SUM, over_top_k),
    ),
    fault(
        "constants-times-rows",
        "Constants are added once for every retained expert.",
        "SEM-1",
        Patch("mone_ref.moe", "constants", times_rows),
    ),
    fault(
        "constants-with-first-weight",
        "Every constant of a token is paid with the weight of its first route.",
        "SEM-1",
        Patch(*SUM, first_weight),
    ),
    fault(
        "constants-with-weights-of-next-token",
        "Constants are paid with the weights of the next token.",
        "SEM-1",
        Patch(*SUM, next_token),
    ),
    fault(
        "constants-with-slot-major-weights",
        "Constants are paid with weights that are flattened slot by slot.",
        "SEM-1",
        Patch(*SUM, slot_major),
    ),
    fault(
        "constants-in-descending-order",
        "Constants are looked up in descending order of their ids.",
        "FMT-5",
        Patch(*SUM, descending),
    ),
    fault(
        "logical-id-as-constant",
        "The logical id indexes the constants.",
        "FMT-5",
        Patch(*SUM, id_as_index),
    ),
    fault(
        "dense-constant-sum",
        "The constants' sum is a dense product, in which zero times infinity is NaN.",
        "LOAD-8",
        Patch(*SUM, dense_sum),
    ),
    fault(
        "repeated-id-overwrites",
        "Of two routes of a token to one substituted expert the last one counts.",
        "SEM-9",
        Patch(*SUM, last_route_counts),
    ),
    fault(
        "no-token-is-an-error",
        "A layer that gets no token fails.",
        "SEM-1",
        Patch(*SUM, largest_id),
    ),
    fault(
        "padding-is-not-zero",
        "Where activations are padded, constants are read past their end.",
        "SEM-10",
        Patch("mone_ref.layer", "padded", repeated_padding),
    ),
    fault(
        "renormalised",
        "The weights of substituted routes are handed to the retained routes.",
        "SEM-2",
        Patch(*REWRITE, renormalised),
    ),
    fault(
        "redistributed",
        "The weight of substituted routes is shared equally among the retained routes.",
        "SEM-2",
        Patch(*REWRITE, redistributed),
    ),
    fault(
        "logical-id-as-row",
        "The logical id indexes the compact weights.",
        "LOAD-1",
        Patch(*REWRITE, logical_id_as_row),
    ),
    fault(
        "row-off-by-one",
        "Every retained expert is looked up in the row after its own.",
        "LOAD-1",
        Patch(*REWRITE, row_off_by_one),
    ),
    fault(
        "rows-looked-up-descending",
        "Rows are stored in ascending order of retained ids and looked up in descending order.",
        ("EXEC-2", "LOAD-1"),
        Patch(*REWRITE, rows_descending),
    ),
    fault(
        "ids-sorted-without-weights",
        "The ids of a token are sorted before they are rewritten, and their weights are not.",
        ("EXEC-3", "SEM-1"),
        Patch(*REWRITE, ids_sorted),
    ),
    fault(
        "ids-wrap-around",
        "An id outside the logical range indexes from the other end.",
        "SEM-8",
        Patch(*REWRITE, wrapped),
    ),
    fault(
        "ids-are-clamped",
        "An id outside the logical range becomes the nearest one inside.",
        "SEM-8",
        Patch(*REWRITE, clamped),
    ),
    fault(
        "row-0-keeps-weight",
        "Substituted routes keep their weight on row 0.",
        ("SEM-4", "EXEC-3"),
        Patch(*REWRITE, row_0_keeps_weight),
    ),
    fault(
        "row-0-takes-first-weight",
        "Substituted routes compute row 0 with the weight of the token's first route.",
        ("SEM-4", "EXEC-3"),
        Patch(*REWRITE, row_0_first_weight),
    ),
    fault(
        "substituted-to-last-row",
        "Substituted routes become routes of weight zero to the last row.",
        "EXEC-3",
        Patch(*REWRITE, to_last_row),
    ),
    fault(
        "substituted-to-row-minus-one",
        "Substituted routes become routes of weight zero to row -1.",
        "EXEC-3",
        Patch(*REWRITE, routes_left_out),
    ),
    fault(
        "kept-weights-in-bfloat16",
        "The weights of retained routes beside substituted experts pass through bfloat16.",
        "EXEC-3",
        Patch(*REWRITE, narrow_weights),
    ),
    fault(
        "routes-rewritten-in-place",
        "Routes are rewritten before the constants are looked up, in the same memory.",
        "SEM-1",
        Patch(*REWRITE, in_place),
    ),
    fault(
        "list-by-last-digit",
        "A layer takes the list of the layer whose index is the last digit of its own.",
        "EXEC-6",
        Patch("mone_ref.layer", "build", list_by_last_digit),
    ),
)
