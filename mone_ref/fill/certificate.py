"""Which prompts are fit to judge an engine: those whose routing no honest rounding changes.

A prompt is grown token by token. A token stays only if, in every MoE layer, the float64 gap
between the last selected and the first rejected expert is at least four times the largest
error that any low-precision run makes in that token's router logits. Even if that error hit
both experts in opposite directions, half of the gap would be left (SPEC, Numbers).

That every run selects the oracle's experts would not be enough: a run may agree by luck. In a
trial, a token with a gap of 0.005 and logit errors of 0.014 passed all runs, and flipped on an
honest engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mone_ref import experts
from mone_ref.fill import generator
from mone_ref.fill.recipe import Recipe, RecipeError
from mone_ref.fill.variants import Variant
from mone_ref.loading import Model
from mone_ref.moe import MoeLayer

MAX_ATTEMPTS = 256  # a few tries a token are usual; far more means a hopeless recipe
FLOAT16_HEADROOM = 2.0**13
GAP_TO_ERROR = 4.0
"""Two experts may err in opposite directions, and half of the gap must remain."""


def router_logits(model: Model, prompt: Sequence[int]) -> Tensor:
    """Router logits of one run in every MoE layer: ``[L, T, E]`` float64."""
    trace: dict[str, Tensor] = {}
    model.logits(prompt, trace.__setitem__)
    layers = model.config.model.moe_layers
    return torch.stack([trace[f"layers.{i}.router_logits"].double() for i in layers])


def selection_gap(logits: Tensor, top_k: int) -> Tensor:
    """Last selected minus first rejected logit: ``[..., E]`` -> ``[...]``; infinite at K = E."""
    best = logits.sort(dim=-1, descending=True).values
    if top_k == logits.shape[-1]:
        return torch.full(logits.shape[:-1], torch.inf, dtype=logits.dtype)
    return best[..., top_k - 1] - best[..., top_k]


def first_uncertified(exact: Tensor, runs: Sequence[Tensor], top_k: int) -> int:
    """First position whose routing an honest rounding may change; T when there is none.

    ``exact`` and every run: router logits ``[L, T, E]``. Scores of every rule in
    ``routing.py`` rise with the logits, so that the gap may be taken in logits.
    """
    error = torch.stack([(run - exact).abs().amax(dim=-1) for run in runs]).amax(dim=0)  # [L, T]
    gap = selection_gap(exact, top_k)  # [L, T]
    safe = (gap >= GAP_TO_ERROR * error) & (gap > 0)  # [L, T]; False on NaN
    broken = torch.nonzero(~safe.all(dim=0))  # [N, 1]
    return int(broken[0]) if len(broken) else exact.shape[1]


def grow(
    recipe: Recipe, index: int, length: int, oracle: Model, runs: Iterable[Variant]
) -> list[int]:
    """A certified prompt of ``length`` tokens. Raises ``RecipeError`` when none is found.

    A token that breaks is replaced by its next candidate; earlier tokens cannot be
    affected, since attention is causal.
    """
    runs = list(runs)
    attempts = [0] * length

    def candidate(position: int) -> int:
        return generator.token(recipe.seed, index, position, attempts[position], recipe.vocab_size)

    prompt = [candidate(position) for position in range(length)]
    while True:
        exact = router_logits(oracle, prompt)
        seen = [router_logits(run.model, prompt) for run in runs]
        broken = first_uncertified(exact, seen, recipe.top_k)
        if broken == length:
            return prompt
        attempts[broken] += 1
        if attempts[broken] > MAX_ATTEMPTS:
            raise RecipeError(
                f"{recipe.name}: no certified token for prompt {index}, position {broken}, "
                f"in {MAX_ATTEMPTS} tries"
            )
        prompt[broken] = candidate(broken)


def coverage(oracle: Model, prompts: Sequence[Sequence[int]]) -> Counter[str]:
    """How many (token, substituted layer) pairs have none, some and all routes substituted."""
    counts: Counter[str] = Counter(none=0, some=0, all=0)
    for prompt in prompts:
        trace: dict[str, Tensor] = {}
        oracle.logits(prompt, trace.__setitem__)
        for layer, entry in oracle.substitution.layers.items():
            ids = trace[f"layers.{layer}.router_ids"]  # [T, K]
            hit = torch.isin(ids, torch.tensor(entry.substituted)).sum(dim=-1)  # [T]
            counts["none"] += int((hit == 0).sum())
            counts["all"] += int((hit == ids.shape[1]).sum())
            counts["some"] += int(((hit > 0) & (hit < ids.shape[1])).sum())
    return counts


def loudest(model: Model, prompt: Sequence[int]) -> float:
    """Largest magnitude among residuals, MLP inputs and outputs, MLP interiors and logits."""
    trace: dict[str, Tensor] = {}
    top = float(model.logits(prompt, trace.__setitem__).abs().max())
    for layer, weights in enumerate(model.weights.layers):
        mlp, kind = weights.mlp, "dense"
        if isinstance(mlp, MoeLayer):
            mlp, kind = mlp.experts, "moe"
        x = trace[f"layers.{layer}.{kind}_in"]  # [T, H]
        for row in range(mlp.rows):
            inner = experts.interior(x, mlp, row, model.precision)  # [T, I]
            top = max(top, float(inner.abs().max()))
    return max(top, *(float(value.abs().max()) for value in trace.values()))


def check_headroom(
    recipe: Recipe, runs: Iterable[Variant], prompts: Sequence[Sequence[int]]
) -> None:
    """Raise ``RecipeError`` when a float16 fixture comes near float16's largest value."""
    if "float16" not in recipe.compute_types:
        return
    top = max(loudest(run.model, prompt) for run in runs for prompt in prompts)
    if not top < FLOAT16_HEADROOM:
        raise RecipeError(
            f"{recipe.name}: activations reach {top:.0f}; a fixture that declares float16 "
            f"stays below {FLOAT16_HEADROOM:.0f}"
        )


def check_coverage(recipe: Recipe, oracle: Model, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ``RecipeError`` when a kind of token that some layer can show is never shown."""
    counts = coverage(oracle, prompts)
    for kind in sorted(possible_kinds(oracle)):
        if not counts[kind]:
            raise RecipeError(
                f"{recipe.name}: no token with {kind} of its routes substituted; "
                "try another seed, or more or longer prompts"
            )


def possible_kinds(oracle: Model) -> set[str]:
    """Which of none, some and all can occur, given top-k and the counts of each layer."""
    k = oracle.config.model.top_k
    kinds: set[str] = set()
    for entry in oracle.substitution.layers.values():
        kinds |= {"none"} if len(entry.retained) >= k else set()
        kinds |= {"all"} if len(entry.substituted) >= k else set()
        kinds |= {"some"} if k > 1 else set()
    return kinds
