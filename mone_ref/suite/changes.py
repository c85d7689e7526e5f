"""Cases that change a loaded model: updates that are right, and changes that must be refused."""

from __future__ import annotations

from dataclasses import replace

from mone_ref.backend import Session
from mone_ref.suite import judge
from mone_ref.suite.attempt import Engine
from mone_ref.suite.bench import Bench
from mone_ref.suite.cases import Case, Change, Expected, Kind
from mone_ref.suite.compare import change_flaw
from mone_ref.suite.guard import Failure
from mone_ref.suite.judge import Judgement
from mone_ref.suite.outcomes import Outcome


def update(bench: Bench, case: Case, change: Change, dtype: str) -> Judgement:
    """Update with the constants of another fixture; then its golden holds."""
    with bench.open(case.fixture, (change.source,), dtype, case.setting) as opened:
        if isinstance(opened.session, Failure):
            return judge.of_failure(opened.session)
        changed = hand_over(bench, case, change, opened.session)
        if isinstance(changed, Failure):
            judgement = judge.of_failure(changed)
        else:
            judgement = answers_after(bench, case, change, opened.session, dtype)
    return judge.closed(judgement, opened.closing)


def refused(bench: Bench, case: Case, change: Change, dtype: str) -> Judgement:
    """An update or reload that must be refused, and what the model answers then."""
    # Before the session opens: an engine need not hold two models.
    differs = bench.control_differs(case, dtype) if case.expected.or_conforming else None
    asked = (case.fixture, change.source)
    with bench.open(case.fixture, asked, dtype, case.setting) as opened:
        if isinstance(opened.session, Failure):
            return judge.of_failure(opened.session)
        before = Before(bench.engine, opened.session, bench.golden(case.fixture).ids)
        if before.failure:
            judgement = judge.of_failure(before.failure)
        else:
            changed = hand_over(bench, case, change, opened.session)
            if isinstance(changed, Failure):
                judgement = before.judge_refusal(changed, case.expected)
            else:
                answers = answers_after(bench, case, change, opened.session, dtype)
                judgement = of_accepted(case.expected, change, answers, differs)
    return judge.closed(judgement, opened.closing)


def hand_over(bench: Bench, case: Case, change: Change, session: Session) -> Failure | None:
    """Make the change; why it failed, if it did."""
    if case.kind is Kind.RELOAD_REFUSAL:
        with bench.copy(change.source, change.edits) as directory:
            return bench.engine.reload(session, directory)
    for tensors in bench.handed(case, change):
        failure = bench.engine.update(session, tensors)
        if failure:
            return failure
    return None


def answers_after(
    bench: Bench, case: Case, change: Change, session: Session, dtype: str
) -> Judgement:
    """Answers of a changed model against the golden of what it was changed to."""
    answers = bench.engine.answers(session, bench.golden(change.source).ids)
    return bench.judge_answers(answers, change.source, dtype, case.setting)


def of_accepted(
    expected: Expected, change: Change, answers: Judgement, differs: Judgement | None
) -> Judgement:
    """The engine made a change that it may, or must, refuse."""
    if not expected.or_conforming:
        found = f"accepted; against {change.source}: {answers.found}"
        return replace(answers, outcome=Outcome.WRONGLY_ACCEPTED, found=found)
    if expected.then_unchanged:
        return Judgement(Outcome.NOT_EXERCISED, "accepted: no refusal to look behind")
    return differs or answers


class Before:
    """What a session answered before a change that it must refuse, asked twice."""

    def __init__(self, engine: Engine, session: Session, prompts: list[list[int]]) -> None:
        self.engine, self.session, self.prompts = engine, session, prompts
        self.first = engine.score(session, prompts)
        self.second = engine.score(session, prompts)

    @property
    def failure(self) -> Failure | None:
        """Why there is no answer to compare with."""
        asked = (self.first, self.second)
        return next((answer for answer in asked if isinstance(answer, Failure)), None)

    def judge_refusal(self, failure: Failure, expected: Expected) -> Judgement:
        """The refusal itself; then, where the case asks, whether the answers stayed."""
        judgement = judge.of_refusal(failure, expected)
        if judgement.outcome is not Outcome.OK or not expected.then_unchanged:
            return judgement
        after = self.engine.score(self.session, self.prompts)
        if isinstance(after, Failure):
            return judge.of_failure(after)
        assert not isinstance(self.first, Failure)
        assert not isinstance(self.second, Failure)
        if flaw := change_flaw(self.first, self.second):
            found = f"without any change, asked twice, the answers differ: {flaw}"
            return Judgement(Outcome.NOT_JUDGED, found)
        if flaw := change_flaw(self.first, after):
            return replace(judgement, outcome=Outcome.MISMATCH, found=f"after the refusal: {flaw}")
        return judgement
