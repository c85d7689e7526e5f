"""Engines with one fault of character each, to judge the judge.

All are the oracle's adapter with something bent, so that what is left alone is right.
Used in process, and by name from command lines: ``--backend=fake_engines:Exits``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mone_ref.backend import (
    Backend,
    BackendInfo,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Refused,
    Scores,
    Session,
    Unavailable,
)
from mone_ref.backends.reference import ReferenceBackend, ReferenceSession
from mone_ref.errors import Code, Phase, Rejected
from mone_ref.moe import MoeLayer


class Wrapped(Session):
    """A session that passes everything on."""

    def __init__(self, inner: Session) -> None:
        self.inner = inner

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        return self.inner.score(prompts)

    def close(self) -> None:
        self.inner.close()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        self.inner.reload(checkpoint)

    def expert_rows(self) -> dict[int, int]:
        return self.inner.expert_rows()


class Honest(Backend):
    """Conforms. ``session`` wraps what was loaded; ``refused`` is called on a refusal."""

    session: type[Session] = Wrapped
    features: frozenset[str] | None = None

    def __init__(self) -> None:
        self.reference = ReferenceBackend()

    def describe(self) -> BackendInfo:
        info = replace(self.reference.describe(), name="fake", compute={"float32": "float32"})
        return info if self.features is None else replace(info, features=self.features)

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        try:
            return self.session(self.reference.load(checkpoint, options))
        except (Rejected, Refused) as error:
            return self.refused(error)

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        return self.reference.build_layer(layer, tensors)

    def refused(self, error: Exception) -> Session:
        raise error


class HasNoModels(Honest):
    """Has no way to run any model, and says so."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        raise Unavailable("no kernel on this device")


class Uniform(Session):
    """Loaded something it cannot serve: every token is equally likely."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        return [Scores(torch.full((len(prompt), 128), -4.852)) for prompt in prompts]

    def close(self) -> None:
        pass


# -- about refusals


class AcceptsEverything(Honest):
    """Never refuses; a change that it cannot make is forgotten."""

    class session(Wrapped):
        def update(self, tensors: Mapping[str, Tensor]) -> None:
            try:
                self.inner.update(tensors)
            except Rejected:
                return

        def reload(self, checkpoint: Path) -> None:
            return

    def refused(self, error: Exception) -> Session:
        return Uniform()


class RefusesEverything(Honest):
    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        raise Refused("no", code=Code.MISSING_CONSTANT)


class RefusesForAnotherReason(Honest):
    def refused(self, error: Exception) -> Session:
        raise Refused("the moon is full", code=Code.UPDATE_TARGET)


class RefusesWithoutACode(Honest):
    def refused(self, error: Exception) -> Session:
        raise Refused("no")


class SaysItWasLate(Honest):
    """Refuses from ``load()``, but states that a prompt was already running."""

    def refused(self, error: Exception) -> Session:
        raise Refused("no", phase=Phase.RUN, code=Code.MISSING_CONSTANT)


class RefusesLate(Honest):
    def refused(self, error: Exception) -> Session:
        return RefusesToScore()


class RefusesToScore(Uniform):
    def score(self, prompts: list[list[int]]) -> list[Scores]:
        raise Refused("a constant is missing", code=Code.MISSING_CONSTANT)


class HasItsOwnWords(Honest):
    """Refuses with a plain exception, its reason in a cause."""

    def refused(self, error: Exception) -> Session:
        raise RuntimeError("worker failed") from ValueError("no novice for expert 5")


class LogsItsWords(Honest):
    """Refuses with an empty exception; the reason stands in what a process wrote."""

    def refused(self, error: Exception) -> Session:
        os.write(2, b"worker 0: no novice for expert 5\n")
        raise RuntimeError


class Stumbles(Honest):
    def refused(self, error: Exception) -> Session:
        raise KeyError("layers.1.mlp.experts.5")


class RunsOutOfMemory(Honest):
    def refused(self, error: Exception) -> Session:
        raise MemoryError


class RunsOutOfDeviceMemory(Honest):
    """Dies of memory while it speaks of a missing constant."""

    def refused(self, error: Exception) -> Session:
        raise RuntimeError("CUDA out of memory") from ValueError("no novice for expert 5")


class Leaves(Honest):
    def refused(self, error: Exception) -> Session:
        sys.exit(0)


class InterruptsItself(Honest):
    def refused(self, error: Exception) -> Session:
        raise KeyboardInterrupt


def hang() -> None:
    """Until the alarm rings, which is soon: the limit can be long, and only this runs into it."""
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(600)


class Hangs(Honest):
    def refused(self, error: Exception) -> Session:
        hang()
        raise error


class SwallowsTheAlarm(Honest):
    """Catches what the alarm raises, and answers after all."""

    def refused(self, error: Exception) -> Session:
        try:
            hang()
        except BaseException:
            return Uniform()
        raise error


# -- about answers


class AnswersNaN(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            answers = self.inner.score(prompts)
            return [Scores(torch.full_like(answer.logprobs, torch.nan)) for answer in answers]


class AnswersOneNumber(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(answer.logprobs.mean()) for answer in self.inner.score(prompts)]


class LosesTheVocabulary(Honest):
    """One column short."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(answer.logprobs[:, 1:]) for answer in self.inner.score(prompts)]


class AnswersForOneToken(Honest):
    """Leaves out all rows but the last."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(answer.logprobs[-1:]) for answer in self.inner.score(prompts)]


class SwapsTokens(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(answer.logprobs.flip(0)) for answer in self.inner.score(prompts)]


class SwapsPrompts(Honest):
    """Right for one prompt; a batch comes back in another order."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return self.inner.score(prompts)[::-1]


class AnswersNothing(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return None  # type: ignore[return-value]


class ScoresPromptsOnly(Honest):
    """No last row, as engines that score prompts only: conforms."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(answer.logprobs[:-1]) for answer in self.inner.score(prompts)]


class ReturnsTop20(Honest):
    """The twenty likeliest ids per token: conforms."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            top = [answer.logprobs.topk(20) for answer in self.inner.score(prompts)]
            return [Scores(values, ids) for values, ids in top]


class ReusesItsBuffer(Honest):
    """Every answer is a view of one buffer that the next call overwrites: conforms."""

    class session(Wrapped):
        def __init__(self, inner: Session) -> None:
            super().__init__(inner)
            self.buffer = torch.empty(128, 128)

        def score(self, prompts: list[list[int]]) -> list[Scores]:
            answers, start = [], 0
            for answer in self.inner.score(prompts):
                rows = self.buffer[start : start + len(answer.logprobs)]
                answers.append(Scores(rows.copy_(answer.logprobs)))
                start += len(rows)
            return answers


# -- about a configuration that is accepted


class AcceptsQuantisation(Honest):
    """Takes quantised experts on any model, and does nothing about them: conforms."""

    features = frozenset({"quantized_experts"})

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        session = self.reference.load(checkpoint, self.plain(options))
        assert isinstance(session, ReferenceSession)
        if options.features:
            for layer in session.model.weights.moe_layers.values():
                self.configure(layer)
        return session

    def plain(self, options: LoadOptions) -> LoadOptions:
        return replace(options, features=frozenset())

    def configure(self, layer: MoeLayer) -> None:
        pass


class Quantises(AcceptsQuantisation):
    """Rounds the experts to two fraction bits, with and without a substituted one."""

    def configure(self, layer: MoeLayer) -> None:
        for weights in (layer.experts.gate, layer.experts.up, layer.experts.down):
            weights.copy_(weights.to(torch.float8_e5m2))


class QuantisesInBfloat16(AcceptsQuantisation):
    """Computes in a narrower type than was asked, where experts are to be quantised."""

    def plain(self, options: LoadOptions) -> LoadOptions:
        dtype = "bfloat16" if options.features else options.dtype
        return replace(super().plain(options), dtype=dtype)


class QuantisesConstantsAway(AcceptsQuantisation):
    """Right on a model without constants, which are lost."""

    def configure(self, layer: MoeLayer) -> None:
        layer.constants.zero_()


# -- about memory


class LeavesARowUnwritten(Honest):
    """Never writes the first expert row that it allocates."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        session = self.reference.load(checkpoint, options)
        assert isinstance(session, ReferenceSession)
        for layer in session.model.weights.moe_layers.values():
            layer.experts.down[0] = torch.empty_like(layer.experts.down[0])
        return session


class LosesARowOnUpdate(Honest):
    """Moves its constants to new memory when some change, and fills in only those."""

    class session(Wrapped):
        def update(self, tensors: Mapping[str, Tensor]) -> None:
            assert isinstance(self.inner, ReferenceSession)
            for layer in self.inner.model.weights.moe_layers.values():
                layer.constants = torch.empty_like(layer.constants)
            self.inner.update(tensors)


class ReloadsNothing(Honest):
    """Takes new memory for every constant on a reload, and leaves it at that."""

    class session(Wrapped):
        def reload(self, checkpoint: Path) -> None:
            assert isinstance(self.inner, ReferenceSession)
            for layer in self.inner.model.weights.moe_layers.values():
                layer.constants = torch.empty_like(layer.constants)


class ZeroesItsArgument(Honest):
    """A layer that loses the ids that it was given while it answers."""

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        inner = self.reference.build_layer(layer, tensors)

        class Zeroing(LayerSession):
            def rewrite_routes(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
                answer = inner.rewrite_routes(weights, ids)
                ids.zero_()
                return answer

        return Zeroing()


# -- about sessions


class CannotLetGo(Honest):
    class session(Wrapped):
        def close(self) -> None:
            raise RuntimeError("still busy")


class AllocatesEveryRow(Honest):
    class session(Wrapped):
        def expert_rows(self) -> dict[int, int]:
            return dict.fromkeys(self.inner.expert_rows(), 8)


class CountsWrong(Honest):
    """One row too few on every layer."""

    class session(Wrapped):
        def expert_rows(self) -> dict[int, int]:
            return {layer: rows - 1 for layer, rows in self.inner.expert_rows().items()}


class ScoresOnly(Honest):
    """Nothing optional."""

    features = frozenset()

    class session(Session):
        def __init__(self, inner: Session) -> None:
            self.inner = inner

        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return self.inner.score(prompts)

        def close(self) -> None:
            self.inner.close()


class Forgets(Honest):
    """Refuses a change as it should, and is another model afterwards."""

    class session(Wrapped):
        damage = 0.0

        def score(self, prompts: list[list[int]]) -> list[Scores]:
            answers = self.inner.score(prompts)
            return [Scores(answer.logprobs + self.damage) for answer in answers]

        def update(self, tensors: Mapping[str, Tensor]) -> None:
            try:
                self.inner.update(tensors)
            except Rejected:
                self.damage = 1e-6
                raise

        def reload(self, checkpoint: Path) -> None:
            self.damage = 1e-6
            self.inner.reload(checkpoint)


class NeverRepeatsItself(Honest):
    """Honest rounding, another one every second time."""

    class session(Wrapped):
        calls = 0

        def score(self, prompts: list[list[int]]) -> list[Scores]:
            self.calls += 1
            shift = 5e-7 * (self.calls % 2)  # one unit in the last place of float32 near -5
            return [Scores(a.logprobs + shift) for a in self.inner.score(prompts)]


class Reloads(Honest):
    """Can do what others refuse, and does it right: conforms."""

    class session(Wrapped):
        def reload(self, checkpoint: Path) -> None:
            self.inner = ReferenceBackend().load(checkpoint, LoadOptions())


class IgnoresUpdates(Honest):
    class session(Wrapped):
        def update(self, tensors: Mapping[str, Tensor]) -> None:
            return


# -- about a whole process; only ever run in one of their own


class Exits(Honest):
    def refused(self, error: Exception) -> Session:
        os._exit(0)


class Dies(Honest):
    """Ends the process below Python, with the exit code of success."""

    def refused(self, error: Exception) -> Session:
        ctypes.CDLL(None)._exit(0)
        raise error


class Sticks(Honest):
    """Stuck in C, where no Python signal handler runs: waits for a lock that it holds."""

    def refused(self, error: Exception) -> Session:
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_init(lock, None)
        libc.pthread_mutex_lock(lock)
        deadline = (ctypes.c_long * 2)(int(time.time()) + 600, 0)
        libc.pthread_mutex_timedlock(lock, deadline)
        raise error


class AcceptsDuplicates(Honest):
    """One piece of advice not followed."""

    def refused(self, error: Exception) -> Session:
        if isinstance(error, Rejected) and set(error.codes) == {Code.ID_DUPLICATE}:
            return Uniform()
        raise error
