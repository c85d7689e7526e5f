"""Cases about decoding: an engine continues prompts greedily, and the oracle follows it.

The first token of a prompt comes from the prompt's own forward pass, every later one from a pass
of one token for each prompt. Prompts of one token make even the first one such a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mone_ref.backend import Generation, Scores
from mone_ref.errors import show
from mone_ref.suite import judge
from mone_ref.suite.bench import Bench
from mone_ref.suite.cases import Case
from mone_ref.suite.compare import MULTIPLIER, Comparison, compare, form_flaw
from mone_ref.suite.golden import Golden, GoldenPrompt
from mone_ref.suite.guard import Failure
from mone_ref.suite.judge import Judgement
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.teacher import Lesson, Teacher

STEPS = 4
"""Tokens after each prompt. Three of four come one at a time, and a buffer that is reused shows
at the second of those."""


def prompts_of(golden: Golden) -> list[list[int]]:
    """The prompts of a fixture, then the first token of each by itself."""
    single = dict.fromkeys(ids[0] for ids in golden.ids)
    return golden.ids + [[token] for token in single if [token] not in golden.ids]


def run(bench: Bench, case: Case, dtype: str) -> Judgement:
    """Continue every prompt of a fixture in three orders; a failure is held against its control."""
    judgement = continued(bench, case.fixture, dtype)
    if not judgement.outcome.failed:
        return judgement
    control = continued(bench, case.control, dtype)
    return judge.base_differs(control, f"{case.control}, decoded") or judgement


def continued(bench: Bench, fixture: str, dtype: str) -> Judgement:
    """What an engine makes of the prompts of one fixture. Raises ``Unavailable``."""
    prompts = prompts_of(bench.golden(fixture))
    with bench.open_to_decode(fixture, prompts, STEPS, dtype) as opened:
        if isinstance(opened.session, Failure):
            return judge.of_failure(opened.session)
        made = bench.engine.continuations(opened.session, prompts, STEPS)
    if isinstance(made, Failure):
        return judge.closed(judge.of_failure(made), opened.closing)
    followed = [
        follow(
            f"prompt {index}, {order}", prompts[index], generation, bench.teacher(fixture, dtype)
        )
        for order, given in made.items()
        for index, generation in enumerate(given)
    ]
    substitutes = bool(bench.layers(fixture))
    return judge.closed(of_followed(followed, substitutes), opened.closing)


@dataclass(frozen=True)
class Followed:
    """One continuation beside what was owed; ``lesson`` is None where it is no continuation."""

    place: str
    comparison: Comparison
    lesson: Lesson | None = None

    @property
    def rows(self) -> int:
        """How many rows were held to a budget."""
        return len(self.lesson.rows.ids) if self.lesson and self.lesson.rows else 0


def of_followed(followed: Sequence[Followed], substitutes: bool) -> Judgement:
    """The worst continuation decides, once there was something to see at all."""
    judged = [one for one in followed if one.comparison.flaw or one.rows]
    decoded = sum(one.lesson.decoded for one in judged if one.lesson)
    worst = max(judged, key=lambda one: judge.badness(one.comparison), default=None)
    if worst is not None and worst.comparison.flaw:
        found = f"{worst.place}: {worst.comparison.flaw}"
        return Judgement(Outcome.MISMATCH, found, numbers=worst.comparison.numbers)
    if worst is None or (substitutes and not decoded):
        found = "no token that came by itself is certified and has a substituted route"
        return Judgement(Outcome.NOT_EXERCISED, found)
    rows = sum(one.rows for one in judged)
    found = f"worst of {rows} certified rows: {worst.place}, within budget"
    return Judgement(Outcome.OK, found, numbers=worst.comparison.numbers)


def follow(place: str, prompt: list[int], generation: Generation, teacher: Teacher) -> Followed:
    """One continuation along its own tokens. They are told: another run may take others."""
    flaw = form_of(generation, teacher.vocabulary)
    if flaw:
        return Followed(place, Comparison(flaw))
    tokens = list(generation.tokens)
    lesson = teacher.lesson(prompt, tokens)
    place = f"{place}, continued by {tokens}"
    if lesson.rows is None:
        return Followed(place, Comparison(""), lesson)
    return Followed(place, compared(generation, lesson.rows, teacher.compute), lesson)


def form_of(generation: Generation, vocabulary: int) -> str:
    """What makes a continuation none: other tokens or rows than were asked for, or no numbers.

    Rows that no budget is known for must be numbers all the same.
    """
    tokens, scores = generation.tokens, generation.scores
    if len(tokens) != STEPS:
        return f"{len(tokens)} tokens, expected {STEPS}"
    if not all(0 <= token < vocabulary for token in tokens):
        return f"tokens {show(list(tokens))}, expected ids in [0, {vocabulary})"
    if scores.logprobs.ndim == 2 and len(scores.logprobs) != STEPS:
        return f"{len(scores.logprobs)} rows of log-probabilities, expected {STEPS}"
    flaw = form_flaw(scores, STEPS)
    if flaw or bool(scores.logprobs.isfinite().all()):
        return flaw
    return "the log-probabilities hold NaN or infinity"


def compared(generation: Generation, rows: GoldenPrompt, compute: str) -> Comparison:
    """The certified rows by the number rule; then whether their tokens are the likeliest."""
    count, scores = len(rows.ids), generation.scores
    ids = None if scores.ids is None else scores.ids[:count]
    comparison = compare(Scores(scores.logprobs[:count], ids), rows, compute)
    if comparison.flaw:
        return comparison
    return replace(comparison, flaw=greedy_flaw(generation.tokens[:count], rows, compute))


def greedy_flaw(tokens: Sequence[int], rows: GoldenPrompt, compute: str) -> str:
    """A token that greedy decoding cannot have chosen from scores within their budget.

    Two scores may err in opposite directions, so the likeliest of an engine is at most twice
    the limit of one below the likeliest of the oracle.
    """
    limit = 2 * MULTIPLIER * rows.budgets[compute].maximum
    chosen = rows.logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]  # [N]
    short = rows.logprobs.amax(dim=1) - chosen  # [N]
    if not (short > limit).any():
        return ""
    step = int((short > limit).nonzero()[0])
    return (
        f"token {step}: {tokens[step]} was chosen, {float(short[step]):.3g} nats below the "
        f"likeliest, which is more than {limit:.3g}: not greedy"
    )
