"""Wrong precision of the constants' sum: what SEM-3 rules out, and what it leaves free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mone_ref import substitution
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision, round_to_tf32

# The right step, bound before anything is planted.
_constant_sum = substitution.constant_sum


def narrow_weights(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Round router weights to bfloat16."""
    return _constant_sum(weights.bfloat16().float(), ids, values, substituted)


def tf32_inputs(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Round weights and constants to TF32, as a matrix unit does."""
    weights, values = round_to_tf32(weights.float()), round_to_tf32(values.float())
    return _constant_sum(weights, ids, values, substituted)


def each_route(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Products and partial sums rounded to ``dtype`` after every route."""
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros(len(ids), values.shape[-1], dtype=wide)  # [T, H]
    for slot in range(ids.shape[1]):
        one = slice(slot, slot + 1)
        product = _constant_sum(weights[:, one], ids[:, one], values, substituted).to(dtype)
        total = (total + product.to(wide)).to(dtype).to(wide)
    return total


def narrow_routes(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Round products and every partial sum to bfloat16."""
    return each_route(weights, ids, values, substituted, torch.bfloat16)


def routes_in_activation_dtype(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Round products and every partial sum to the dtype of the constants."""
    return each_route(weights, ids, values, substituted, values.dtype)


def all_narrow(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Do everything in bfloat16."""
    narrow = weights.bfloat16().float()
    return narrow_routes(narrow, ids, values.bfloat16(), substituted).to(torch.float32)


def through_float16(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Round the sum to float16 before it is rounded to the dtype of activations."""
    return _constant_sum(weights, ids, values, substituted).half().float()


# -- nothing that shows


def in_float64(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Form the sum in float64."""
    return _constant_sum(weights.double(), ids, values, substituted)


def unrounded(weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """Add the sum to the retained part without rounding it first."""
    return _constant_sum(weights, ids, layer.constants, layer.substitution.substituted)


SUM = "mone_ref.substitution", "constant_sum"
EVERY = ("float32", "bfloat16", "float16")

fault = partial(plant.fault, stage="run", group="substitution")

FAULTS = (
    fault(
        "narrow-constant-sum",
        "Constants are weighted and summed in bfloat16.",
        "SEM-3",
        Patch(*SUM, all_narrow),
        dtypes=EVERY,
    ),
    fault(
        "constant-weights-in-bfloat16",
        "The router weights of constants are rounded to bfloat16.",
        "SEM-3",
        Patch(*SUM, narrow_weights),
    ),
    fault(
        "constant-products-in-bfloat16",
        "Each weighted constant and each partial sum is rounded to bfloat16.",
        "SEM-3",
        Patch(*SUM, narrow_routes),
        dtypes=EVERY,
    ),
    fault(
        "constant-sum-in-activation-dtype",
        "Each weighted constant and each partial sum is rounded to the dtype of activations.",
        "SEM-3",
        Patch(*SUM, routes_in_activation_dtype),
        dtypes=("bfloat16", "float16"),
    ),
    fault(
        "constant-sum-in-tf32",
        "Weights and constants lose all but ten fraction bits before they are multiplied.",
        "SEM-3",
        Patch(*SUM, tf32_inputs),
    ),
    fault(
        "constant-sum-rounded-twice",
        "The constants' sum is rounded to float16 before it is rounded to bfloat16.",
        "SEM-3",
        Patch(*SUM, through_float16),
        dtypes=("bfloat16",),
    ),
    fault(
        "constant-sum-in-float64",
        "The constants' sum is formed in float64.",
        "SEM-3",
        Patch(*SUM, in_float64),
        dtypes=("float32", "bfloat16"),
        equivalent="SEM-3 asks for float32 or wider.",
    ),
    fault(
        "constant-sum-not-rounded",
        "The constants' sum is added to the retained part without the rounding of SEM-3.",
        "SEM-3",
        Patch("mone_ref.moe", "constants", unrounded),
        dtypes=("bfloat16",),
        equivalent="SEM-3 allows one rounding there and asks for none.",
    ),
)
