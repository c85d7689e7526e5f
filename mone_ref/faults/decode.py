"""Faults of decoding: prompts are scored right, tokens that come one at a time are not.

The oracle computes a whole sequence at every step. So that a fault can tell decoded tokens from
those of the prompt, the layers that it is given know where the prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mone_ref import generation, moe
from mone_ref.backend import Generation
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.loading import Model
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision

GROUP = "decode"

# The right steps, bound before anything is planted.
_constants = moe.constants
_generate = generation.generate
_generate_each = generation.generate_each
_routes = moe.routes


@dataclass
class Decoding(MoeLayer):
    """A layer in a step of decoding: the first ``given`` tokens came together, as the prompt."""

    given: int = 0


def decoding(model: Model, given: int) -> Model:
    """The same model, whose layers know how many tokens the prompt has."""
    layers = [
        replace(layer, mlp=Decoding(**vars(mlp), given=given))
        if isinstance(mlp := layer.mlp, MoeLayer)
        else layer
        for layer in model.weights.layers
    ]
    return Model(model.config, replace(model.weights, layers=layers), model.precision)


# -- which prompts are decoded wrong


def every_prompt(model: Model, prompt: Sequence[int], steps: int) -> Generation:
    """All of them."""
    return _generate(decoding(model, len(prompt)), prompt, steps)


def all_but_the_first(
    model: Model, prompts: Sequence[Sequence[int]], steps: int
) -> list[Generation]:
    """Those that stand behind another one in a batch."""
    return _generate_each(model, prompts[:1], steps) + [
        every_prompt(model, prompt, steps) for prompt in prompts[1:]
    ]


def one_alone(model: Model, prompts: Sequence[Sequence[int]], steps: int) -> list[Generation]:
    """A prompt that comes alone, whose steps are batches of one token."""
    if len(prompts) > 1:
        return _generate_each(model, prompts, steps)
    return [every_prompt(model, prompt, steps) for prompt in prompts]


# -- what is wrong about their decoded tokens


def no_constants(weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """Leave constants out."""
    total = _constants(weights, ids, layer, precision)  # [T, H]
    if isinstance(layer, Decoding):
        total[layer.given :] = 0
    return total


def last_constants(weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """Add the sum of constants that the token before left in the buffer."""
    total = _constants(weights, ids, layer, precision)  # [T, H]
    if isinstance(layer, Decoding):
        total[layer.given :] = total[layer.given - 1 : -1].clone()
    return total


def first_ids(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Rewrite the ids of the first step in every later one, as a replay of recorded kernels may."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    if isinstance(layer, Decoding) and layer.substitution.listed:
        ids[layer.given + 1 :] = ids[layer.given : layer.given + 1]
    return weights, ids


CONTINUE = "mone_ref.generation", "generate"
CONTINUE_EACH = "mone_ref.generation", "generate_each"
CONSTANTS = "mone_ref.moe", "constants"
ROUTES = "mone_ref.moe", "routes"

fault = partial(plant.fault, stage="run", group=GROUP)

FAULTS = (
    fault(
        "decode-without-constants",
        "Tokens that are decoded add no constants.",
        ("GEN-1", "SEM-1"),
        Patch(*CONTINUE, every_prompt),
        Patch(*CONSTANTS, no_constants),
    ),
    fault(
        "decode-with-last-constants",
        "A decoded token adds the constants of the token before it.",
        ("GEN-1", "SEM-1"),
        Patch(*CONTINUE, every_prompt),
        Patch(*CONSTANTS, last_constants),
    ),
    fault(
        "decode-with-first-ids",
        "From the second step on a substituted layer routes by the ids of the first.",
        ("GEN-1", "SEM-1"),
        Patch(*CONTINUE, every_prompt),
        Patch(*ROUTES, first_ids),
    ),
    fault(
        "decode-first-of-batch-only",
        "In a batch of prompts that are decoded, constants reach the first one only.",
        ("GEN-1", "SEM-1"),
        Patch(*CONTINUE_EACH, all_but_the_first),
        Patch(*CONSTANTS, no_constants),
    ),
    fault(
        "decode-alone-without-constants",
        "A prompt that is decoded by itself, one token a step, adds no constants.",
        ("GEN-1", "SEM-1"),
        Patch(*CONTINUE_EACH, one_alone),
        Patch(*CONSTANTS, no_constants),
    ),
)
