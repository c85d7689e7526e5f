"""A wrong engine by construction: the reference with one fault planted, judged like any other.

The fault is there only while the engine is called. The suite that judges it stays honest.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mone_ref.backend import Backend
from mone_ref.config import LayerSubstitution
from mone_ref.faults import FAULTS, Fault
from mone_ref.suite.attempt import Answers, Attempt
from mone_ref.suite.bench import Bench, Options, attempt_key
from mone_ref.suite.cases import USUAL, Case, Change, Setting
from mone_ref.suite.edits import Edit, edited
from mone_ref.suite.golden import Golden
from mone_ref.suite.judge import Judgement, Parts
from mone_ref.suite.outcomes import Result
from mone_ref.suite.planted import (
    STARTS,
    Honest,
    Planted,
    PlantedSession,
    Start,
    Started,
    Watched,
    steps,
)
from mone_ref.suite.runner import Harness
from mone_ref.suite.teacher import Teacher


@dataclass(frozen=True)
class Simulated:
    """What came of one case: the record, and the raw answers as in ``Judgement``."""

    result: Result
    answers: Mapping[str, Answers]
    parts: Mapping[int, Parts]


class Simulator:
    """Runs cases on ``reference``, honest or with any of ``faults`` planted.

    ``reference`` is the backend of mone-ref's own steps, which faults replace. Fixtures,
    edited checkpoints and everything that a fault cannot have touched are kept from run to
    run. Raises ``StaleFault`` for a fault whose step is gone.
    """

    def __init__(
        self,
        root: Path,
        reference: Backend,
        faults: Iterable[Fault] = FAULTS.values(),
        options: Options | None = None,
    ) -> None:
        self.reference = reference
        quick = replace(options or Options(), watchdog=False)
        self._honest = HonestHarness(reference, root, faults, quick)
        self._wrong: dict[Fault, WrongHarness] = {}
        self._runs: dict[tuple[str, str], Simulated] = {}

    @property
    def fixtures(self) -> Path:
        """Where the checkpoints lie."""
        return self._honest.bench.fixtures

    @property
    def honest(self) -> Honest:
        """What the reference without a fault did so far."""
        return self._honest.backend.honest

    def copy(self, fixture: str, edits: Sequence[Edit] = ()) -> Path:
        """A checkpoint after some edits; it stays until ``close``."""
        with self._honest.bench.copy(fixture, edits) as directory:
            return directory

    def run(self, case: Case, dtype: str, fault: Fault | None = None) -> Simulated:
        """Judge one case at one dtype. Raises ``CaseError`` when the case is broken."""
        if fault is not None:
            return simulated(self._wrong_harness(fault), case, dtype)
        if (case.id, dtype) not in self._runs:
            self._runs[case.id, dtype] = simulated(self._honest, case, dtype)
        return self._runs[case.id, dtype]

    def calls(self, fault: Fault) -> Mapping[str, int]:
        """How often each step that a fault replaces was called so far; zero is told."""
        return dict(self._wrong_harness(fault).backend.calls)

    def forget(self, fault: Fault) -> None:
        """Let go of everything that was kept of a fault."""
        self._wrong.pop(fault, None)

    def close(self) -> None:
        """Remove the edited checkpoints."""
        self._honest.bench.directory.cleanup()

    def _wrong_harness(self, fault: Fault) -> WrongHarness:
        if fault not in self._wrong:
            self._wrong[fault] = WrongHarness(self.reference, fault, self._honest)
        return self._wrong[fault]


def simulated(harness: Harness, case: Case, dtype: str) -> Simulated:
    """One case on one engine."""
    result, judgement = harness.judge(case, dtype)
    return Simulated(result, judgement.answers, judgement.parts)


# -- what is kept

Question = tuple[str, str, Sequence[Edit], Setting]
"""What a bench is asked to attempt."""


@dataclass(frozen=True)
class Course:
    """How a case went on the honest reference: its attempts in their order, the watched steps
    that it called outside of them, and what came of it."""

    attempts: tuple[Question, ...]
    called: frozenset[str]
    judgement: Judgement


class HonestHarness(Harness):
    """The reference without a fault. Edited checkpoints are made once: it never writes there."""

    def __init__(
        self, reference: Backend, root: Path, faults: Iterable[Fault], options: Options
    ) -> None:
        self.root = root
        self.backend = Watched(reference, faults)
        super().__init__(self.backend, reference.describe(), root, options)
        self.bench: HonestBench = HonestBench(self.backend, root, options)
        self.courses: dict[tuple[str, str], Course] = {}

    def _run(self, case: Case, dtype: str) -> Judgement:
        bench, before = self.bench, Counter(self.backend.calls)
        bench.asked, bench.in_attempts = [], Counter()
        judgement = super()._run(case, dtype)
        called = frozenset(self.backend.calls - before - bench.in_attempts)
        self.courses[case.id, dtype] = Course(tuple(bench.asked), called, judgement)
        return judgement


class HonestBench(Bench):
    """Keeps what does not depend on a fault, and which steps each attempt called.

    ``asked`` and ``in_attempts`` are the attempts of one case, and the calls that they took now.
    """

    def __init__(self, backend: Watched, root: Path, options: Options) -> None:
        super().__init__(backend, backend.describe(), root, options)
        self.backend = backend
        self.watched = steps(backend.fault)
        self.asked: list[Question] = []
        self.in_attempts: Counter[str] = Counter()
        self._calls: dict[tuple[str, ...], Counter[str]] = {}
        self._starts: dict[tuple[str, ...], list[Started]] = {}
        self._layers: dict[str, Mapping[int, LayerSubstitution]] = {}
        self._copies: dict[tuple[str, ...], Path] = {}
        self._handed: dict[str, list[dict[str, Tensor]]] = {}
        self.directory = tempfile.TemporaryDirectory(prefix="mone-ref-simulate-")

    def attempt(
        self,
        fixture: str,
        dtype: str,
        edits: Sequence[Edit] = (),
        setting: Setting = USUAL,
    ) -> Attempt:
        """As the base class, counting."""
        before = Counter(self.backend.calls)
        attempt = super().attempt(fixture, dtype, edits, setting)
        made = self.backend.calls - before
        self.asked.append((fixture, dtype, edits, setting))
        self.in_attempts += made
        self._calls.setdefault(attempt_key(fixture, dtype, edits, setting), made)
        return attempt

    def _judge_control(self, control: str, dtype: str, setting: Setting) -> Judgement:
        """As the base class; a control that was judged before is an attempt of this case too."""
        self.attempt(control, dtype, setting=setting)
        return super()._judge_control(control, dtype, setting)

    def calls(
        self, fixture: str, dtype: str, edits: Sequence[Edit], setting: Setting
    ) -> Counter[str]:
        """How often an attempt calls each watched step."""
        self.attempt(fixture, dtype, edits, setting)
        return self._calls[attempt_key(fixture, dtype, edits, setting)]

    def starts(self, fixture: str, dtype: str, edits: Sequence[Edit]) -> list[Started]:
        """What each of ``STARTS`` gives, and calls."""
        key = attempt_key(fixture, dtype, edits, USUAL)
        if key not in self._starts:
            with self.copy(fixture, edits) as directory:
                self._starts[key] = [
                    self.backend.start(start, directory, dtype) for start in STARTS
                ]
        return self._starts[key]

    def layers(self, fixture: str) -> Mapping[int, LayerSubstitution]:
        """As the base class, read once."""
        if fixture not in self._layers:
            self._layers[fixture] = super().layers(fixture)
        return self._layers[fixture]

    @contextmanager
    def copy(self, fixture: str, edits: Sequence[Edit] = ()) -> Iterator[Path]:
        """A copy that stays: the reference never writes into a checkpoint."""
        key = attempt_key(fixture, "", edits, USUAL)
        if key not in self._copies:
            place = Path(self.directory.name) / str(len(self._copies))
            with edited(self.checkpoint(fixture), edits) as directory:
                directory.rename(place)
            self._copies[key] = place
        yield self._copies[key]

    def handed(self, case: Case, change: Change) -> list[dict[str, Tensor]]:
        """As the base class, found once."""
        if case.id not in self._handed:
            self._handed[case.id] = super().handed(case, change)
        return [
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in self._handed[case.id]
        ]


class WrongHarness(Harness):
    """The reference with a fault, beside the honest one."""

    def __init__(self, reference: Backend, fault: Fault, honest: HonestHarness) -> None:
        self.honest = honest
        self.watched = steps(fault) <= honest.bench.watched
        self.backend = Planted(reference, fault, honest.backend.honest if self.watched else None)
        super().__init__(self.backend, honest.bench.info, honest.root, honest.bench.options)
        self.bench: WrongBench = WrongBench(self.backend, honest)

    def _run(self, case: Case, dtype: str) -> Judgement:
        course = self.honest.courses.get((case.id, dtype))
        if course is not None and self._takes(course):
            return course.judgement
        return super()._run(case, dtype)

    def _takes(self, course: Course) -> bool:
        """Whether a case goes as it did without the fault: what it asks next follows from what
        it was answered, so each attempt that is the honest one leads to the same next one."""
        if not self.watched or course.called & self.bench.steps:
            return False
        honest = self.honest.bench
        return all(
            self.bench.attempt(*asked) is honest.attempt(*asked) for asked in course.attempts
        )


class WrongBench(Bench):
    """Asks a wrong engine only where one of its wrong steps is reached at all."""

    def __init__(self, backend: Planted, honest: HonestHarness) -> None:
        super().__init__(backend, honest.bench.info, honest.root, honest.bench.options)
        self.honest = honest.bench
        self.backend = backend
        self.steps = steps(backend.fault)

    def attempt(
        self,
        fixture: str,
        dtype: str,
        edits: Sequence[Edit] = (),
        setting: Setting = USUAL,
    ) -> Attempt:
        """The honest attempt where the fault changes nothing, else as the base class."""
        key = attempt_key(fixture, dtype, edits, setting)
        if key not in self._attempts and self._alike(fixture, dtype, edits, setting):
            self._attempts[key] = self.honest.attempt(fixture, dtype, edits, setting)
        return super().attempt(fixture, dtype, edits, setting)

    def _alike(self, fixture: str, dtype: str, edits: Sequence[Edit], setting: Setting) -> bool:
        """Whether no replaced step is called, or none that changes anything."""
        if not self.steps <= self.honest.watched:
            return False
        calls = self.honest.calls(fixture, dtype, edits, setting)
        reached = {step: calls[step] for step in self.steps if calls[step]}
        if not reached:
            return True
        for start, honest in zip(STARTS, self.honest.starts(fixture, dtype, edits), strict=True):
            if all(honest.calls[step] == count for step, count in reached.items()):
                return self._start_alike(start, honest, fixture, dtype, edits)
        return self._session_alike(fixture, dtype, edits, setting)

    def _start_alike(
        self, start: Start, honest: Started, fixture: str, dtype: str, edits: Sequence[Edit]
    ) -> bool:
        """Whether a start of the load, into which all calls of replaced steps fall, gives the
        same with the fault: what follows is then the same program on the same input."""
        with self.copy(fixture, edits) as directory:
            return self.backend.start(start, directory, dtype).found == honest.found

    def _session_alike(
        self, fixture: str, dtype: str, edits: Sequence[Edit], setting: Setting
    ) -> bool:
        """Whether the model that is loaded with the fault is the honest one, and each of its
        answers is: an attempt asks nothing else but the rows, which follow from the model."""
        prompts, options = self.golden(fixture).ids, self._load_options((fixture,), dtype, setting)
        with self.copy(fixture, edits) as directory:
            honest = self.backend.honest.loads.get((directory, str(options)))
            if honest is None:
                return False
            with self.engine.open(directory, options) as opened:
                session = opened.session
                return isinstance(session, PlantedSession) and session.answers_as(
                    honest.digest, prompts
                )

    def golden(self, fixture: str) -> Golden:
        """That of the honest bench."""
        return self.honest.golden(fixture)

    def teacher(self, fixture: str, dtype: str) -> Teacher:
        """That of the honest bench, which remembers what it was asked."""
        return self.honest.teacher(fixture, dtype)

    def layers(self, fixture: str) -> Mapping[int, LayerSubstitution]:
        """Those of the honest bench."""
        return self.honest.layers(fixture)

    @contextmanager
    def copy(self, fixture: str, edits: Sequence[Edit] = ()) -> Iterator[Path]:
        """That of the honest bench."""
        with self.honest.copy(fixture, edits) as directory:
            yield directory

    def handed(self, case: Case, change: Change) -> list[dict[str, Tensor]]:
        """That of the honest bench."""
        return self.honest.handed(case, change)
