"""A backend with a fault planted while it is called: whoever judges it stays honest.

What is skipped here is what the fault cannot have touched, so that a thousand questions to a
wrong engine are quick. Every shortcut rests on one fact: until a replaced step gives something
else, the wrong engine is the honest one on the same input. A loaded model is never changed: an
update works on a copy. So sessions share models, and what an honest step was given stays as it was.
Nor does a load change the report that it rests on.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mone_ref import config, validate
from mone_ref.backend import (
    Backend,
    BackendInfo,
    Generation,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Scores,
    Session,
)
from mone_ref.faults import Fault, Patch, planted
from mone_ref.faults.plant import target
from mone_ref.precision import exact_products
from mone_ref.suite.identical import bits, identical

SEES_SEVERAL = "mone_ref.loading.score_each"
"""The one step that is given more than one prompt."""

REPLAYED = frozenset(
    {
        "mone_ref.experts.weighted_sum",
        "mone_ref.moe.constants",
        "mone_ref.moe.routes",
        "mone_ref.routing.select",
        "mone_ref.substitution.constant_sum",
        "mone_ref.substitution.rewrite_routes",
    }
)
"""Steps of a forward pass that are called again by themselves: they are given tensors, weights and
declarations, and give tensors. ``moe.forward`` is given a callback; what is called once for every
expert would fill the memory."""

Prompt = tuple[int, ...]

CHECK = validate.check
"""The check itself, which is replaced during a load."""


def watch(faults: Iterable[Fault]) -> Fault:
    """A fault that is none: every step that a fault replaces, replaced by itself and counted.

    Raises ``StaleFault``.
    """
    found = {
        (patch.module, patch.name): target(fault, patch)
        for fault in faults
        for patch in fault.patches
    }
    patches = tuple(Patch(*place, step) for place, step in found.items())
    return Fault("honest", "Every step is right.", (), "parse", patches, "")


def steps(fault: Fault) -> frozenset[str]:
    """The names of the steps that a fault replaces."""
    return frozenset(patch.step for patch in fault.patches)


Start = Callable[[Path, str], object]
"""The first part of a load, by the checkpoint and the dtype."""

STARTS: tuple[Start, ...] = (
    lambda checkpoint, _: config.read(checkpoint),
    lambda checkpoint, dtype: validate.check(checkpoint, dtype),
)
"""The config is read; all is checked, that included. Both give a value and change nothing."""


@dataclass(frozen=True)
class Started:
    """What a start gave, as a digest, and how often it called each watched step."""

    found: bytes
    calls: Counter[str]


@dataclass(frozen=True)
class Call:
    """One call of a step, and what it gave."""

    step: str
    given: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class Known:
    """An answer of the honest reference, the watched steps that it took, and the calls of those
    in ``REPLAYED``."""

    scores: Scores
    called: frozenset[str]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Loaded:
    """A session as it was loaded, and the watched steps that it took."""

    session: Session
    digest: bytes
    called: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Checked:
    """What was said of a checkpoint before it was loaded, and the watched steps that it took."""

    report: validate.Report
    called: frozenset[str]


@dataclass
class Honest:
    """What the honest reference did: answers by the digest of a loaded model and a prompt,
    loads by the checkpoint, which nobody changes, and the options, checks by the checkpoint and
    the dtype."""

    answers: dict[tuple[bytes, Prompt], Known] = field(default_factory=dict)
    loads: dict[tuple[Path, str], Loaded] = field(default_factory=dict)
    checks: dict[tuple[Path, str | None], Checked] = field(default_factory=dict)


class Planted(Backend):
    """A backend with a fault; ``calls`` counts the calls of every replaced step.

    ``honest`` is what the honest backend did, empty where there is none; ``answers`` are its
    own, and so are ``loads``, of checkpoints that the honest one loaded.
    """

    def __init__(self, inner: Backend, fault: Fault, honest: Honest | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self.honest = honest or Honest()
        self.answers: dict[tuple[bytes, Prompt], Scores] = {}
        self.loads: dict[tuple[Path, str], Loaded] = {}
        self.calls: Counter[str] = Counter(dict.fromkeys(steps(fault), 0))

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
        """As the inner backend, with the fault; the honest model where that calls no wrong step."""
        key = checkpoint, str(options)
        made = self.honest.loads.get(key)
        if made is None:
            return PlantedSession(self, self._load(checkpoint, options))
        if made.called & self.calls.keys():
            made = self.loads.get(key) or self._loaded(checkpoint, options)
            self.loads[key] = made
        return PlantedSession(self, made.session, made.digest)

    def _loaded(self, checkpoint: Path, options: LoadOptions) -> Loaded:
        session = self._load(checkpoint, options)
        return Loaded(session, digest(vars(session)))

    def _load(self, checkpoint: Path, options: LoadOptions) -> Session:
        with self.planted(), mock.patch.object(validate, "check", self.check):
            return self.inner.load(checkpoint, options)

    def check(self, checkpoint: Path, dtype: str | None = None) -> validate.Report:
        """The first part of a load; the honest report where that calls no wrong step."""
        made = self.honest.checks.get((checkpoint, dtype))
        if made is None or made.called & self.calls.keys():
            return CHECK(checkpoint, dtype)
        return made.report

    def start(self, start: Start, checkpoint: Path, dtype: str) -> Started:
        """Begin a load, with the fault."""
        before = Counter(self.calls)
        with self.planted():
            try:
                found: object = start(checkpoint, dtype)
            except Exception as error:
                found = type(error), vars(error)
        return Started(digest(found), self.calls - before)

    def known(self, model: bytes, prompt: Prompt) -> Scores | None:
        """What an equal honest model answers, if that calls no replaced step, or one that gives
        the same with the fault each time."""
        answer = self.honest.answers.get((model, prompt))
        if answer is None:
            return None
        reached = answer.called & self.calls.keys()
        if reached and (len(reached) > 1 or not reached <= REPLAYED):
            return None
        with self.planted():
            same = all(gives_the_same(call) for call in answer.calls if call.step in reached)
        return answer.scores if same else None

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """As the inner backend, with the fault."""
        with self.planted():
            return PlantedLayer(self, self.inner.build_layer(layer, tensors))


class Watched(Planted):
    """The honest backend: it counts, and writes down in ``honest`` what it does.

    ``noted`` are the calls of steps in ``REPLAYED`` while an answer is made.
    """

    def __init__(self, inner: Backend, faults: Iterable[Fault]) -> None:
        self.noted: list[Call] = []
        watched = watch(faults)
        patches = (
            replace(patch, replacement=self._noting(patch)) if patch.step in REPLAYED else patch
            for patch in watched.patches
        )
        super().__init__(inner, replace(watched, patches=tuple(patches)))

    def _noting(self, patch: Patch) -> Callable[..., Any]:
        @wraps(patch.replacement)
        def step(*given: Any) -> Any:
            result = patch.replacement(*given)
            self.noted.append(Call(patch.step, given, result))
            return result

        return step

    def check(self, checkpoint: Path, dtype: str | None = None) -> validate.Report:
        """The report is written down."""
        with planted(self.fault) as witness:
            report = CHECK(checkpoint, dtype)
        self.calls.update(witness.calls)
        called = frozenset(+Counter(witness.calls))
        self.honest.checks[checkpoint, dtype] = Checked(report, called)
        return report

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """As the inner backend; the model is written down."""
        before = Counter(self.calls)
        made = self._loaded(checkpoint, options)
        made = replace(made, called=frozenset(self.calls - before))
        self.honest.loads[checkpoint, str(options)] = made
        return WatchedSession(self, made.session, made.digest)


class PlantedSession(Session):
    """A session of a ``Planted`` backend.

    Sessions share ``inner`` until they change it. Equal models are asked a prompt once, unless
    the fault is in the step that sees several: any other step has one prompt before it and keeps
    nothing of the last one (``plant.py``).
    """

    def __init__(self, backend: Planted, inner: Session, known_digest: bytes = b"") -> None:
        self.backend = backend
        self.inner = inner
        self._digest = known_digest

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """As the inner session, with the fault."""
        if SEES_SEVERAL in self.backend.calls:
            with self.backend.planted():
                return self.inner.score(prompts)
        return self._score_each(prompts)

    def _score_each(self, prompts: list[list[int]]) -> list[Scores]:
        return [self._answer(tuple(prompt)) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Scores:
        key = self.digest(), prompt
        if key not in self.backend.answers:
            self.backend.answers[key] = self.backend.known(*key) or self._score(prompt)
        return self.backend.answers[key]

    def _score(self, prompt: Prompt) -> Scores:
        with self.backend.planted():
            return self.inner.score([list(prompt)])[0]

    def answers_as(self, model: bytes, prompts: Iterable[Iterable[int]]) -> bool:
        """Whether this is an honest model, and answers prompts as that does."""
        if self.digest() != model or SEES_SEVERAL in self.backend.calls:
            return False
        known = (self.backend.known(model, tuple(prompt)) for prompt in prompts)
        return all(scores is not None for scores in known)

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """As the inner session, with the fault."""
        with self.backend.planted():
            return self.inner.generate(prompts, steps)

    def digest(self) -> bytes:
        """What tells this model, as it is now, from another one."""
        self._digest = self._digest or digest(vars(self.inner))
        return self._digest

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """As the inner session, with the fault."""
        self._own()
        with self.backend.planted():
            self.inner.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        """As the inner session, with the fault."""
        self._own()
        with self.backend.planted():
            self.inner.reload(checkpoint)

    def _own(self) -> None:
        """Before a change: from here on a model of its own."""
        self.inner = copy.deepcopy(self.inner)
        self._digest = b""

    def close(self) -> None:
        """As the inner session, with the fault."""
        with self.backend.planted():
            self.inner.close()

    def expert_rows(self) -> dict[int, int]:
        """As the inner session, with the fault."""
        with self.backend.planted():
            return self.inner.expert_rows()

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """As the inner session, with the fault."""
        with self.backend.planted():
            return self.inner.trace(prompts)


class WatchedSession(PlantedSession):
    """A session of the honest backend."""

    backend: Watched

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """As the inner session; every answer is written down."""
        return self._score_each(prompts)

    def _answer(self, prompt: Prompt) -> Scores:
        """An answer that is known counts as one that was made: it took the same steps."""
        scores = super()._answer(prompt)
        self.backend.calls.update(self.backend.honest.answers[self.digest(), prompt].called)
        return scores

    def _score(self, prompt: Prompt) -> Scores:
        before = Counter(self.backend.calls)
        self.backend.noted.clear()
        scores = super()._score(prompt)
        called = frozenset(self.backend.calls - before)
        known = Known(scores, called, tuple(self.backend.noted))
        self.backend.honest.answers[self.digest(), prompt] = known
        return scores


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


def gives_the_same(call: Call) -> bool:
    """Whether a step, as it is now, gives what it gave, and leaves what it is given as it was."""
    module, _, name = call.step.rpartition(".")
    given = tuple(value.clone() if isinstance(value, Tensor) else value for value in call.given)
    with torch.inference_mode(), exact_products():
        try:
            result = getattr(importlib.import_module(module), name)(*given)
        except Exception:
            return False
    return identical(result, call.result) and identical(given, call.given)


def digest(value: object) -> bytes:
    """A hash of everything that an object holds. Two equal digests mean two equal objects."""
    buffer = io.BytesIO()
    Flat(buffer).dump(value)
    return hashlib.blake2b(buffer.getbuffer()).digest()


class Flat(pickle.Pickler):
    """Writes tensors as their plain bytes: torch's own way is slow and holds addresses."""

    def reducer_override(self, value: Any) -> Any:
        """Dtype, shape and bytes of a tensor; everything else as ever."""
        if not isinstance(value, Tensor):
            return NotImplemented
        held = bits(value.detach()).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), held),)
