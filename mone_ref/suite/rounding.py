"""What honest rounding does to an engine that has a fault, beyond the budgets of the golden.

Prompts are certified for right engines only. A wrong one carries other activations: they may
round more, and a token whose routing was decided may come to stand between two experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from mone_ref import loading, routing
from mone_ref.backend import Scores
from mone_ref.faults import Fault, planted
from mone_ref.fill import golden
from mone_ref.fill.exact import exact
from mone_ref.fill.variants import STORAGE, UNIT_ROUNDOFF, variants
from mone_ref.loading import Model
from mone_ref.suite import distance
from mone_ref.suite.attempt import Answers
from mone_ref.suite.distance import Distance, Yardstick
from mone_ref.suite.golden import Budget

MOST_FLIPS = 3
"""Routes that may flip in one answer; with more, nothing would be explained any more."""


class BrokeDown(Exception):
    """A wrong step that answers on the case itself breaks down on other columns or routes."""


@dataclass(frozen=True)
class Flip:
    """One token of a prompt takes its (k+1)-th expert instead of its k-th, in one layer."""

    prompt: int
    token: int
    layer: int


@dataclass(frozen=True)
class Candidate:
    """An engine that may explain an answer: a checkpoint, loaded in a dtype with a fault."""

    directory: Path
    prompts: Sequence[Sequence[int]]
    compute: str
    fault: Fault | None

    @contextmanager
    def loaded(self) -> Iterator[Model]:
        """Its model, with the fault in force."""
        with planted(self.fault) if self.fault else nullcontext():
            with self.asked():
                model = loading.load(self.directory, STORAGE[self.compute])
            yield model

    @contextmanager
    def asked(self) -> Iterator[None]:
        """The time of a call of this engine: what its fault raises there is ``BrokeDown``."""
        try:
            yield
        except Exception as error:
            if self.fault is None:
                raise
            raise BrokeDown(self.fault.id) from error


def own_budgets(candidate: Candidate) -> list[Budget]:
    """The budgets of each prompt that the number rule gives for this engine itself.

    Raises ``BrokeDown``.
    """
    with candidate.loaded() as model, candidate.asked():
        oracle = exact(model)
        runs = list(variants(candidate.directory, candidate.compute))
        asked = [
            (
                oracle.logits(prompt),  # [T, V]
                oracle.score([prompt])[0],  # [T, V]
                torch.stack([run.model.score([prompt])[0] for run in runs]),  # [R, T, V]
            )
            for prompt in candidate.prompts
        ]
    unit = UNIT_ROUNDOFF[candidate.compute]
    found = [golden.budget(logits, truth, seen, unit) for logits, truth, seen in asked]
    return [Budget(token, float(top)) for token, top in found]


def flips_that_explain(
    candidate: Candidate, found: Mapping[str, Answers], yardstick: Yardstick, limit: float
) -> tuple[Distance, list[Flip]] | None:
    """Flips after which the candidate answers within the limit; None where none do.

    Attention is causal: the first token that is off has flipped itself, in some layer.
    Raises ``BrokeDown``.
    """
    with candidate.loaded() as model:
        oracle = exact(model)
        with candidate.asked():
            answers = oracle.score(candidate.prompts)  # each [T, V]
        flips: list[Flip] = []
        now = measure(found, answers, yardstick)
        while now.ratio > limit:
            place = now.beyond(limit)
            if place is None or len(flips) == MOST_FLIPS:
                return None
            tried = [
                (flip, replaced(answers, flip.prompt, score(oracle, candidate, [*flips, flip])))
                for flip in (Flip(*place, layer) for layer in oracle.weights.moe_layers)
            ]
            measured = [(measure(found, new, yardstick), flip, new) for flip, new in tried]
            now, flip, answers = min(measured, key=lambda one: at(one[0], *place))
            flips.append(flip)
            if now.beyond(limit) == place:
                return None
    return now, flips


def at(away: Distance, prompt: int, token: int) -> float:
    """Distance of one token of a prompt."""
    return float(away.tokens[prompt][token])


def measure(found: Mapping[str, Answers], answers: list[Tensor], yardstick: Yardstick) -> Distance:
    """Distance of answers in every order from one answer ``[T, V]`` per prompt."""
    same = tuple(Scores(logprobs) for logprobs in answers)
    return distance.of_answers(found, dict.fromkeys(found, same), yardstick)


def replaced(answers: list[Tensor], index: int, answer: Tensor) -> list[Tensor]:
    """A list with one entry replaced."""
    return [*answers[:index], answer, *answers[index + 1 :]]


def score(model: Model, candidate: Candidate, flips: Sequence[Flip]) -> Tensor:
    """Log-probabilities ``[T, V]`` of the prompt of the last flip, all its flips in force."""
    prompt = flips[-1].prompt
    here = [flip for flip in flips if flip.prompt == prompt]
    with candidate.asked(), flipped(model, here):
        return model.score([candidate.prompts[prompt]])[0]


@contextmanager
def flipped(model: Model, flips: Sequence[Flip]) -> Iterator[None]:
    """Swap the last chosen and the first rejected expert of some tokens, for one prompt."""
    select, layers = routing.select, iter(model.weights.moe_layers)
    experts = model.config.model.num_experts

    def swapped(preferred: Tensor, count: int) -> Tensor:
        if preferred.shape[-1] != experts:  # a choice among groups
            return select(preferred, count)
        layer = next(layers)
        ids = select(preferred, min(count + 1, experts)).clone()  # [T, K+1]
        for token in [flip.token for flip in flips if flip.layer == layer]:
            ids[token, count - 1] = ids[token, -1]
        return ids[:, :count]

    with mock.patch.object(routing, "select", swapped):
        yield
