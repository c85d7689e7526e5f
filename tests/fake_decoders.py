"""Engines that score prompts right and have one flaw when they decode."""

from __future__ import annotations

import torch
from fake_engines import Honest, Wrapped

from mone_ref.backend import Generation, Scores, Unavailable
from mone_ref.faults import FAULTS, planted


class Decodes(Honest):
    """Conforms. ``bent`` is what another engine does to a right continuation."""

    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            return [self.bent(right) for right in self.inner.generate(prompts, steps)]

        def bent(self, right: Generation) -> Generation:
            return right


class ShowsTop20(Decodes):
    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            top = right.scores.logprobs.topk(20)
            return Generation(right.tokens, Scores(top.values, top.indices))


class AnswersTensors(Decodes):
    """Conforms: tokens are numbers of some kind."""

    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            return Generation(torch.tensor(right.tokens), right.scores)  # type: ignore[arg-type]


class DoesNotShow(Decodes):
    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            raise Unavailable("tokens come without scores")


class Breaks(Decodes):
    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            raise RuntimeError("no block is free")


class AnswersBareTokens(Decodes):
    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            return [right.tokens for right in self.inner.generate(prompts, steps)]  # type: ignore[misc]


class EndsEarly(Decodes):
    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            return Generation(right.tokens[:-1], Scores(right.scores.logprobs[:-1]))


class LosesTheLastRow(Decodes):
    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            return Generation(right.tokens, Scores(right.scores.logprobs[:-1]))


class NaNAtTheEnd(Decodes):
    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            right.scores.logprobs[-1] = torch.nan
            return right


class ForeignTokens(Decodes):
    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            return Generation([*right.tokens[:-1], 128], right.scores)


class TellsOtherTokens(Decodes):
    """Goes on from other tokens than it tells."""

    class session(Decodes.session):
        def bent(self, right: Generation) -> Generation:
            return Generation(right.tokens[::-1], right.scores)


class SwapsContinuations(Decodes):
    class session(Decodes.session):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            return super().generate(prompts, steps)[::-1]


class Planted(Decodes):
    """Decodes with a planted fault, and scores without one."""

    fault = ""

    class session(Wrapped):
        def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
            with planted(FAULTS[Planted.fault]):
                return self.inner.generate(prompts, steps)
