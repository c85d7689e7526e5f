"""Which prompts are fit to judge an engine: those whose routing no honest rounding changes.

A prompt is grown token by token. A token stays only if, in every MoE layer, each
low-precision run selects the expert set of the float64 oracle, with at least half of its
gap between the last selected and the first rejected score (SPEC, Numbers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref import experts, routing
from mone_ref.fill import generator
from mone_ref.fill.recipe import Recipe, RecipeError
from mone_ref.fill.variants import Variant
from mone_ref.loading import Model

MAX_ATTEMPTS = 64  # about two tries a token are usual; far more means a hopeless recipe
FLOAT16_HEADROOM = 2.0**13
KEPT_GAP = 0.5


@dataclass(frozen=True)
class Choice:
    """What one run selects in one layer: sorted ids ``[T, K]`` and the score gap ``[T]``."""

    ids: Tensor
    gap: Tensor


def choices(model: Model, prompt: Sequence[int]) -> list[Choice]:
    """The selection of one run in every MoE layer."""
    trace: dict[str, Tensor] = {}
    model.logits(prompt, trace.__setitem__)
    sizes = model.config.model
    found = []
    for layer in range(sizes.num_layers):
        router_logits = trace[f"layers.{layer}.router_logits"]
        scores = routing.score(router_logits, sizes.router, model.precision.router)  # [T, E]
        best, ids = routing.select(scores, sizes.num_experts)  # [T, E]
        k = sizes.top_k
        gap = best[:, k - 1] - best[:, k] if k < sizes.num_experts else torch.ones(len(prompt))
        found.append(Choice(ids[:, :k].sort(dim=-1).values, gap.to(torch.float64)))
    return found


def first_flip(exact: list[Choice], run: list[Choice]) -> int:
    """First position at which a run's routing is not certified; the length when none."""
    length = len(exact[0].gap)
    for truth, seen in zip(exact, run, strict=True):
        same = (truth.ids == seen.ids).all(dim=-1)  # [T]
        wide = seen.gap >= KEPT_GAP * truth.gap  # [T]
        broken = torch.nonzero(~(same & wide))  # [N, 1]
        if len(broken):
            length = min(length, int(broken[0]))
    return length


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
        exact = choices(oracle, prompt)
        broken = min(first_flip(exact, choices(run.model, prompt)) for run in runs)
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
        for layer, choice in enumerate(choices(oracle, prompt)):
            entry = oracle.substitution.layers.get(layer)
            if entry is None:
                continue
            hit = torch.isin(choice.ids, torch.tensor(entry.substituted)).sum(dim=-1)  # [T]
            counts["none"] += int((hit == 0).sum())
            counts["all"] += int((hit == choice.ids.shape[1]).sum())
            counts["some"] += int(((hit > 0) & (hit < choice.ids.shape[1])).sum())
    return counts


def loudest(model: Model, prompt: Sequence[int]) -> float:
    """Largest magnitude among residuals, MoE inputs and outputs, expert interiors and logits."""
    trace: dict[str, Tensor] = {}
    top = float(model.logits(prompt, trace.__setitem__).abs().max())
    for layer, weights in enumerate(model.weights.layers):
        x = trace[f"layers.{layer}.moe_in"]  # [T, H]
        for row in range(weights.moe.experts.rows):
            inner = experts.interior(x, weights.moe.experts, row, model.precision)  # [T, I]
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
