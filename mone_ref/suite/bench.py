"""What all cases share: the guarded engine, the fixtures, and everything that was asked before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mone_ref import config
from mone_ref.backend import Backend, BackendInfo, LoadOptions
from mone_ref.config import LayerSubstitution
from mone_ref.fill.ranks import budget_name
from mone_ref.suite import golden, judge
from mone_ref.suite.attempt import Answers, Attempt, Engine, Opened
from mone_ref.suite.cases import USUAL, Case, Change, Setting
from mone_ref.suite.edits import Edit, changed_tensors, edited
from mone_ref.suite.errormap import ErrorMap
from mone_ref.suite.golden import Golden
from mone_ref.suite.guard import Failure, Guard
from mone_ref.suite.judge import Judgement
from mone_ref.suite.teacher import Teacher


@dataclass(frozen=True)
class Options:
    """How to run.

    ``time_limit`` is in seconds per call, ``case_limit`` per case; ``engine_args`` go to the
    engine verbatim; ``dtypes`` are those of the run, all of the engine's when empty.
    ``fixtures`` is a directory to use instead of the pinned fixtures. ``watchdog`` is for engines
    that may get stuck outside Python; it costs a thread per call.
    """

    time_limit: float = 120.0
    case_limit: float = 1800.0
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    error_map: ErrorMap = field(default_factory=ErrorMap)
    dtypes: tuple[str, ...] = ()
    fixtures: Path | None = None
    watchdog: bool = True


def attempt_key(
    fixture: str, dtype: str, edits: Sequence[Edit], setting: Setting
) -> tuple[str, ...]:
    """What tells one attempt from another."""
    return (fixture, dtype, json.dumps(list(edits)), *setting.words)


class Bench:
    """One engine and the fixtures below ``root``; each question is asked once."""

    def __init__(self, backend: Backend, info: BackendInfo, root: Path, options: Options) -> None:
        self.info = info
        self.options = options
        self.fixtures = options.fixtures or root / "fixtures"
        guard = Guard(
            options.error_map, options.time_limit, options.case_limit, watchdog=options.watchdog
        )
        self.engine = Engine(backend, guard)
        self._attempts: dict[tuple[str, ...], Attempt] = {}
        self._goldens: dict[str, Golden] = {}
        self._teachers: dict[tuple[str, str], Teacher] = {}
        self._controls: dict[tuple[str, ...], Judgement] = {}

    def checkpoint(self, fixture: str) -> Path:
        """What an engine loads."""
        return self.fixtures / fixture / "checkpoint"

    def golden(self, fixture: str) -> Golden:
        """The right answers. Raises ``GoldenError``."""
        if fixture not in self._goldens:
            path = self.fixtures / fixture / "golden.safetensors"
            self._goldens[fixture] = golden.read(path)
        return self._goldens[fixture]

    def layers(self, fixture: str) -> Mapping[int, LayerSubstitution]:
        """The substituted layers."""
        return config.read(self.checkpoint(fixture)).substitution.layers

    def attempt(
        self,
        fixture: str,
        dtype: str,
        edits: Sequence[Edit] = (),
        setting: Setting = USUAL,
    ) -> Attempt:
        """Load a fixture after some edits, ask and close."""
        key = attempt_key(fixture, dtype, edits, setting)
        if key not in self._attempts:
            options = self._load_options((fixture,), dtype, setting)
            with self.copy(fixture, edits) as directory:
                attempt = self.engine.attempt(directory, self.golden(fixture).ids, options)
            if attempt.failure and self.engine.guard.case_over:
                return attempt  # cut short by this case: another one asks anew
            self._attempts[key] = attempt
        return self._attempts[key]

    def copy(self, fixture: str, edits: Sequence[Edit] = ()) -> AbstractContextManager[Path]:
        """A copy of a checkpoint after some edits, for an engine that may write into it."""
        return edited(self.checkpoint(fixture), edits)

    def handed(self, case: Case, change: Change) -> list[dict[str, Tensor]]:
        """The tensors that each of one or two updates is given, by name."""
        before, source = self.checkpoint(case.fixture), self.checkpoint(change.source)
        if not change.after:
            return [changed_tensors(before, source, change.edits)]
        between = self.checkpoint(change.after)
        return [
            changed_tensors(before, between),
            changed_tensors(between, source, change.edits),
        ]

    @contextmanager
    def open(
        self, fixture: str, asked: Sequence[str], dtype: str, setting: Setting = USUAL
    ) -> Iterator[Opened]:
        """A session of its own, to be asked the prompts of the fixtures ``asked``."""
        options = self._load_options(asked, dtype, setting)
        with (
            self.copy(fixture) as directory,
            self.engine.open(directory, options) as opened,
        ):
            yield opened

    @contextmanager
    def open_to_decode(
        self, fixture: str, prompts: Sequence[Sequence[int]], steps: int, dtype: str
    ) -> Iterator[Opened]:
        """A session of its own, with room for every prompt and its continuation."""
        options = replace(
            self._load_options((fixture,), dtype, USUAL),
            max_tokens=max(map(len, prompts)) + steps,
            max_prompts=len(prompts),
        )
        with (
            self.copy(fixture) as directory,
            self.engine.open(directory, options) as opened,
        ):
            yield opened

    def teacher(self, fixture: str, dtype: str) -> Teacher:
        """The oracle that follows an engine's continuations of a fixture."""
        compute = self.info.compute[dtype]
        if (fixture, compute) not in self._teachers:
            teacher = Teacher(self.checkpoint(fixture), compute, self.golden(fixture))
            self._teachers[fixture, compute] = teacher
        return self._teachers[fixture, compute]

    def traces(
        self, fixture: str, dtype: str, edits: Sequence[Edit] = (), setting: Setting = USUAL
    ) -> Sequence[Mapping[str, Tensor]]:
        """What the engine records of each prompt; nothing where it cannot, or fails to."""
        if "trace" not in self.attempt(fixture, dtype, edits, setting).abilities:
            return ()
        options = self._load_options((fixture,), dtype, setting)
        with (
            self.copy(fixture, edits) as directory,
            self.engine.open(directory, options) as opened,
        ):
            if isinstance(opened.session, Failure):
                return ()
            return self.engine.traces(opened.session, self.golden(fixture).ids)

    def _load_options(self, fixtures: Sequence[str], dtype: str, setting: Setting) -> LoadOptions:
        """Options whose bounds fit the prompts of some fixtures."""
        prompts = [self.golden(fixture).ids for fixture in fixtures]
        return LoadOptions(
            dtype=dtype,
            max_tokens=max(len(ids) for given in prompts for ids in given),
            max_prompts=max(len(given) for given in prompts),
            features=setting.features,
            engine_args=self.options.engine_args,
            tensor_parallel=setting.tensor_parallel,
            pipeline_parallel=setting.pipeline_parallel,
        )

    def budget(self, dtype: str, setting: Setting) -> str:
        """The name of the budget that the engine's answers are held to."""
        return budget_name(self.info.compute[dtype], setting.tensor_parallel)

    def judge_answers(
        self,
        given: Mapping[str, Answers] | Failure,
        fixture: str,
        dtype: str,
        setting: Setting = USUAL,
    ) -> Judgement:
        """Answers, or why there are none, against the golden of a fixture."""
        if isinstance(given, Failure):
            return judge.of_failure(given)
        return judge.of_answers(given, self.golden(fixture), self.budget(dtype, setting))

    def judge_attempt(
        self, attempt: Attempt, fixture: str, dtype: str, setting: Setting = USUAL
    ) -> Judgement:
        """The same for a whole attempt, its close included."""
        given = attempt.failure or attempt.answers
        judgement = self.judge_answers(given, fixture, dtype, setting)
        return judge.closed(judgement, attempt.closing)

    def control_differs(self, case: Case, dtype: str) -> Judgement | None:
        """Not judged, when the engine refuses the base model or reads it differently (GEN-3).

        The control is loaded in the setting of the case: an engine that quantises, computes in
        another type for a feature, or cannot share a model between ranks, does so without a
        substituted expert too.
        """
        control = self._judge_control(case.control, dtype, case.setting)
        return judge.base_differs(control, " with ".join((case.control, *case.setting.words)))

    def _judge_control(self, control: str, dtype: str, setting: Setting) -> Judgement:
        key = attempt_key(control, dtype, (), setting)
        if key not in self._controls:
            attempt = self.attempt(control, dtype, setting=setting)
            judgement = self.judge_attempt(attempt, control, dtype, setting)
            if key not in self._attempts:
                return judgement
            self._controls[key] = judgement
        return self._controls[key]
