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
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mone_ref import experts, routing
from mone_ref.fill import generator
from mone_ref.fill.recipe import Recipe, RecipeError
from mone_ref.fill.variants import Variant
from mone_ref.loading import Model
from mone_ref.moe import MoeLayer

MAX_ATTEMPTS = 256  # a few tries a token are usual; far more means a hopeless recipe
FLOAT16_HEADROOM = 2.0**13
GAP_TO_ERROR = 4.0
"""Two experts may err in opposite directions, and half of the gap must remain."""


Contest = tuple[Tensor, int]
"""Entrants ``[T, N]`` and how many of the highest are taken."""


def contests(model: Model, prompt: Sequence[int]) -> list[Contest]:
    """Everything that routing decides in one run, in every MoE layer, in float64."""
    trace: dict[str, Tensor] = {}
    model.logits(prompt, trace.__setitem__)
    return list(of_trace(trace, model.weights.moe_layers))


def of_trace(trace: Mapping[str, Tensor], layers: Mapping[int, MoeLayer]) -> Iterator[Contest]:
    """The same from what a run recorded, and the MoE layers by index."""
    for index, layer in layers.items():
        yield from of_layer(trace[f"layers.{index}.router_logits"].double(), layer)


def of_layer(logits: Tensor, layer: MoeLayer) -> list[Contest]:
    """What one layer decides from its logits ``[T, E]``: experts, and groups before them.

    Scores of every rule rise with the logits, so that without a correction the contest may be
    looked at in logits, where errors of rounding are born.
    """
    rule = layer.rule
    if layer.correction is None and rule.groups is None:
        return [(logits, layer.top_k)]
    scores = routing.score(logits, rule, logits.dtype)  # [T, E]
    preferred = routing.corrected(scores, layer.correction)  # [T, E]
    if rule.groups is None:
        return [(preferred, layer.top_k)]
    ranks = routing.standing(preferred, rule.groups)  # [T, G]
    inside = routing.within_groups(preferred, rule.groups)  # [T, E]
    return [(ranks, rule.groups.chosen), (inside, layer.top_k)]


def selection_gap(entrants: Tensor, taken: int) -> Tensor:
    """Last taken minus first rejected: ``[..., N]`` -> ``[...]``; infinite where all are taken."""
    best = entrants.sort(dim=-1, descending=True).values
    if taken == entrants.shape[-1]:
        return torch.full(entrants.shape[:-1], torch.inf, dtype=entrants.dtype)
    return best[..., taken - 1] - best[..., taken]


def first_uncertified(exact: Sequence[Contest], runs: Sequence[Sequence[Contest]]) -> int:
    """First position whose routing an honest rounding may change; T when there is none.

    Every run holds the same contests as ``exact``, in the same order.
    """
    length = len(exact[0][0])
    safe = torch.ones(length, dtype=torch.bool)  # [T]
    for (entrants, taken), *others in zip(exact, *runs, strict=True):
        # Excluded in both runs, at minus infinity: no error. In one of them: an infinite one.
        errors = [(run - entrants).abs().nan_to_num(nan=0.0, posinf=torch.inf) for run, _ in others]
        error = torch.stack(errors).amax(dim=(0, -1))  # [T]
        gap = selection_gap(entrants, taken)  # [T]
        unclear = torch.stack([run for run, _ in others]).isnan().any(dim=(0, -1))  # [T]
        safe &= (gap >= GAP_TO_ERROR * error) & (gap > 0) & ~unclear
    broken = torch.nonzero(~safe)  # [N, 1]
    return int(broken[0]) if len(broken) else length


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
        seen = [contests(run.model, prompt) for run in runs]
        broken = first_uncertified(contests(oracle, prompt), seen)
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
