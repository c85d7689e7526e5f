"""Answers that no engine's arithmetic gives: what an adapter did to them on the way.

Each mistake is a way to turn the golden answers into the ones at hand. What undoes it
is what to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mone_ref.backend import Generation, Scores
from mone_ref.suite.compare import compare
from mone_ref.suite.golden import Budget, Golden, GoldenPrompt

PRECISE_FIRST = ("float32", "tf32", "float16", "bfloat16")

UNDONE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda answer: answer,
    "unnormalised logits: return torch.log_softmax(logits, dim=-1)": partial(
        torch.log_softmax, dim=-1
    ),
    "probabilities: return their logarithm": torch.log,
    "negative log-probabilities: turn the sign": torch.neg,
}
"""What the values are, and what makes log-probabilities of them."""

MOVED: Mapping[int, str] = {
    0: "",
    1: "one row late: row t holds what comes after token t, not before it",
    -1: "one row early: keep the first row, and leave out the last one if there is none",
}
"""Where row ``t`` of the answer stands in the golden: at ``t - shift``."""


def of_form(scores: Scores, prompt: GoldenPrompt) -> str:
    """Which mistake a shape or a row that is not finite shows; empty when none is known."""
    tokens, vocabulary = prompt.logprobs.shape
    shape = tuple(scores.logprobs.shape)
    if shape[:1] == (1,) and shape[1:] in {(tokens, vocabulary), (tokens - 1, vocabulary)}:
        return "a batch dimension stands in front: one Scores per prompt, each [T, V]"
    if shape == (vocabulary, tokens):
        return "the answer is transposed: rows are tokens, columns the vocabulary"
    if shape[:1] == (tokens + 1,):
        return "one row too many: token ids go to the engine as they are, with no token in front"
    if len(shape) == 2 and scores.ids is None and shape[1] > vocabulary:
        return f"the vocabulary is padded: cut the answer to the config's {vocabulary} columns"
    if len(shape) == 2 and scores.ids is None and shape[1] < vocabulary:
        return "fewer columns than ids in the vocabulary: top-n answers need their ids as well"
    if first_row_only(scores.logprobs):
        return "row t holds what comes after token t: an engine has nothing before the first one"
    return ""


def first_row_only(logprobs: Tensor) -> bool:
    """Whether the first row, and no other, holds numbers that are not finite."""
    if logprobs.ndim != 2 or len(logprobs) < 2:
        return False
    return bool(logprobs[1:].isfinite().all()) and not bool(logprobs[0].isfinite().all())


def of_continuation(generation: Generation, prompt: Sequence[int], steps: int) -> str:
    """Which mistake a continuation of another length shows; empty when none is known."""
    tokens, logprobs = list(generation.tokens), generation.scores.logprobs
    rows = len(logprobs) if logprobs.ndim else 0
    if tokens[: len(prompt)] == list(prompt) and len(tokens) == len(prompt) + steps:
        return "the prompt's own tokens stand in front: return the new ones only"
    if len(tokens) == steps and rows in (len(prompt) + steps - 1, len(prompt) + steps):
        return "rows of the prompt stand in front: return one row for each new token"
    if len(tokens) < steps:
        return "it ends early: go on behind a token that ends a text (ignore_eos or the like)"
    return ""


def of_values(answers: Sequence[Scores], golden: Golden, compute: str) -> str:
    """Which mistake explains finite answers that are out of budget; empty when none does.

    None does where the values are right, and what is wrong is something else about them.
    """
    if agree(answers, golden.prompts, compute):
        return ""
    for other in PRECISE_FIRST[PRECISE_FIRST.index(compute) + 1 :]:
        if other in golden.compute_types and agree(answers, golden.prompts, other):
            return (
                f"right for {other}, not for {compute}: hand options.dtype to the engine, "
                "or let describe() tell in which type it computes"
            )
    # A wrong layout is far outside the widest budget; rounding of logits may not fit the own.
    widest = max(golden.compute_types, key=PRECISE_FIRST.index)
    for shift, moved in MOVED.items():
        for what, undo in UNDONE.items():
            if (shift or what) and agree(*undone(answers, golden, shift, undo), widest):
                return "; ".join(filter(None, (what and f"these are {what}", moved)))
    return ""


def undone(
    answers: Sequence[Scores], golden: Golden, shift: int, undo: Callable[[Tensor], Tensor]
) -> tuple[list[Scores], list[GoldenPrompt]]:
    """Answers without a mistake, beside the part of the golden that they can be held to."""
    pairs = list(overlapping(answers, golden, shift))
    return [replace(a, logprobs=undo(a.logprobs.double())) for a, _ in pairs], [g for _, g in pairs]


def overlapping(
    answers: Sequence[Scores], golden: Golden, shift: int
) -> Iterator[tuple[Scores, GoldenPrompt]]:
    """Rows of every answer and of its golden that stand for each other."""
    for answer, prompt in zip(answers, golden.prompts, strict=True):
        late, early = max(shift, 0), max(-shift, 0)
        rows = min(len(answer.logprobs) - late, len(prompt.ids) - early)
        if rows > 0:
            ids = None if answer.ids is None else answer.ids[late : late + rows]
            yield Scores(answer.logprobs[late : late + rows], ids), part(prompt, early, rows)


def part(prompt: GoldenPrompt, first: int, rows: int) -> GoldenPrompt:
    """Some rows of a golden."""
    kept = slice(first, first + rows)
    budgets = {
        name: Budget(budget.token[kept], budget.maximum) for name, budget in prompt.budgets.items()
    }
    return GoldenPrompt(prompt.ids[kept], prompt.logprobs[kept], budgets)


def agree(answers: Sequence[Scores], prompts: Sequence[GoldenPrompt], compute: str) -> bool:
    """Whether all answers are within the budget of a compute type."""
    pairs = list(zip(answers, prompts, strict=True))
    return bool(pairs) and not any(compare(a, prompt, compute).flaw for a, prompt in pairs)
