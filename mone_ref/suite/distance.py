"""How far an engine's answer is from that of another engine, in budgets of the golden.

Distance 0 is the same answer, up to 1 what honest rounding explains, infinite what no
number tells: an answer against a refusal, NaN against a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from mone_ref.backend import Scores
from mone_ref.fill.layer_recipe import Values
from mone_ref.suite import layer_compare
from mone_ref.suite.attempt import Answers
from mone_ref.suite.compare import form_flaw, ids_flaw
from mone_ref.suite.errormap import group
from mone_ref.suite.golden import Budget, GoldenPrompt
from mone_ref.suite.judge import Parts
from mone_ref.suite.layer_cases import LayerCase
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.simulate import Simulated


@dataclass(frozen=True)
class Distance:
    """The worst of all tokens and of the whole tensor, as the judge takes it.

    ``tokens`` holds one ``[T]`` per prompt, the worst of its orders; it is empty where
    the two differ by more than numbers, and for layers.
    """

    ratio: float
    tokens: tuple[Tensor, ...] = field(default=(), repr=False)

    def beyond(self, limit: float) -> tuple[int, int] | None:
        """The first prompt and its first token whose distance is over a limit."""
        for prompt, ratios in enumerate(self.tokens):
            over = torch.nonzero(ratios > limit)
            if len(over):
                return prompt, int(over[0])
        return None


APART = Distance(inf)
EQUAL = Distance(0.0)
BROKEN = frozenset({Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMEOUT})
"""Two engines that broke down are not alike for that."""
CONSTANT_PARTS = ("constants", "output")
"""Answers of a layer in which a case may leave tokens out."""


@dataclass(frozen=True)
class Yardstick:
    """What the distance is measured in: the budgets of the prompts of a case at one compute
    type, or its layer and the dtype."""

    compute: str
    dtype: str
    prompts: tuple[GoldenPrompt, ...] = ()
    layer: LayerCase | None = None


def between(one: Simulated, other: Simulated, yardstick: Yardstick) -> Distance:
    """From what an engine did with a case to what another one does."""
    if one.answers and other.answers:
        return of_answers(one.answers, other.answers, yardstick)
    if one.parts and other.parts and yardstick.layer is not None:
        return Distance(of_parts(one.parts, other.parts, yardstick))
    if one.answers or other.answers or one.parts or other.parts:
        return APART
    if one.result.outcome in BROKEN:
        return APART
    return EQUAL if told(one.result) == told(other.result) else APART


def told(result: Result) -> tuple[str, ...]:
    """What can be compared without an answer: the outcome, and whose fault a refusal names.

    Of allocated rows the sentence about them holds every number.
    """
    groups = sorted({group(code) for code in result.codes})
    return (result.outcome, *groups) if groups else (result.outcome, result.found)


# -- models


def of_answers(
    one: Mapping[str, Answers], other: Mapping[str, Answers], yardstick: Yardstick
) -> Distance:
    """Log-probabilities of every prompt in every order; ``other`` is never a top-n answer."""
    worst, tokens = 0.0, []
    for index, prompt in enumerate(yardstick.prompts):
        per_order = [
            of_prompt(one[order][index], other[order][index].logprobs, prompt, yardstick.compute)
            for order in one
        ]
        if any(ratios is None for ratios, _ in per_order):
            return APART
        tokens.append(torch.stack([r for r, _ in per_order if r is not None]).amax(dim=0))
        worst = max(worst, float(tokens[-1].max()), *(whole for _, whole in per_order))
    return Distance(worst, tuple(tokens))


def of_prompt(
    scores: Scores, other: Tensor, prompt: GoldenPrompt, compute: str
) -> tuple[Tensor | None, float]:
    """Distance of each token ``[T]``, and of the tensor; None where nothing can be compared."""
    if form_flaw(scores, len(prompt.ids)):
        return None, inf
    found = scores.logprobs.to("cpu", torch.float64)  # [T, V] or [T, n]
    budget = prompt.budgets[compute]
    expected, token_budget = other.double()[: len(found)], budget.token[: len(found)]
    if scores.ids is None:
        if found.shape != expected.shape:
            return None, inf
        error = apart(found, expected)  # [T, V]
        return error.square().mean(dim=1).sqrt() / token_budget, float(error.max()) / budget.maximum
    if ids_flaw(scores.ids, expected.shape[1]):
        return None, inf
    error = apart(found, expected.gather(1, scores.ids.cpu().long()))  # [T, n]
    # A mean over the returned ids is no rms of the whole row.
    return error.amax(dim=1) / budget.maximum, float(error.max()) / budget.maximum


def apart(found: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences; NaN and infinity differ from all but themselves."""
    alike = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(alike, 0.0, (found - expected).abs()).nan_to_num(inf, inf)


def widened(yardstick: Yardstick, own: Sequence[Budget]) -> Yardstick:
    """The larger of each budget of the golden and another one."""
    prompts = []
    for prompt, budget in zip(yardstick.prompts, own, strict=True):
        pinned = prompt.budgets[yardstick.compute]
        token = torch.maximum(pinned.token, budget.token)  # [T]
        larger = Budget(token, max(pinned.maximum, budget.maximum))
        prompts.append(replace(prompt, budgets={yardstick.compute: larger}))
    return replace(yardstick, prompts=tuple(prompts))


# -- layers


def of_parts(one: Mapping[int, Parts], other: Mapping[int, Parts], yardstick: Yardstick) -> float:
    """Answers of a layer at every number of ranks that both were asked at."""
    return max(
        (
            of_tensor(mine, theirs, yardstick)
            for size in one.keys() & other.keys()
            for mine_of, theirs_of in zip(one[size], other[size], strict=True)
            for mine, theirs in zip(mine_of, theirs_of, strict=True)
        ),
        default=inf,
    )


def of_tensor(found: Tensor, other: Tensor, yardstick: Yardstick) -> float:
    """Two answers of one layer; integers are equal or apart."""
    if found.shape != other.shape:
        return inf
    if not (found.is_floating_point() and other.is_floating_point()):
        return 0.0 if torch.equal(found.long(), other.long()) else inf
    layer = yardstick.layer
    assert layer is not None
    error = apart(found.double(), other.double())  # [T, W]
    if layer.golden is not None:
        budget = layer.golden.budgets[yardstick.compute]
        rms = error.square().mean(dim=1).sqrt()  # [T]
        return max(largest(rms / budget.token), largest(error) / budget.maximum)
    error = error[judged(layer, len(error))]
    unit = rounding(other.double(), layer, yardstick.dtype)[judged(layer, len(other))]  # [N, W]
    return largest(torch.where(error == 0, 0.0, error / unit))


def largest(ratios: Tensor) -> float:
    """The largest value; infinite where one is no number, zero where there is none."""
    return float(ratios.nan_to_num(inf).max()) if ratios.numel() else 0.0


def judged(layer: LayerCase, tokens: int) -> Tensor:
    """Which tokens a case speaks of, ``[T]``."""
    stated = [layer.expected[name] for name in CONSTANT_PARTS if name in layer.expected]
    values: Values = stated[0] if stated else []
    if not isinstance(values, list) or len(values) != tokens:
        return torch.ones(tokens, dtype=torch.bool)
    return torch.tensor([row is not None for row in values], dtype=torch.bool)


def rounding(other: Tensor, layer: LayerCase, dtype: str) -> Tensor:
    """What a sum of constant terms near ``other`` may honestly differ by, ``[T, W]``."""
    unit = torch.finfo(getattr(torch, dtype)).eps / 2 * other.abs()
    if other.shape[1] != layer.width:  # router weights
        return unit
    weights, ids = layer_compare.routes(layer, dtype)  # [T, K]
    bound = layer_compare.constant_bound(layer, weights, ids, other, getattr(torch, dtype))
    return torch.maximum(unit, bound)
