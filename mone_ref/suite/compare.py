"""The number rule: is an answer the golden answer, up to honest rounding?

A token passes when its rms error ``e[t]`` is at most ``MULTIPLIER * b[t]``; a tensor
passes when every token does and its largest error is at most ``MULTIPLIER * M``.
``b`` and ``M`` were measured when the fixture was filled. What is not a number, or
not there, fails before any number is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.backend import Scores
from mone_ref.suite.golden import GoldenPrompt

MULTIPLIER = 3.0
"""Room between honest engines and wrong ones. On 24 fixtures at 3 dtypes the worst
token of an honest vLLM 0.33 was 2.04 b; the weakest structural fault stood at 8.4 b
in bfloat16, 85 b in float16 and 1e5 b in float32."""

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""Dtypes of ids: whatever the engine has, so long as it counts."""


@dataclass(frozen=True)
class Numbers:
    """Errors beside their budgets, both before the multiplier; nats.

    ``token`` is the worst token by ``token_error / token_budget``. For top-n answers
    both errors are the largest single one, since a mean over other ids is no rms.
    ``norm_ratio`` shows a pure factor, ``argmax`` the share of tokens whose likeliest
    id agrees, NaN for a layer, whose output has no likeliest id.
    """

    token: int
    token_error: float
    token_budget: float
    token_ratio: float
    max_error: float
    max_budget: float
    max_ratio: float
    norm_ratio: float
    argmax: float


@dataclass(frozen=True)
class Comparison:
    """``flaw`` says what is wrong with an answer; empty when it is right."""

    flaw: str
    numbers: Numbers | None = None

    @property
    def ratio(self) -> float:
        """How bad: the larger of both ratios, infinite where there is no number."""
        if self.numbers is None:
            return float("inf")
        return max(self.numbers.token_ratio, self.numbers.max_ratio)


def compare(scores: Scores, prompt: GoldenPrompt, compute: str) -> Comparison:
    """Judge one answer against one golden prompt at one compute type."""
    flaw = form_flaw(scores, len(prompt.ids))
    if flaw:
        return Comparison(flaw)
    found = scores.logprobs.detach().to("cpu", torch.float64)  # [T, V] or [T, n]
    if scores.ids is None:
        return full(found, prompt, compute)
    ids = scores.ids.detach().to("cpu", torch.int64)  # [T, n]
    return top_n(found, ids, prompt, compute)


def form_flaw(scores: Scores, tokens: int) -> str:
    """What makes an answer no answer: types, rank, missing rows, nothing to compare."""
    logprobs = scores.logprobs
    if not isinstance(logprobs, Tensor) or not logprobs.is_floating_point():
        return f"the log-probabilities are no float tensor but {kind(logprobs)}"
    if logprobs.ndim != 2 or logprobs.shape[0] not in (tokens - 1, tokens):
        return f"shape {list(logprobs.shape)}, expected {tokens} rows of log-probabilities"
    if logprobs.numel() == 0:
        return f"shape {list(logprobs.shape)}: nothing to compare"
    if scores.ids is None:
        return ""
    if not isinstance(scores.ids, Tensor) or scores.ids.dtype not in INTEGERS:
        return f"the ids are no integer tensor but {kind(scores.ids)}"
    if scores.ids.shape != logprobs.shape:
        return f"ids {list(scores.ids.shape)} beside log-probabilities {list(logprobs.shape)}"
    return ""


def kind(value: object) -> str:
    """A type for a message: the dtype of a tensor, else the class name."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def value_flaw(found: Tensor, expected: Tensor) -> str:
    """NaN, infinity, shape and emptiness, which no budget excuses."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if found.numel() == 0:
        return f"shape {list(found.shape)}: nothing to compare"
    nan = int(found.isnan().sum()), int(expected.isnan().sum())
    if any(nan):
        return f"{nan[0]} NaN in the answer, {nan[1]} in the golden, of {found.numel()}"
    inf = int(found.isinf().sum()), int(expected.isinf().sum())
    if any(inf):
        return f"{inf[0]} infinities in the answer, {inf[1]} in the golden, of {found.numel()}"
    return ""


def full(found: Tensor, prompt: GoldenPrompt, compute: str) -> Comparison:
    """Judge log-probabilities of the whole vocabulary, ``[T, V]``."""
    budget = prompt.budgets[compute]
    # An engine that scores prompts only has no last row.
    expected, token_budget = prompt.logprobs[: len(found)], budget.token[: len(found)]
    flaw = value_flaw(found, expected)
    if flaw:
        return Comparison(flaw)
    error = (found - expected).abs()  # [T, V]
    rms = error.square().mean(dim=1).sqrt()  # [T]
    numbers = summary(rms, token_budget, float(error.max()), budget.maximum, found, expected)
    return Comparison(number_flaw(numbers, "rms"), numbers)


def top_n(found: Tensor, ids: Tensor, prompt: GoldenPrompt, compute: str) -> Comparison:
    """Judge the n likeliest ids per token, ``[T, n]``.

    Every returned value must be within the budget, and every id that is clearly
    likelier than the least likely returned one must be there. All ids of a small
    vocabulary are judged like a full answer.
    """
    expected = prompt.logprobs[: len(found)]  # [T, V]
    maximum = prompt.budgets[compute].maximum
    flaw = ids_flaw(ids, expected.shape[1])
    if flaw:
        return Comparison(flaw)
    if ids.shape == expected.shape:
        whole = torch.empty_like(expected).scatter_(1, ids, found)  # [T, V]
        return full(whole, prompt, compute)
    chosen = expected.gather(1, ids)  # [T, n]
    flaw = value_flaw(found, chosen) or missing_id(found, ids, expected, MULTIPLIER * maximum)
    if flaw:
        return Comparison(flaw)
    error = (found - chosen).abs().amax(dim=1)  # [T]
    budgets = torch.full_like(error, maximum)
    numbers = summary(error, budgets, float(error.max()), maximum, found, chosen)
    return Comparison(number_flaw(numbers, "largest"), numbers)


def ids_flaw(ids: Tensor, vocabulary: int) -> str:
    """Returned ids must be ids of the vocabulary, none twice in a row."""
    if ids.numel() == 0:
        return f"ids {list(ids.shape)}: nothing to compare"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"ids between {int(ids.min())} and {int(ids.max())}, expected [0, {vocabulary})"
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)  # [T]
    return f"token {int(twice.nonzero()[0])}: an id is returned twice" if twice.any() else ""


def missing_id(found: Tensor, ids: Tensor, expected: Tensor, budget: float) -> str:
    """The first id that a top-n answer cannot have left out honestly."""
    floor = found.amin(dim=1, keepdim=True) + budget  # [T, 1]
    due = (expected > floor).scatter(1, ids, torch.zeros_like(ids, dtype=torch.bool))  # [T, V]
    if not due.any():
        return ""
    token, vocab_id = due.nonzero()[0].tolist()
    return (
        f"token {token}: id {vocab_id} at {float(expected[token, vocab_id]):.4g} is not among "
        f"the {ids.shape[1]} returned, the least of which is {float(found[token].min()):.4g}"
    )


def summary(
    rms: Tensor, budgets: Tensor, max_error: float, maximum: float, found: Tensor, expected: Tensor
) -> Numbers:
    """Errors and budgets of the worst token ``[T]`` and of the whole tensor."""
    ratios = rms / budgets  # [T]
    token = int(ratios.argmax())
    return Numbers(
        token=token,
        token_error=float(rms[token]),
        token_budget=float(budgets[token]),
        token_ratio=float(ratios[token]),
        max_error=max_error,
        max_budget=maximum,
        max_ratio=max_error / maximum,
        norm_ratio=float(found.norm() / expected.norm()),
        argmax=float((found.argmax(1) == expected.argmax(1)).double().mean()),
    )


def number_flaw(numbers: Numbers, measure: str) -> str:
    """The sentence for whichever of both limits is exceeded; empty within both."""
    if numbers.token_ratio > MULTIPLIER:
        return (
            f"token {numbers.token}: {measure} error {numbers.token_error:.3g} is over "
            f"{MULTIPLIER:g} x its budget {numbers.token_budget:.3g}"
        )
    if numbers.max_ratio > MULTIPLIER:
        return (
            f"largest error {numbers.max_error:.3g} is over "
            f"{MULTIPLIER:g} x its budget {numbers.max_budget:.3g}"
        )
    return ""


def change_flaw(before: Sequence[Scores], after: Sequence[Scores]) -> str:
    """What differs between two answers that must be equal bit for bit; empty if nothing."""
    if len(before) != len(after):
        return f"{len(before)} answers before, {len(after)} after"
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if not same(old.logprobs, new.logprobs):
            return f"prompt {index}: {difference(old.logprobs, new.logprobs)}"
        if (old.ids is None) != (new.ids is None) or (
            old.ids is not None and new.ids is not None and not same(old.ids, new.ids)
        ):
            return f"prompt {index}: other ids than before"
    return ""


def same(old: Tensor, new: Tensor) -> bool:
    """Equal dtype, shape and values, NaN equal to NaN."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return False
    return bool(((old == new) | (old.isnan() & new.isnan())).all())


def difference(old: Tensor, new: Tensor) -> str:
    """How two tensors that should be equal differ."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"{old.dtype} {list(old.shape)} before, {new.dtype} {list(new.shape)} after"
    moved = (new.double() - old.double()).abs().nan_to_num(torch.inf)
    changed = ~((old == new) | (old.isnan() & new.isnan()))
    count, largest = int(changed.sum()), float(moved[changed].max())
    return f"{count} of {old.numel()} values changed, by up to {largest:.3g}"
