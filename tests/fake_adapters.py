"""Adapters with one mistake each around an engine that is right.

Used in process, and by name from command lines: ``--backend=fake_adapters:ReturnsLogits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from fake_engines import AcceptsEverything, Honest, Wrapped
from torch import Tensor

from mone_ref.backend import (
    BackendInfo,
    Generation,
    LoadOptions,
    Scores,
    Session,
    Unavailable,
)
from mone_ref.errors import Rejected


class Answering(Wrapped):
    """Bends every answer; ``bend`` gets the right log-probabilities ``[T, V]``."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        return [Scores(self.bend(answer.logprobs)) for answer in self.inner.score(prompts)]

    def bend(self, right: Tensor) -> Any:
        return right


# -- values


class ReturnsLogits(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(self.inner.model.logits(prompt)) for prompt in prompts]


class ReturnsProbabilities(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.exp()


class TurnsTheSign(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return -right


class ForgetsTheDtype(Honest):
    """Loads what it likes, and says that it is float32."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        return super().load(checkpoint, replace(options, dtype="bfloat16"))


class MixesColumns(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.roll(7, dims=1)


# -- rows and columns


class OneRowLate(Honest):
    """Row t holds what the engine says of token t."""

    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.roll(1, dims=0)


class NothingBeforeTheFirst(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return torch.cat([torch.full_like(right[:1], torch.nan), right[:-1]])


class DropsTheFirstRow(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right[1:]


class LateLogits(Honest):
    """Two mistakes at once."""

    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return [Scores(self.inner.model.logits(prompt).roll(1, dims=0)) for prompt in prompts]


class PutsATokenInFront(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            return self.inner.score([[1, *prompt] for prompt in prompts])


class KeepsTheBatch(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right[None]


class Transposes(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.T


class PadsTheVocabulary(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return torch.nn.functional.pad(right, (0, 64), value=-1e9)


class ForgetsTheIds(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.topk(20).values


# -- types


class ReturnsArrays(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Any:
            return right.numpy()


class ReturnsLists(Honest):
    class session(Answering):
        def bend(self, right: Tensor) -> Any:
            return right.tolist()


class ReturnsBareTensors(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> Any:
            return [answer.logprobs for answer in self.inner.score(prompts)]


class ReturnsATuple(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> Any:
            return tuple(self.inner.score(prompts))


class IdsOfAnotherKind(Honest):
    kind: Any = torch.float32

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        kind = self.kind

        class Cut(Wrapped):
            def score(self, prompts: list[list[int]]) -> list[Scores]:
                tops = [answer.logprobs.topk(20) for answer in self.inner.score(prompts)]
                return [Scores(values, ids.to(kind)) for values, ids in tops]

        return Cut(super().load(checkpoint, options))


class NarrowIds(IdsOfAnotherKind):
    """Right: int32 counts as well."""

    kind = torch.int32


class WideAnswersWithGradients(Honest):
    """Right: float64 that belongs to a graph."""

    class session(Answering):
        def bend(self, right: Tensor) -> Tensor:
            return right.double().clone().requires_grad_()


class LoadsNothing(Honest):
    def load(self, checkpoint: Path, options: LoadOptions) -> Any:
        return None


# -- order


class ForgetsPositionsInABatch(Honest):
    class session(Wrapped):
        def score(self, prompts: list[list[int]]) -> list[Scores]:
            answers = self.inner.score(prompts)
            if len(prompts) == 1:
                return answers
            return [Scores(answer.logprobs.flip(0)) for answer in answers]


# -- refusals


class HidesTheReason(Honest):
    """Raises something of its own, with no trace of what the engine said."""

    error: Exception = RuntimeError()

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        try:
            return Wrapped(self.reference.load(checkpoint, options))
        except Rejected:
            pass
        raise self.error


class WrapsItsErrors(HidesTheReason):
    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        self.error = RuntimeError("engine core 12 failed")
        self.error.__cause__ = ValueError("it's cut at 4096: /tmp/x.bin")
        return super().load(checkpoint, options)


class CatchesEverything(AcceptsEverything):
    """Nothing that is broken reaches the suite."""


# -- optional methods


class PromisesTooMuch(Honest):
    """Overrides everything optional, and is right about none of it."""

    class session(Wrapped):
        def expert_rows(self) -> Any:
            return [6, 5]

        def trace(self, prompts: list[list[int]]) -> Any:
            return [{"router": torch.zeros(1)} for _ in prompts]

        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            answers = self.inner.score(prompts)
            return [Generation([1] * (steps + 1), answer) for answer in answers]

        def update(self, tensors: Mapping[str, Tensor]) -> None:
            raise NotImplementedError

        def reload(self, checkpoint: Path) -> None:
            raise AttributeError("'Engine' object has no attribute 'reload_weights'")


class Generates(Honest):
    """Right. What others bend is ``bent``: one continuation of one prompt."""

    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            made = self.inner.generate(prompts, steps)
            return [self.bent(*pair) for pair in zip(prompts, made, strict=True)]

        def bent(self, prompt: list[int], right: Generation) -> Generation:
            return right


class GeneratesThePromptToo(Generates):
    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            return Generation([*prompt, *right.tokens], right.scores)


class ScoresThePromptToo(Generates):
    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            (whole,) = self.inner.score([[*prompt, *right.tokens]])
            return Generation(right.tokens, Scores(whole.logprobs[:-1]))


class EndsAtAnEnd(Generates):
    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            return Generation(right.tokens[:1], Scores(right.scores.logprobs[:1]))


class GeneratesOneNumber(Generates):
    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            return Generation(right.tokens, Scores(right.scores.logprobs.mean()))


class GeneratesWithLogits(Generates):
    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            return Generation(right.tokens, Scores(right.scores.logprobs + 3))


class SamplesTokens(Generates):
    """Takes the least likely token at the first step, and goes on from there."""

    class session(Generates.session):
        def bent(self, prompt: list[int], right: Generation) -> Generation:
            token = int(right.scores.logprobs[0].argmin())
            rest = self.inner.generate([[*prompt, token]], len(right.tokens) - 1)[0]
            rows = torch.cat([right.scores.logprobs[:1], rest.scores.logprobs])
            return Generation([token, *rest.tokens], Scores(rows))


class LosesConstants(Honest):
    """An engine that is wrong behind an adapter that is right."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        session = super().load(checkpoint, options)
        for layer in session.inner.model.weights.moe_layers.values():
            layer.constants.zero_()
        return session


class OnlyMixtral(Honest):
    """Has no other architecture."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        if "Mixtral" not in (checkpoint / "config.json").read_text(encoding="utf-8"):
            raise Unavailable("no kernel")
        return super().load(checkpoint, options)


class HasNothing(Honest):
    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        raise Unavailable("no kernel")


class Coloured(Honest):
    """Loads nothing, and says so in a terminal's colours."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        raise OSError("cannot load \x1b[31mred\x1b[0m weights")


class CannotEnd(Honest):
    def close(self) -> None:
        raise RuntimeError("device busy")


# -- describe()


class Misdescribed(Honest):
    changes: Mapping[str, Any] = MappingProxyType({})

    def describe(self) -> BackendInfo:
        return replace(super().describe(), **self.changes)


class DescribesALongVersion(Misdescribed):
    changes = MappingProxyType({"version": 3})
