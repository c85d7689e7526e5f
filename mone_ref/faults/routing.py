"""Wrong routing: which experts a token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref import moe, routing
from mone_ref.families import RouterRule
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.faults.substitution import is_one_of
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision, product

# The right steps, bound before anything is planted.
_constants = moe.constants
_forward = moe.forward
_routes = moe.routes
_score = routing.score
_select = routing.select


# -- what is chosen


def masked(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Put the logits of substituted experts at minus infinity."""
    seen = logits.clone()  # [T, E]
    seen[:, list(layer.substitution.substituted)] = -torch.inf
    return _routes(seen, layer, precision)


def next_best(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Choose among retained experts, with scores over all."""
    if not layer.substitution.listed:
        return _routes(logits, layer, precision)
    correction = layer.correction
    barred = torch.zeros(logits.shape[-1]) if correction is None else correction.clone()  # [E]
    barred[list(layer.substitution.substituted)] = -torch.inf
    return routing.route(logits, layer.rule, layer.top_k, precision.router, barred)


def compact(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Cut the router to the retained experts, and read what it chooses as logical ids."""
    retained = list(layer.substitution.retained)
    correction = None if layer.correction is None else layer.correction[retained]  # [R]
    return _routes(logits[:, retained], replace(layer, correction=correction), precision)


def bounded(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Choose no more experts than there are rows."""
    return _routes(logits, replace(layer, top_k=min(layer.top_k, layer.experts.rows)), precision)


# -- what it is paid with


def slot_major(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Flatten weights slot by slot and read them back token by token."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    return weights.T.reshape(weights.shape), ids


def slots_reversed(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Give the last slot the weight of the first."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    return weights.flip(-1), ids


def raw_logits(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Pay with the logits."""
    _, ids = _routes(logits, layer, precision)
    return logits.gather(-1, ids).to(precision.router), ids


def after_top_k(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Softmax over the chosen logits, where it should run over all."""
    weights, ids = _routes(logits, layer, precision)
    if layer.rule.scoring != "softmax":
        return weights, ids
    shares = logits.gather(-1, ids).to(precision.router).softmax(dim=-1)  # [T, K]
    return routing.scale(shares, layer.rule), ids


def always_normalised(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Normalise whatever the rule says."""
    return _routes(logits, replace(layer, rule=replace(layer.rule, normalise=True)), precision)


def never_normalised(weights: Tensor) -> Tensor:
    """Leave the selected scores as they are."""
    return weights


def over_retained_routes(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Where the rule normalises, divide by the sum over the retained routes."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    if not layer.rule.normalise:
        return weights, ids
    kept = weights.where(~is_one_of(ids, layer.substitution.substituted), 0.0).sum(
        dim=-1, keepdim=True
    )  # [T, 1]
    grown = weights * weights.sum(dim=-1, keepdim=True) / kept  # [T, K]
    return torch.where(kept > 0, grown, weights), ids


def over_retained_experts(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Pay retained routes with a softmax over the retained experts."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    if layer.rule.scoring != "softmax":
        return weights, ids
    scores = _score(logits, layer.rule, precision.router)  # [T, E]
    share = scores[:, list(layer.substitution.retained)].sum(dim=-1, keepdim=True)  # [T, 1]
    raw = routing.weigh(scores, ids)  # [T, K]
    paid = torch.where(is_one_of(ids, layer.substitution.substituted), raw, raw / share)  # [T, K]
    if layer.rule.normalise:
        paid = routing.normalise(paid)
    return routing.scale(paid, layer.rule), ids


def constants_before_normalisation(
    x: Tensor, layer: MoeLayer, precision: Precision, record: Record
) -> Tensor:
    """Pay constants with the scores before they are normalised."""
    logits = product(x, layer.router, precision)  # [T, E]
    _, ids = _routes(logits, layer, precision)  # [T, K]
    scores = _score(logits, layer.rule, precision.router)  # [T, E]
    raw = routing.scale(routing.weigh(scores, ids), layer.rule)  # [T, K]
    silent = replace(layer, constants=torch.zeros_like(layer.constants))
    return _forward(x, silent, precision, record) + _constants(raw, ids, layer, precision)


def sigmoid_scores(router_logits: Tensor, rule: RouterRule, dtype: torch.dtype) -> Tensor:
    """Score every expert by itself."""
    return _score(router_logits, replace(rule, scoring="sigmoid"), dtype)


def narrow_scores(router_logits: Tensor, rule: RouterRule, dtype: torch.dtype) -> Tensor:
    """Score in bfloat16."""
    return _score(router_logits, rule, torch.bfloat16).to(dtype)


# -- nothing that shows


def tie_to_higher_id(preferred: Tensor, count: int) -> Tensor:
    """Resolve ties to the higher id."""
    return preferred.shape[-1] - 1 - _select(preferred.flip(-1), count)


def slots_by_id(preferred: Tensor, count: int) -> Tensor:
    """Return the chosen experts in the order of their ids."""
    return _select(preferred, count).sort(dim=-1).values


def nan_spreads(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Let one NaN logit spoil the weights of every token."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    return weights.where(~logits.isnan().any(), torch.nan), ids


def after_top_k_where_normalised(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Softmax over the chosen logits where the rule normalises."""
    return (after_top_k if layer.rule.normalise else _routes)(logits, layer, precision)


ROUTES = "mone_ref.moe", "routes"
SCORE = "mone_ref.routing", "score"
SELECT = "mone_ref.routing", "select"

fault = partial(plant.fault, stage="run", group="routing")

FAULTS = (
    fault(
        "masked-before-top-k",
        "The router sees retained experts only.",
        "SEM-2",
        Patch(*ROUTES, masked),
    ),
    fault(
        "next-best-retained",
        "A substituted expert gives its slot to the next best retained one.",
        "SEM-2",
        Patch(*ROUTES, next_best),
    ),
    fault(
        "compact-router",
        "The router is cut to the retained experts, and its columns are read as logical ids.",
        ("FMT-1", "SEM-2"),
        Patch(*ROUTES, compact),
    ),
    fault(
        "top-k-bounded-by-rows",
        "A token takes no more routes than there are retained experts.",
        ("FMT-18", "SEM-1"),
        Patch(*ROUTES, bounded),
    ),
    fault(
        "weights-slot-major",
        "Weights are flattened slot by slot and ids token by token.",
        "SEM-1",
        Patch(*ROUTES, slot_major),
    ),
    fault(
        "weights-of-opposite-slot",
        "The weights of a token are matched to its ids in reverse order.",
        "SEM-1",
        Patch(*ROUTES, slots_reversed),
    ),
    fault(
        "raw-logits-as-weights",
        "Routes are paid with router logits.",
        "SEM-1",
        Patch(*ROUTES, raw_logits),
    ),
    fault(
        "sigmoid-for-softmax",
        "Experts are scored by a sigmoid where the family takes a softmax.",
        "SEM-1",
        Patch(*SCORE, sigmoid_scores),
    ),
    fault(
        "softmax-after-top-k",
        "The softmax runs over the chosen logits, where the family does not normalise too.",
        "SEM-1",
        Patch(*ROUTES, after_top_k),
    ),
    fault(
        "always-normalised",
        "Router weights are normalised where the family does not.",
        "SEM-1",
        Patch(*ROUTES, always_normalised),
        looks_like="softmax-after-top-k",
    ),
    fault(
        "never-normalised",
        "Router weights are not normalised where the family does.",
        "SEM-1",
        Patch("mone_ref.routing", "normalise", never_normalised),
    ),
    fault(
        "normalised-over-retained-routes",
        "Router weights are divided by their sum over the retained routes.",
        "SEM-2",
        Patch(*ROUTES, over_retained_routes),
    ),
    fault(
        "softmax-over-retained",
        "Retained routes are paid with a softmax over retained experts.",
        "SEM-2",
        Patch(*ROUTES, over_retained_experts),
    ),
    fault(
        "constants-before-normalisation",
        "Constants are paid with the scores before they are normalised.",
        ("SEM-1", "SEM-2"),
        Patch("mone_ref.moe", "forward", constants_before_normalisation),
    ),
    fault(
        "softmax-in-bfloat16",
        "Router scores are formed in bfloat16 where all else is float32.",
        "SEM-1",
        Patch(*SCORE, narrow_scores),
    ),
    fault(
        "tie-to-higher-id",
        "Of two equal scores the higher id is chosen.",
        "SEM-1",
        Patch(*SELECT, tie_to_higher_id),
        equivalent="No engine is judged on ties: every prompt and every case is clear of them.",
    ),
    fault(
        "slots-by-id",
        "The routes of a token come in the order of their ids, weights with them.",
        "SEM-1",
        Patch(*SELECT, slots_by_id),
        equivalent="SEM-1 is a sum over routes, whose order is free.",
    ),
    fault(
        "nan-row-spreads",
        "A NaN router logit of one token spoils the weights of all tokens.",
        "SEM-1",
        Patch(*ROUTES, nan_spreads),
        equivalent="No engine is judged on NaN router logits: no prompt and no case has one.",
    ),
    fault(
        "softmax-after-top-k-where-normalised",
        "The softmax runs over the chosen logits, where the family normalises.",
        "SEM-1",
        Patch(*ROUTES, after_top_k_where_normalised),
        equivalent="A softmax over all, normalised over the chosen, is a softmax over the chosen.",
    ),
)
