"""Running cases on one engine: what each kind asks, and the result for the record."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from mone_ref.backend import Backend, BackendInfo, Unavailable
from mone_ref.errors import Phase
from mone_ref.suite import changes, decoding, judge, layers
from mone_ref.suite.attempt import Attempt
from mone_ref.suite.bench import Bench, Options
from mone_ref.suite.cases import Case, CaseError, Kind
from mone_ref.suite.edits import EditError
from mone_ref.suite.guard import Failure
from mone_ref.suite.judge import Judgement
from mone_ref.suite.outcomes import Outcome, Result


class Harness:
    """Judges one engine, case by case."""

    def __init__(
        self, backend: Backend, info: BackendInfo, root: Path, options: Options | None = None
    ) -> None:
        self.bench = Bench(backend, info, root, options or Options())

    def run(self, case: Case, dtype: str) -> Result:
        """The record of one case at one dtype. Raises as ``judge``."""
        return self.judge(case, dtype)[0]

    def judge(self, case: Case, dtype: str) -> tuple[Result, Judgement]:
        """Judge one case at one dtype: the record, and the judgement with its raw answers.

        Raises ``CaseError`` when the case itself is broken.
        """
        begun = time.monotonic()
        self.bench.engine.guard.begin_case()
        try:
            judgement = self._inapplicable(case, dtype) or self._run(case, dtype)
        except Unavailable as unavailable:
            judgement = not_applicable(unavailable.reason)
        except EditError as error:
            raise CaseError(f"{case.id}: {error}") from error
        failure = judgement.failure
        result = Result(
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
        return result, judgement

    def close(self) -> Failure | None:
        """Close the backend; the failure to do so, if any."""
        engine = self.bench.engine
        closed = engine.guard.call(Phase.RUN, engine.backend.close, closing=True)
        return closed if isinstance(closed, Failure) else None

    def _inapplicable(self, case: Case, dtype: str) -> Judgement | None:
        """Why the engine cannot be asked, as far as it is known before loading."""
        info, dtypes = self.bench.info, self.bench.options.dtypes
        if dtype not in info.compute:
            return not_applicable(f"the engine does not run {dtype}")
        if dtypes and dtype not in dtypes:
            return not_applicable(f"{dtype} is not part of this run")
        unknown = sorted(case.setting.features - info.features)
        if unknown:
            return not_applicable(f"the engine does not know {', '.join(unknown)}")
        if case.layer is not None:
            return None
        missing = sorted(case.setting.ranks.keys() - info.parallel)
        if missing:
            return not_applicable(f"the engine does not offer {', '.join(missing)} here")
        budget = self.bench.budget(dtype, case.setting)
        for fixture in case.fixtures:
            if budget not in self.bench.golden(fixture).compute_types:
                return not_applicable(f"{fixture} is not certified for {budget}")
        return None

    def _run(self, case: Case, dtype: str) -> Judgement:
        match case.kind:
            case Kind.CONTROL:
                return self._output(case, dtype)
            case Kind.OUTPUT:
                return self.bench.control_differs(case, dtype) or self._output(case, dtype)
            case Kind.ROWS:
                return self._rows(case, dtype)
            case Kind.DECODE:
                return self.bench.control_differs(case, dtype) or self._decode(case, dtype)
            case Kind.LAYER:
                return layers.run(self.bench, case, dtype)
            case Kind.UPDATE:
                return self.bench.control_differs(case, dtype) or self._update(case, dtype)
            case Kind.REFUSAL:
                return self._void(case, dtype) or self._refusal(case, dtype)
            case Kind.UPDATE_REFUSAL | Kind.RELOAD_REFUSAL:
                return self._void(case, dtype) or self._refused_change(case, dtype)

    def _output(self, case: Case, dtype: str) -> Judgement:
        attempt = self.bench.attempt(case.fixture, dtype, case.edits, case.setting)
        judgement = self.bench.judge_attempt(attempt, case.fixture, dtype, case.setting)
        return judge.exercised(judgement, attempt.rows, self.bench.layers(case.fixture))

    def _rows(self, case: Case, dtype: str) -> Judgement:
        attempt = self.bench.attempt(case.fixture, dtype, case.edits, case.setting)
        if attempt.failure:
            return judge.of_failure(attempt.failure)
        if attempt.rows is None:
            return not_applicable("the engine has no expert_rows()")
        judgement = judge.of_rows(attempt.rows, self.bench.layers(case.fixture))
        return judge.closed(judgement, attempt.closing)

    def _decode(self, case: Case, dtype: str) -> Judgement:
        loaded = self.bench.attempt(case.fixture, dtype)
        if loaded.failure:
            return judge.of_failure(loaded.failure)
        return unable(case, loaded) or decoding.run(self.bench, case, dtype)

    def _void(self, case: Case, dtype: str) -> Judgement | None:
        """A refusal proves nothing about an engine that refuses the twin as well."""
        assert case.twin is not None
        fixture, edits = case.twin
        flaw = self.bench.attempt(fixture, dtype, edits, case.setting.without_features).flaw
        return Judgement(Outcome.VOID, f"the twin does not answer: {flaw}") if flaw else None

    def _refusal(self, case: Case, dtype: str) -> Judgement:
        attempt = self.bench.attempt(case.fixture, dtype, case.edits, case.setting)
        if attempt.failure:
            return judge.closed(judge.of_refusal(attempt.failure, case.expected), attempt.closing)
        answers = self.bench.judge_attempt(attempt, case.fixture, dtype, case.setting)
        if not case.expected.or_conforming:
            found = f"accepted; against the unedited fixture: {answers.found}"
            return replace(answers, outcome=Outcome.WRONGLY_ACCEPTED, found=found)
        return self.bench.control_differs(case, dtype) or answers

    def _update(self, case: Case, dtype: str) -> Judgement:
        assert case.change is not None
        loaded = self.bench.attempt(case.fixture, dtype, setting=case.setting)
        if loaded.failure:
            return judge.of_failure(loaded.failure)
        return unable(case, loaded) or changes.update(self.bench, case, case.change, dtype)

    def _refused_change(self, case: Case, dtype: str) -> Judgement:
        assert case.change is not None
        loaded = self.bench.attempt(case.fixture, dtype, setting=case.setting)
        if loaded.failure:
            return judge.of_failure(loaded.failure)
        return unable(case, loaded) or changes.refused(self.bench, case, case.change, dtype)


def unable(case: Case, loaded: Attempt) -> Judgement | None:
    """Which optional method the engine lacks."""
    missing = sorted(set(case.requires) - loaded.abilities)
    return not_applicable(f"the engine has no {', '.join(missing)}()") if missing else None


def not_applicable(found: str) -> Judgement:
    """The engine does not offer what a case needs."""
    return Judgement(Outcome.NOT_APPLICABLE, found)
