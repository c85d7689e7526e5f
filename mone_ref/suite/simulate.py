"""A wrong engine by construction: the reference with one fault planted, judged like any other.

The fault is there only while the engine is called. The suite that judges it stays honest.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mone_ref.backend import (
    Backend,
    BackendInfo,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Scores,
    Session,
)
from mone_ref.config import LayerSubstitution
from mone_ref.faults import FAULTS, Fault, Patch, planted
from mone_ref.faults.plant import target
from mone_ref.suite.attempt import Answers, Attempt
from mone_ref.suite.bench import Bench, Options, attempt_key
from mone_ref.suite.cases import Case, Change
from mone_ref.suite.edits import Edit, edited
from mone_ref.suite.golden import Golden
from mone_ref.suite.judge import Parts
from mone_ref.suite.outcomes import Result
from mone_ref.suite.runner import Harness

BATCH = ("mone_ref.loading", "score_each")
"""The step that is given all prompts of a batch."""


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
        self, root: Path, reference: Backend, faults: Iterable[Fault] = FAULTS.values()
    ) -> None:
        self.root = root
        self.reference = reference
        self._honest = HonestHarness(reference, root, watch(faults))
        self._wrong: dict[Fault, WrongHarness] = {}

    def run(self, case: Case, dtype: str, fault: Fault | None = None) -> Simulated:
        """Judge one case at one dtype. Raises ``CaseError`` when the case is broken."""
        harness = self._honest if fault is None else self._wrong_harness(fault)
        result, judgement = harness.judge(case, dtype)
        return Simulated(result, judgement.answers, judgement.parts)

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


def watch(faults: Iterable[Fault]) -> Fault:
    """A fault that is none: every step that a fault replaces, replaced by itself and counted.

    Raises ``StaleFault``.
    """
    steps = {
        (patch.module, patch.name): target(fault, patch)
        for fault in faults
        for patch in fault.patches
    }
    patches = tuple(Patch(*place, step) for place, step in steps.items())
    return Fault("honest", "Every step is right.", (), "parse", patches, "")


def steps(fault: Fault) -> frozenset[str]:
    """The names of the steps that a fault replaces."""
    return frozenset(f"{patch.module}.{patch.name}" for patch in fault.patches)


def sees_batches(fault: Fault) -> bool:
    """Whether a fault replaces the step that is given all prompts of a batch."""
    return any(
        (patch.module, patch.name) == BATCH and patch.replacement is not target(fault, patch)
        for patch in fault.patches
    )


# -- the engine


class Planted(Backend):
    """A backend that has a fault while it is called, and counts the calls of replaced steps."""

    def __init__(self, inner: Backend, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault
        self.calls: Counter[str] = Counter(dict.fromkeys(steps(fault), 0))
        self.sees_batches = sees_batches(fault)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the fault for the time of a block."""
        with planted(self.fault) as witness:
            try:
                yield
            finally:
                self.calls.update(witness.calls)

    def describe(self) -> BackendInfo:
        """As the inner backend."""
        return self.inner.describe()

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """As the inner backend, with the fault."""
        with self.planted():
            return PlantedSession(self, self.inner.load(checkpoint, options))

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """As the inner backend, with the fault."""
        with self.planted():
            return PlantedLayer(self, self.inner.build_layer(layer, tensors))


class PlantedSession(Session):
    """A session of a ``Planted`` backend.

    It scores a prompt once. The reference scores prompts one by one and keeps nothing
    between them, nor does a fault that sees one prompt at a time: order and company change
    no answer.
    """

    def __init__(self, backend: Planted, inner: Session) -> None:
        self.backend = backend
        self.inner = inner
        self._scored: dict[tuple[int, ...], Scores] = {}

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """As the inner session, with the fault."""
        if self.backend.sees_batches:
            with self.backend.planted():
                return self.inner.score(prompts)
        keys = [tuple(prompt) for prompt in prompts]
        with self.backend.planted():
            for key in keys:
                if key not in self._scored:
                    self._scored[key] = self.inner.score([list(key)])[0]
        return [self._scored[key] for key in keys]

    def close(self) -> None:
        """As the inner session, with the fault."""
        with self.backend.planted():
            self.inner.close()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """As the inner session, with the fault."""
        self._scored.clear()
        with self.backend.planted():
            self.inner.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        """As the inner session, with the fault."""
        self._scored.clear()
        with self.backend.planted():
            self.inner.reload(checkpoint)

    def expert_rows(self) -> dict[int, int]:
        """As the inner session, with the fault."""
        with self.backend.planted():
            return self.inner.expert_rows()

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """As the inner session, with the fault."""
        with self.backend.planted():
            return self.inner.trace(prompts)


class PlantedLayer(LayerSession):
    """A layer of a ``Planted`` backend."""

    def __init__(self, backend: Planted, inner: LayerSession) -> None:
        self.backend = backend
        self.inner = inner
        self.in_place = inner.in_place

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """As the inner layer, with the fault."""
        with self.backend.planted():
            return self.inner.forward(hidden_states, router_logits)

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """As the inner layer, with the fault."""
        with self.backend.planted():
            return self.inner.forward_routed(hidden_states, topk_weights, topk_ids)

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the inner layer, with the fault."""
        with self.backend.planted():
            return self.inner.rewrite_routes(topk_weights, topk_ids)

    def expert_rows(self) -> int:
        """As the inner layer, with the fault."""
        with self.backend.planted():
            return self.inner.expert_rows()


# -- what is kept


class HonestHarness(Harness):
    """The reference without a fault. Edited checkpoints are made once: it never writes there."""

    def __init__(self, reference: Backend, root: Path, watched: Fault) -> None:
        self.backend = Planted(reference, watched)
        super().__init__(self.backend, reference.describe(), root)
        self.bench: HonestBench = HonestBench(self.backend, root)


class HonestBench(Bench):
    """Keeps what does not depend on a fault, and which steps each attempt called."""

    def __init__(self, backend: Planted, root: Path) -> None:
        super().__init__(backend, backend.describe(), root, Options())
        self.backend = backend
        self.watched = steps(backend.fault)
        self._called: dict[tuple[str, ...], frozenset[str]] = {}
        self._layers: dict[str, Mapping[int, LayerSubstitution]] = {}
        self._copies: dict[tuple[str, ...], Path] = {}
        self._handed: dict[str, list[dict[str, Tensor]]] = {}
        self.directory = tempfile.TemporaryDirectory(prefix="mone-ref-simulate-")

    def attempt(
        self,
        fixture: str,
        dtype: str,
        edits: Sequence[Edit] = (),
        features: frozenset[str] = frozenset(),
    ) -> Attempt:
        """As the base class, counting."""
        before = Counter(self.backend.calls)
        attempt = super().attempt(fixture, dtype, edits, features)
        key = attempt_key(fixture, dtype, edits, features)
        self._called.setdefault(key, frozenset(self.backend.calls - before))
        return attempt

    def called(
        self, fixture: str, dtype: str, edits: Sequence[Edit], features: frozenset[str]
    ) -> frozenset[str]:
        """The watched steps that an attempt calls."""
        self.attempt(fixture, dtype, edits, features)
        return self._called[attempt_key(fixture, dtype, edits, features)]

    def layers(self, fixture: str) -> Mapping[int, LayerSubstitution]:
        """As the base class, read once."""
        if fixture not in self._layers:
            self._layers[fixture] = super().layers(fixture)
        return self._layers[fixture]

    @contextmanager
    def copy(self, fixture: str, edits: Sequence[Edit] = ()) -> Iterator[Path]:
        """A copy that stays: the reference never writes into a checkpoint."""
        key = attempt_key(fixture, "", edits, frozenset())
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
        self.backend = Planted(reference, fault)
        super().__init__(self.backend, honest.bench.info, honest.bench.fixtures.parent)
        self.bench: WrongBench = WrongBench(self.backend, honest.bench)


class WrongBench(Bench):
    """Asks a wrong engine only where one of its wrong steps is reached at all."""

    def __init__(self, backend: Planted, honest: HonestBench) -> None:
        super().__init__(backend, honest.info, honest.fixtures.parent, honest.options)
        self.honest = honest
        self.steps = steps(backend.fault)

    def attempt(
        self,
        fixture: str,
        dtype: str,
        edits: Sequence[Edit] = (),
        features: frozenset[str] = frozenset(),
    ) -> Attempt:
        """The honest attempt, when it calls no step that the fault replaces: up to the first
        such call both are the same program on the same input."""
        if self.steps <= self.honest.watched:
            called = self.honest.called(fixture, dtype, edits, features)
            if not self.steps & called:
                return self.honest.attempt(fixture, dtype, edits, features)
        return super().attempt(fixture, dtype, edits, features)

    def golden(self, fixture: str) -> Golden:
        """That of the honest bench."""
        return self.honest.golden(fixture)

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
