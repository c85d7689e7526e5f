"""Faults of substitution that few tokens, experts, layers or prompts show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref import loading, moe, substitution
from mone_ref.config import LayerSubstitution, ModelConfig
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.faults.substitution import is_one_of
from mone_ref.loading import Model
from mone_ref.model import decoder as decoders
from mone_ref.model.decoder import Decoder
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision, product

# The right steps, bound before anything is planted.
_constant_sum = substitution.constant_sum
_forward = moe.forward
_logits = decoders.logits
_rewrite_routes = substitution.rewrite_routes
_routes = moe.routes
_score_each = loading.score_each


# -- some routes


def first_slot_only(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Look at the best route of a token."""
    return _constant_sum(weights[:, :1], ids[:, :1], values, substituted)


def last_slot_only(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Look at the last route of a token."""
    return _constant_sum(weights[:, -1:], ids[:, -1:], values, substituted)


def last_slot_forgotten(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Look at all routes of a token but the last."""
    return _constant_sum(weights[:, :-1], ids[:, :-1], values, substituted)


def one_constant_a_token(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Look up the first substituted route of a token, and no other."""
    earlier = is_one_of(ids, substituted).cumsum(dim=-1) > 1  # [T, K]
    return _constant_sum(weights.where(~earlier, 0.0), ids, values, substituted)


def zero_is_unset(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Take a weight of zero for one that was never set, and count the constant in full."""
    return _constant_sum(weights.where(weights != 0, 1.0), ids, values, substituted)


# -- some tokens


def not_where_all(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Skip the tokens that have no retained route."""
    every = is_one_of(ids, substituted).all(dim=-1, keepdim=True)  # [T, 1]
    return _constant_sum(weights.where(~every, 0.0), ids, values, substituted)


def not_where_one(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Skip the tokens that have one substituted route."""
    single = is_one_of(ids, substituted).sum(dim=-1, keepdim=True) == 1  # [T, 1]
    return _constant_sum(weights.where(~single, 0.0), ids, values, substituted)


def retained_skipped(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Leave out the retained routes of a token that has a substituted one."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    mixed = is_one_of(ids, layer.substituted).any(dim=-1, keepdim=True)  # [T, 1]
    return kept.where(~mixed, 0.0), rows


def zeroed(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """Clear the output of a token without a retained route."""
    return _forward(x, layer, precision, record).where(~all_substituted(x, layer, precision), 0.0)


def passed_through(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """Give a token without a retained route back as it came."""
    y = _forward(x, layer, precision, record)  # [T, H]
    return y.where(~all_substituted(x, layer, precision), x.to(y.dtype))


def all_substituted(x: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """Which tokens have no retained route, ``[T, 1]``."""
    _, ids = moe.routes(product(x, layer.router, precision), layer, precision)  # [T, K]
    return is_one_of(ids, layer.substitution.substituted).all(dim=-1, keepdim=True)


def not_alone(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Leave out the constants of a token that comes by itself, as in decoding."""
    seen = substituted if len(ids) > 1 else ()
    return _constant_sum(weights, ids, values, seen)


def not_past_16(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Stop after sixteen tokens."""
    early = torch.arange(len(ids))[:, None] < 16  # [T, 1]
    return _constant_sum(weights.where(early, 0.0), ids, values, substituted)


def full_blocks_only(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Leave out the tokens after the last full block of four."""
    full = torch.arange(len(ids))[:, None] < len(ids) // 4 * 4  # [T, 1]
    return _constant_sum(weights.where(full, 0.0), ids, values, substituted)


# -- some experts, some columns


def not_expert_0(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Take id 0 for padding."""
    return _constant_sum(weights.where(ids != 0, 0.0), ids, values, substituted)


def not_last_constant(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """End the loop over constants one early."""
    return _constant_sum(weights, ids, values, substituted[:-1])


def not_last_expert(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Take the last logical expert for retained, in the last row."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    last = ids == layer.num_logical - 1  # [T, K]
    return torch.where(last, weights, kept), torch.where(last, len(layer.retained) - 1, rows)


def one_digit(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Keep the last digit of an id."""
    return _constant_sum(weights, ids % 10, values, substituted)


def columns_in_eights(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Leave out the columns after the last full block of eight."""
    total = _constant_sum(weights, ids, values, substituted)  # [T, H]
    total[:, total.shape[1] // 8 * 8 :] = 0
    return total


def every_expert_alike(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Skip the router of a substituted layer where K equals E, and pay all experts alike."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    if layer.top_k < layer.substitution.num_logical or not layer.substitution.listed:
        return weights, ids
    return torch.full_like(weights, 1 / layer.top_k), ids


# -- some layers


def last_layer_forgotten(
    prompt: Tensor,
    decoder: Decoder,
    model: ModelConfig,
    precision: Precision,
    record: Record = decoders.ignore,
) -> Tensor:
    """Add constants in every layer but the last of the model."""
    last = len(decoder.layers) - 1
    return _logits(prompt, without_constants(decoder, [last]), model, precision, record)


def without_constants(decoder: Decoder, indices: Sequence[int]) -> Decoder:
    """The same weights, with the constants of some layers at zero."""
    layers = [
        replace(layer, mlp=replace(mlp, constants=torch.zeros_like(mlp.constants)))
        if index in indices and isinstance(mlp := layer.mlp, MoeLayer)
        else layer
        for index, layer in enumerate(decoder.layers)
    ]
    return replace(decoder, layers=layers)


# -- some prompts


def first_prompt_only(
    model: Model, prompts: Sequence[Sequence[int]], record: Record
) -> list[Tensor]:
    """Add constants to the first prompt of a batch, and to no other."""
    silent = without_all_constants(model)
    return _score_each(model, prompts[:1], record) + _score_each(silent, prompts[1:], record)


def one_prompt_only(model: Model, prompts: Sequence[Sequence[int]], record: Record) -> list[Tensor]:
    """Add constants to a prompt that comes alone, and to none of a batch."""
    alone = len(prompts) == 1
    return _score_each(model if alone else without_all_constants(model), prompts, record)


def without_all_constants(model: Model) -> Model:
    """The same model, with every constant at zero."""
    weights = without_constants(model.weights, range(len(model.weights.layers)))
    return Model(model.config, weights, model.precision)


SUM = "mone_ref.substitution", "constant_sum"
REWRITE = "mone_ref.substitution", "rewrite_routes"
FORWARD = "mone_ref.moe", "forward"
LOGITS = "mone_ref.model.decoder", "logits"
SCORE = "mone_ref.loading", "score_each"

fault = partial(plant.fault, stage="run", group="substitution")

FAULTS = (
    fault(
        "first-slot-only",
        "Only the best route of a token can add a constant.",
        "SEM-1",
        Patch(*SUM, first_slot_only),
    ),
    fault(
        "last-slot-only",
        "Only the last route of a token can add a constant.",
        "SEM-1",
        Patch(*SUM, last_slot_only),
    ),
    fault(
        "last-slot-forgotten",
        "The last route of a token never adds a constant.",
        "SEM-1",
        Patch(*SUM, last_slot_forgotten),
    ),
    fault(
        "one-constant-a-token",
        "Only the first substituted route of a token adds its constant.",
        "SEM-1",
        Patch(*SUM, one_constant_a_token),
    ),
    fault(
        "weight-zero-counts-in-full",
        "A constant whose weight is zero is added without a weight.",
        "SEM-1",
        Patch(*SUM, zero_is_unset),
    ),
    fault(
        "no-constants-where-all-substituted",
        "Constants are dropped where all routes of a token are substituted.",
        "SEM-1",
        Patch(*SUM, not_where_all),
    ),
    fault(
        "no-constant-where-one-substituted",
        "A constant is dropped where it is the only one of its token.",
        "SEM-1",
        Patch(*SUM, not_where_one),
    ),
    fault(
        "retained-skipped-beside-constant",
        "Retained routes are left out where a token has a substituted one.",
        "SEM-1",
        Patch(*REWRITE, retained_skipped),
    ),
    fault(
        "all-substituted-is-zero",
        "The output is zero where all routes of a token are substituted.",
        "SEM-1",
        Patch(*FORWARD, zeroed),
        looks_like="no-constants-where-all-substituted",
    ),
    fault(
        "all-substituted-passes-through",
        "The layer returns its input where all routes of a token are substituted.",
        "SEM-1",
        Patch(*FORWARD, passed_through),
    ),
    fault(
        "no-constants-for-single-token",
        "Constants are dropped where a layer gets one token, as in decoding.",
        "SEM-1",
        Patch(*SUM, not_alone),
    ),
    fault(
        "no-constants-after-16-tokens",
        "Constants are dropped after the sixteenth token.",
        "SEM-1",
        Patch(*SUM, not_past_16),
    ),
    fault(
        "no-constants-after-full-blocks",
        "Constants are dropped for the tokens after the last full block of four.",
        "SEM-1",
        Patch(*SUM, full_blocks_only),
    ),
    fault(
        "expert-0-is-padding",
        "Routes to a substituted expert 0 add nothing.",
        "SEM-1",
        Patch(*SUM, not_expert_0),
    ),
    fault(
        "last-constant-forgotten",
        "The constant of the highest substituted id is never added.",
        "SEM-1",
        Patch(*SUM, not_last_constant),
    ),
    fault(
        "last-expert-is-retained",
        "A substituted expert E-1 computes the last row as well.",
        "LOAD-1",
        Patch(*REWRITE, not_last_expert),
    ),
    fault(
        "one-digit-ids",
        "Constants are looked up by the last digit of an id.",
        "FMT-5",
        Patch(*SUM, one_digit),
    ),
    fault(
        "columns-after-full-blocks",
        "Constants lack the columns after the last full block of eight.",
        "SEM-1",
        Patch(*SUM, columns_in_eights),
    ),
    fault(
        "no-routing-where-k-is-e",
        "Where K equals E every expert of a substituted layer gets the same weight.",
        "SEM-1",
        Patch("mone_ref.moe", "routes", every_expert_alike),
    ),
    fault(
        "no-constants-in-last-layer",
        "Constants are dropped in the last layer of the model.",
        "SEM-1",
        Patch(*LOGITS, last_layer_forgotten),
    ),
    fault(
        "constants-of-first-prompt-only",
        "Constants reach the first prompt of a batch, and no other.",
        "SEM-1",
        Patch(*SCORE, first_prompt_only),
    ),
    fault(
        "no-constants-in-a-batch",
        "Constants reach a prompt that comes alone, and none of a batch.",
        "SEM-1",
        Patch(*SCORE, one_prompt_only),
    ),
)
