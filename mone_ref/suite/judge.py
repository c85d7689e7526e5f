"""From what an engine did to an outcome. Nothing here calls an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from mone_ref.config import LayerSubstitution
from mone_ref.errors import Phase
from mone_ref.suite.attempt import Answers
from mone_ref.suite.cases import Case, Expected, Kind
from mone_ref.suite.compare import Comparison, Numbers, compare
from mone_ref.suite.errormap import group
from mone_ref.suite.golden import Golden
from mone_ref.suite.guard import Failed, Failure
from mone_ref.suite.outcomes import Outcome

FAILED = {
    Failed.REFUSED: Outcome.WRONGLY_REFUSED,
    Failed.ERRORED: Outcome.ERRORED,
    Failed.CRASHED: Outcome.CRASHED,
    Failed.TIMEOUT: Outcome.TIMEOUT,
}
"""What a failure means where an answer was due."""

ORDER = list(Phase)

Parts = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Judgement:
    """An outcome and what it rests on; ``found`` is one sentence.

    ``answers`` are what a model answered, by the order of the prompts; ``parts`` what a
    layer answered, by the number of ranks: the tensors of each rank, or of their sum.
    Both are empty where nothing was compared.
    """

    outcome: Outcome
    found: str
    failure: Failure | None = None
    numbers: Numbers | None = None
    evidence: str = ""
    answers: Mapping[str, Answers] = field(default_factory=dict, compare=False, repr=False)
    parts: Mapping[int, Parts] = field(default_factory=dict, compare=False, repr=False)


def of_failure(failure: Failure) -> Judgement:
    """A call failed that had to give an answer."""
    what = f"{failure.kind} at {failure.call}: {failure.first_line}"
    return Judgement(FAILED[failure.kind], what, failure, evidence=failure.evidence)


def of_answers(answers: Mapping[str, Answers], golden: Golden, compute: str) -> Judgement:
    """Answers in every order against the golden; the worst one is told."""
    compared = [
        (f"prompt {index}, {order}", compare(scores, prompt, compute))
        for order, given in answers.items()
        for index, (scores, prompt) in enumerate(zip(given, golden.prompts, strict=True))
    ]
    place, worst = max(compared, key=lambda entry: badness(entry[1]))
    outcome, found = Outcome.OK, f"worst answer: {place}, within budget"
    if worst.flaw:
        outcome, found = Outcome.MISMATCH, f"{place}: {worst.flaw}"
    return Judgement(outcome, found, numbers=worst.numbers, answers=answers)


def badness(comparison: Comparison) -> tuple[bool, float]:
    """Order of comparisons: faulty ones last, then by their ratio to the budget."""
    return bool(comparison.flaw), comparison.ratio


def of_refusal(failure: Failure, expected: Expected) -> Judgement:
    """A call failed where a refusal was due: the right one, in time?"""
    if failure.kind is not Failed.REFUSED:
        return of_failure(failure)
    codes = ", ".join(failure.codes) or "no code that the error map knows"
    found = f"refused at {failure.phase or failure.call} with {codes}"
    outcome = Outcome.OK
    if not expected.groups & {group(code) for code in failure.codes}:
        outcome = Outcome.WRONG_GROUP
    elif is_late(failure, expected.phase):
        outcome = Outcome.LATE
    return Judgement(outcome, found, failure, evidence=failure.evidence)


def is_late(failure: Failure, latest: Phase) -> bool:
    """Whether a refusal came after the phase it was due.

    ``load()`` covers three phases. A refusal from it is in time for each of them,
    unless the engine itself says that it was later.
    """
    stated = failure.phase or (Phase.PARSE if failure.call is Phase.LOAD else failure.call)
    return ORDER.index(stated) > ORDER.index(latest)


def of_rows(
    rows: Mapping[int, int] | Failure, layers: Mapping[int, LayerSubstitution]
) -> Judgement:
    """Allocated rows of every listed layer against its retained experts (EXEC-1)."""
    if isinstance(rows, Failure):
        return of_failure(rows)
    wrong = [
        f"layer {index}: {rows.get(index, 'no')} rows, expected {len(layer.retained)}"
        for index, layer in layers.items()
        if rows.get(index) != len(layer.retained)
    ]
    if wrong:
        return Judgement(Outcome.MISMATCH, "; ".join(wrong))
    return Judgement(Outcome.OK, f"rows per layer: {dict(rows)}")


def exercised(
    judgement: Judgement,
    rows: Mapping[int, int] | Failure | None,
    layers: Mapping[int, LayerSubstitution],
) -> Judgement:
    """Right answers prove nothing about substitution where every expert has its row."""
    if judgement.outcome is not Outcome.OK or rows is None or isinstance(rows, Failure):
        return judgement
    full = [index for index, layer in layers.items() if rows.get(index) == layer.num_logical]
    if not full:
        return judgement
    found = f"layers {full} have a row for every logical expert: nothing was substituted there"
    return replace(judgement, outcome=Outcome.NOT_EXERCISED, found=found)


def closed(judgement: Judgement, closing: Failure | None) -> Judgement:
    """An engine that cannot let go of a model is in error, however right its answers."""
    if closing is None:
        return judgement
    evidence = f"{judgement.evidence}\nclose() failed: {closing.evidence}".strip()
    if judgement.outcome is not Outcome.OK:
        return replace(judgement, evidence=evidence)
    found = f"close() failed: {closing.kind}: {closing.first_line}"
    return replace(judgement, outcome=Outcome.ERRORED, found=found, evidence=evidence)


def base_differs(control: Judgement, asked: str) -> Judgement | None:
    """Not judged, when the engine refuses the base model or reads it differently (GEN-3).

    Only numbers are a reading: an engine that answers NaN, fails or never answers is judged on
    the case itself.
    """
    read = control.outcome is Outcome.MISMATCH and control.numbers is not None
    if not read and control.outcome is not Outcome.WRONGLY_REFUSED:
        return None
    found = f"base model differs: {asked}: {control.outcome}: {control.found}"
    return Judgement(Outcome.NOT_JUDGED, found, evidence=control.evidence)


def expectation(case: Case) -> str:
    """What a case expects, as a phrase."""
    expected = case.expected
    if case.layer is not None:
        answer = f"what {case.layer.call}() of the layer answers in the case"
        codes = " or ".join(sorted(expected.groups))
        return f"{answer}, or a refusal at load with {codes}" if codes else answer
    if case.kind is Kind.ROWS:
        return "expert rows for retained experts only"
    if case.kind is Kind.DECODE:
        return f"the oracle's scores of {case.fixture} along the engine's own tokens"
    if not expected.groups:
        fixture = case.change.source if case.change else case.fixture
        return f"the golden answers of {fixture}"
    codes = " or ".join(sorted(expected.groups))
    phrase = f"a refusal no later than {expected.phase}, with {codes}"
    if expected.or_conforming:
        phrase += ", or right answers"
    if expected.then_unchanged:
        phrase += "; then the same answers as before"
    return phrase
