"""The numbers a layer is held to, where retained experts compute: float64 output and budgets.

The rule is that of whole models (``golden.py``), with the layer's output in the place of
log-probabilities and of logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mone_ref import layer, precision, routing
from mone_ref.backend import COMPUTE_TYPES
from mone_ref.fill.golden import budget
from mone_ref.fill.layer_recipe import LayerRecipe, LayerRecipeError, Values
from mone_ref.fill.variants import RUNS, STORAGE, UNIT_ROUNDOFF, permuted_moe
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision, exact_products, plain

IN_A_LAYER = ("plain", "router-softmax", "each-route", "wide-between-products")
"""The cast points that a single layer has; residual and attention are not in it."""

CLEAR = 4 * UNIT_ROUNDOFF["bfloat16"]
"""Least relative gap between the K-th and the next routing score: a router that rounds its
scores to bfloat16 moves each of them by one unit roundoff at most."""


def golden(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], sizes: Sequence[int]
) -> dict[str, Any]:
    """Output ``[T, H]`` and, per compute type, budgets ``token`` ``[T]`` and ``max``, as lists.

    ``sizes`` are the numbers of tensor-parallel ranks. Raises ``LayerRecipeError`` when
    routing is not beyond doubt.
    """
    with torch.inference_mode(), exact_products():
        truth = output(recipe, call, given, plain(torch.float64))  # [T, H]
        found: dict[str, Any] = {"output": truth.tolist(), "budgets": {}}
        for name in COMPUTE_TYPES:
            runs = torch.stack(list(variants(recipe, call, given, name, sizes)))  # [R, T, H]
            token, top = budget(truth, truth, runs, UNIT_ROUNDOFF[name])
            found["budgets"][name] = {"token": token.tolist(), "max": top.item()}
    return found


def variants(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], name: str, sizes: Sequence[int]
) -> Iterator[Tensor]:
    """Low-precision outputs ``[T, H]`` of one compute type: eight, and one per number of ranks."""
    base = plain(STORAGE[name], tf32=name == "tf32")
    points = precision.cast_points(base)
    chosen = [points[point] for point in IN_A_LAYER if point in points]
    for point in chosen:
        yield output(recipe, call, given, point)
    yield in_log_space(recipe, call, given, base)
    for seed in range(1, RUNS - len(chosen)):
        yield permuted(recipe, call, given, base, seed)
    for size in sizes:
        if size > 1:
            yield summed(recipe, call, given, base, size)


def built(recipe: LayerRecipe, dtype: torch.dtype) -> MoeLayer:
    """The whole layer with its parameters in ``dtype``."""
    return layer.build(recipe.spec("", (0, 1), False), recipe.build(), dtype)


def routes(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], at: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations ``[T, H]``, and routes over logical experts ``[T, K]``."""
    if call == "forward_routed":
        x, weights, ids = recipe.inputs(call, given, at.params)
        return x, weights, ids
    x, logits = recipe.inputs(call, given, at.params)
    rule = built(recipe, at.params).rule
    check_clear(routing.score(logits, rule, torch.float64), recipe.top_k)
    return x, *routing.route(logits, rule, recipe.top_k, at.router)


def check_clear(scores: Tensor, top_k: int) -> None:
    """Raise ``LayerRecipeError`` unless every token's choice is beyond doubt."""
    ordered = scores.sort(dim=-1, descending=True).values  # [T, E]
    if top_k == ordered.shape[1]:
        return
    gap = 1 - ordered[:, top_k] / ordered[:, top_k - 1]  # [T]
    if (gap < CLEAR).any():
        token = int(gap.argmin())
        raise LayerRecipeError(
            f"token {token}: the routing gap {float(gap[token]):.3g} is too small"
        )


def output(recipe: LayerRecipe, call: str, given: Mapping[str, Values], at: Precision) -> Tensor:
    """The layer's output ``[T, H]`` in float64, computed as ``at`` says."""
    x, weights, ids = routes(recipe, call, given, at)
    whole = layer.partial(x, weights, ids, built(recipe, at.params), at, (0, 1))
    return whole.to(torch.float64)


def in_log_space(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], at: Precision
) -> Tensor:
    """Weights as ``exp(logit - logsumexp)`` in the dtype of the parameters, as some routers do.

    Alone in a layer this shows: it errs by ``|logsumexp|`` unit roundoffs, a rounded softmax by
    one. (vLLM's CPU router stood at 5.6 budgets that were made without it.)
    """
    x, weights, ids = routes(recipe, call, given, at)
    if call == "forward":
        logits = recipe.inputs(call, given, at.params)[1]  # [T, E]
        total = logits.logsumexp(dim=-1, keepdim=True)  # [T, 1]
        weights = (logits.gather(1, ids) - total).exp()  # [T, K]
        if recipe.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    y = layer.partial(x, weights, ids, built(recipe, at.params), at, (0, 1))
    return y.to(torch.float64)


def permuted(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], at: Precision, seed: int
) -> Tensor:
    """The same with hidden and intermediate columns in another order."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(recipe.hidden, generator=generator)  # [H]
    inner = torch.randperm(recipe.intermediate, generator=generator)  # [I]
    x, weights, ids = routes(recipe, call, given, at)
    moved = permuted_moe(built(recipe, at.params), hidden, inner, torch.arange(0))
    y = layer.partial(x[:, hidden], weights, ids, moved, at, (0, 1))
    return y[:, hidden.argsort()].to(torch.float64)


def summed(
    recipe: LayerRecipe, call: str, given: Mapping[str, Values], at: Precision, size: int
) -> Tensor:
    """The sum of ``size`` partial outputs, each rounded before the reduction."""
    x, weights, ids = routes(recipe, call, given, at)
    whole = built(recipe, at.params)
    partials = [
        layer.partial(
            x,
            weights,
            ids,
            replace(whole, experts=layer.shard(whole.experts, (rank, size))),
            at,
            (rank, size),
        )
        for rank in range(size)
    ]
    return torch.stack(partials).to(torch.float64).sum(dim=0)


def as_text(golden: Mapping[str, Any]) -> str:
    """The file of a golden: JSON, one token a line, every float64 exactly."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in golden["output"])
    budgets = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(budget)}" for name, budget in golden["budgets"].items()
    )
    return f'{{"output": [\n{rows}\n],\n"budgets": {{\n{budgets}\n}}}}\n'
