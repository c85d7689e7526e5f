"""Running cases on one engine: load, change, ask, and hand what happened to the judge."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mone_ref import config
from mone_ref.backend import Backend, BackendInfo, LoadOptions, Session
from mone_ref.config import LayerSubstitution
from mone_ref.errors import Phase
from mone_ref.suite import golden, judge
from mone_ref.suite.attempt import Attempt, Engine
from mone_ref.suite.cases import Case, CaseError, Change, Expected, Kind
from mone_ref.suite.compare import change_fault
from mone_ref.suite.edits import Edit, EditError, changed_tensors, edited
from mone_ref.suite.errormap import ErrorMap
from mone_ref.suite.golden import Golden
from mone_ref.suite.guard import Failure, Guard
from mone_ref.suite.judge import Judgement
from mone_ref.suite.outcomes import Outcome, Result

PHASES = {
    Kind.UPDATE: Phase.UPDATE,
    Kind.UPDATE_REFUSAL: Phase.UPDATE,
    Kind.RELOAD_REFUSAL: Phase.RELOAD,
}


@dataclass(frozen=True)
class Options:
    """How to run: seconds per call, arguments that go to the engine verbatim, the engine's
    own words, and the dtypes of the run (all of the engine, when empty)."""

    time_limit: float = 120.0
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    error_map: ErrorMap = field(default_factory=ErrorMap)
    dtypes: tuple[str, ...] = ()


class Harness:
    """One engine, the fixtures below ``root``, and everything that was already asked."""

    def __init__(
        self, backend: Backend, info: BackendInfo, root: Path, options: Options | None = None
    ) -> None:
        self.info = info
        self.fixtures = root / "fixtures"
        self.options = options or Options()
        guard = Guard(self.options.error_map, self.options.time_limit)
        self.engine = Engine(backend, guard)
        self._attempts: dict[tuple[str, ...], Attempt] = {}
        self._goldens: dict[str, Golden] = {}

    def run(self, case: Case, dtype: str) -> Result:
        """Judge one case at one dtype. Raises ``CaseError`` when the case itself is broken."""
        begun = time.monotonic()
        try:
            judgement = self._inapplicable(case, dtype) or self._run(case, dtype)
        except EditError as error:
            raise CaseError(f"{case.id}: {error}") from error
        failure = judgement.failure
        return Result(
            case=case.id,
            dtype=dtype,
            outcome=judgement.outcome,
            expected=judge.expectation(case),
            found=judgement.found,
            codes=failure.codes if failure else (),
            phase=str(failure.phase or failure.call) if failure else "",
            numbers=judgement.numbers,
            evidence=judgement.evidence,
            seconds=round(time.monotonic() - begun, 3),
        )

    def close(self) -> Failure | None:
        """Close the backend; the failure to do so, if any."""
        closed = self.engine.guard.call(Phase.RUN, self.engine.backend.close)
        return closed if isinstance(closed, Failure) else None

    # -- what the engine offers

    def _inapplicable(self, case: Case, dtype: str) -> Judgement | None:
        """Why the engine cannot be asked, as far as it is known before loading."""
        if dtype not in self.info.compute:
            return not_applicable(f"the engine does not run {dtype}")
        if self.options.dtypes and dtype not in self.options.dtypes:
            return not_applicable(f"{dtype} is not part of this run")
        unknown = sorted(case.features - self.info.features)
        if unknown:
            return not_applicable(f"the engine does not know {', '.join(unknown)}")
        compute = self.info.compute[dtype]
        if compute not in self._golden(case.fixture).compute_types:
            return not_applicable(f"{case.fixture} is not certified for {compute}")
        return None

    def _unable(self, case: Case, attempt: Attempt) -> Judgement | None:
        """Which optional method the engine lacks."""
        missing = sorted(set(case.requires) - attempt.abilities)
        return not_applicable(f"the engine has no {', '.join(missing)}()") if missing else None

    # -- cases

    def _run(self, case: Case, dtype: str) -> Judgement:
        if case.kind in (Kind.OUTPUT, Kind.CONTROL):
            return self._output(case, dtype)
        if case.kind is Kind.ROWS:
            return self._rows(case, dtype)
        if case.kind is Kind.UPDATE:
            return self._update(case, dtype)
        assert case.twin is not None
        twin = self._attempt(*case.twin, dtype)
        if twin.fault:
            return Judgement(Outcome.VOID, f"the twin does not answer: {twin.fault}")
        if case.kind is Kind.REFUSAL:
            return self._refusal(case, dtype)
        return self._unable(case, twin) or self._refused_change(case, dtype)

    def _output(self, case: Case, dtype: str) -> Judgement:
        if case.kind is Kind.OUTPUT and (differs := self._control_differs(case, dtype)):
            return differs
        attempt = self._attempt(case.fixture, case.edits, dtype)
        judgement = self._answers(attempt, case.fixture, dtype)
        return judge.exercised(judgement, attempt.rows, self._layers(case.fixture))

    def _rows(self, case: Case, dtype: str) -> Judgement:
        attempt = self._attempt(case.fixture, case.edits, dtype)
        if attempt.failure:
            return judge.of_failure(attempt.failure)
        if attempt.rows is None:
            return not_applicable("the engine has no expert_rows()")
        return judge.of_rows(attempt.rows, self._layers(case.fixture))

    def _refusal(self, case: Case, dtype: str) -> Judgement:
        attempt = self._attempt(case.fixture, case.edits, dtype, case.features)
        if attempt.failure:
            return judge.closed(judge.of_refusal(attempt.failure, case.expected), attempt.closing)
        answers = self._answers(attempt, case.fixture, dtype)
        if not case.expected.or_conforming:
            return wrongly_accepted(f"accepted; against the unedited fixture: {answers.found}")
        return self._control_differs(case, dtype) or answers

    def _update(self, case: Case, dtype: str) -> Judgement:
        assert case.change is not None
        differs = self._control_differs(case, dtype)
        if differs:
            return differs
        loaded = self._attempt(case.fixture, (), dtype)
        if loaded.failure:
            return judge.of_failure(loaded.failure)
        if unable := self._unable(case, loaded):
            return unable
        expected = self._golden(case.change.source)
        with self._open(case.fixture, (case.fixture, case.change.source), dtype) as opened:
            if isinstance(opened.session, Failure):
                return judge.of_failure(opened.session)
            tensors = self._change(case.fixture, case.change)
            changed = self.engine.change(opened.session, Phase.UPDATE, tensors)
            if isinstance(changed, Failure):
                judgement = judge.of_failure(changed)
            else:
                answers = self.engine.answers(opened.session, expected.ids)
                judgement = self._judged(answers, expected, dtype)
        return judge.closed(judgement, opened.closing)

    def _refused_change(self, case: Case, dtype: str) -> Judgement:
        """An update or reload that must be refused, and what the model answers then."""
        assert case.change is not None
        # Before the session opens: an engine need not hold two models.
        differs = self._control_differs(case, dtype) if case.expected.or_conforming else None
        with self._open(case.fixture, (case.fixture, case.change.source), dtype) as opened:
            if isinstance(opened.session, Failure):
                return judge.of_failure(opened.session)
            session = opened.session
            before = Before(self.engine, session, self._golden(case.fixture).ids)
            if before.failure:
                judgement = judge.of_failure(before.failure)
            else:
                changed = self._try_change(case.change, PHASES[case.kind], session, case.fixture)
                if isinstance(changed, Failure):
                    judgement = before.judge_refusal(changed, case.expected)
                else:
                    judgement = self._accepted_change(case, session, dtype)
                    if case.expected.or_conforming and differs:
                        judgement = differs
        return judge.closed(judgement, opened.closing)

    def _try_change(self, change: Change, phase: Phase, session: Session, fixture: str) -> object:
        if phase is Phase.UPDATE:
            return self.engine.change(session, phase, self._change(fixture, change))
        with edited(self._checkpoint(change.source), change.edits) as directory:
            return self.engine.change(session, phase, directory)

    def _accepted_change(self, case: Case, session: Session, dtype: str) -> Judgement:
        assert case.change is not None
        expected = self._golden(case.change.source)
        judgement = self._judged(self.engine.answers(session, expected.ids), expected, dtype)
        if not case.expected.or_conforming:
            return wrongly_accepted(f"accepted; against {case.change.source}: {judgement.found}")
        if case.expected.then_unchanged:
            return Judgement(Outcome.NOT_EXERCISED, "accepted: no refusal to look behind")
        return judgement

    # -- pieces

    def _control_differs(self, case: Case, dtype: str) -> Judgement | None:
        """Not judged, when the engine reads the base model differently (GEN-3)."""
        control = self._answers(self._attempt(case.control, (), dtype), case.control, dtype)
        if control.outcome is Outcome.OK:
            return None
        found = f"base model differs: {case.control}: {control.outcome}: {control.found}"
        return Judgement(Outcome.NOT_JUDGED, found, evidence=control.evidence)

    def _answers(self, attempt: Attempt, fixture: str, dtype: str) -> Judgement:
        given = attempt.failure or attempt.answers
        return judge.closed(self._judged(given, self._golden(fixture), dtype), attempt.closing)

    def _judged(
        self, given: Mapping[str, tuple[Any, ...]] | Failure, expected: Golden, dtype: str
    ) -> Judgement:
        if isinstance(given, Failure):
            return judge.of_failure(given)
        return judge.of_answers(given, expected, self.info.compute[dtype])

    def _attempt(
        self,
        fixture: str,
        edits: Sequence[Edit],
        dtype: str,
        features: frozenset[str] = frozenset(),
    ) -> Attempt:
        """Load, ask and close; each combination once."""
        key = (fixture, json.dumps(list(edits)), dtype, *sorted(features))
        if key not in self._attempts:
            options = self._load_options((fixture,), dtype, features)
            with edited(self._checkpoint(fixture), edits) as directory:
                prompts = self._golden(fixture).ids
                self._attempts[key] = self.engine.attempt(directory, prompts, options)
        return self._attempts[key]

    def _open(self, fixture: str, scored: tuple[str, ...], dtype: str) -> Any:
        options = self._load_options(scored, dtype, frozenset())
        return self.engine.open(self._checkpoint(fixture), options)

    def _load_options(
        self, fixtures: Sequence[str], dtype: str, features: frozenset[str]
    ) -> LoadOptions:
        """Options whose bounds fit the prompts of some fixtures."""
        prompts = [self._golden(fixture).ids for fixture in fixtures]
        return LoadOptions(
            dtype=dtype,
            max_tokens=max(len(ids) for given in prompts for ids in given),
            max_prompts=max(len(given) for given in prompts),
            features=features,
            engine_args=self.options.engine_args,
        )

    def _change(self, fixture: str, change: Change) -> dict[str, Tensor]:
        source = self._checkpoint(change.source)
        return changed_tensors(self._checkpoint(fixture), source, change.edits)

    def _checkpoint(self, fixture: str) -> Path:
        return self.fixtures / fixture / "checkpoint"

    def _golden(self, fixture: str) -> Golden:
        if fixture not in self._goldens:
            path = self.fixtures / fixture / "golden.safetensors"
            self._goldens[fixture] = golden.read(path)
        return self._goldens[fixture]

    def _layers(self, fixture: str) -> Mapping[int, LayerSubstitution]:
        """The substituted layers of a fixture."""
        return config.read(self._checkpoint(fixture)).substitution.layers


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
        if fault := change_fault(self.first, self.second):
            found = f"without any change, asked twice, the answers differ: {fault}"
            return Judgement(Outcome.NOT_JUDGED, found)
        if fault := change_fault(self.first, after):
            return replace(judgement, outcome=Outcome.MISMATCH, found=f"after the refusal: {fault}")
        return judgement


def not_applicable(found: str) -> Judgement:
    """The engine does not offer what a case needs."""
    return Judgement(Outcome.NOT_APPLICABLE, found)


def wrongly_accepted(found: str) -> Judgement:
    """No refusal where one was due."""
    return Judgement(Outcome.WRONGLY_ACCEPTED, found)
