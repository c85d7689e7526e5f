"""The layouts in which checkpoints store experts, as converters to compact rows and back.

Compact rows are what ``experts.ExpertWeights`` holds: gate and up ``[R, I, H]``, down
``[R, H, I]``, one row per retained expert, ascending (EXEC-2). Orientation and order come
from the caller, who knows the architecture; a shape cannot tell them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.config import Config
from mone_ref.conversion import plan, streaming
from mone_ref.conversion.converter import WeightConverter
from mone_ref.conversion.operations import (
    Chunk,
    Deinterleave,
    MergeModulelist,
    Operation,
    Shape,
    Transpose,
)
from mone_ref.conversion.plan import Group, Request
from mone_ref.errors import Code, Problem, Rejected
from mone_ref.families import Family
from mone_ref.tensor_names import GATE_UP, expert_tensor

STACKS = ("gate", "up", "down")


@dataclass(frozen=True)
class Fused:
    """Experts in two tensors: ``gate_up_proj`` ``[E, 2I, H]`` and ``down_proj`` ``[E, H, I]``.

    ``transposed``: ``[E, H, 2I]`` and ``[E, I, H]``. ``interleaved``: rows of gate and up
    take turns; else all of gate stands before up.
    """

    transposed: bool = False
    interleaved: bool = False


def per_expert(family: Family) -> list[WeightConverter]:
    """One tensor per logical expert and projection (FMT-4)."""
    path = _path(family)
    return [
        WeightConverter(
            [f"{path}.{{expert}}.{projection}.weight"], [f"{path}.{stack}"], [MergeModulelist()]
        )
        for stack, projection in zip(STACKS, family.projections, strict=True)
    ]


def fused(family: Family, layout: Fused) -> list[WeightConverter]:
    """All experts of a layer in two tensors; for layers in which nothing is substituted."""
    path = _path(family)
    gate, up, down = (f"{path}.{stack}" for stack in STACKS)
    turn: list[Operation] = [Transpose(1, 2)] if layout.transposed else []
    halve: Operation = Deinterleave(1) if layout.interleaved else Chunk(1)
    return [
        WeightConverter([f"{path}.{GATE_UP}"], [gate, up], [*turn, halve]),
        WeightConverter([f"{path}.{family.down}"], [down], turn),
    ]


def compact(
    config: Config, checkpoint: Checkpoint, layout: Fused, dtype: torch.dtype | None = None
) -> list[Group]:
    """How the experts of a checkpoint become compact rows, each layer in its own layout.

    ``layout`` is that of the fused tensors, if there are any. Results are named
    ``<experts path>.gate``, ``.up`` and ``.down``. Raises ``Rejected``: ``FUSED_EXPERTS``
    for fused tensors on a substituted layer (CAP-11), and what ``plan.make`` finds.
    """
    model, family = config.model, config.model.family
    request = Request(
        dtype,
        lambda layer: config.substitution.layer(layer, model.num_experts),
        shapes(config),
    )
    read = _stored(config, checkpoint)
    return plan.make(
        read,
        [*per_expert(family), *fused(family, layout)],
        request,
        lambda name: checkpoint.tensors[name].file if name in read else checkpoint.listing,
    )


def _stored(config: Config, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The projections of the experts of all layers that are built, as meta tensors."""
    family, read = config.model.family, {}
    for name, tensor in streaming.stored(checkpoint).items():
        found = expert_tensor(family, name)
        if found is None or found.layer not in config.model.moe_layers or found.is_constant:
            continue
        if found.expert is None and found.is_fused and found.layer in config.substitution.layers:
            expected = "one tensor per expert and projection: unfuse them under logical ids"
            raise Rejected([_fused(checkpoint, name, expected)])
        read[name] = tensor
    return read


def _fused(checkpoint: Checkpoint, name: str, expected: str) -> Problem:
    code, found = Code.FUSED_EXPERTS, "a tensor of all experts of a substituted layer"
    return tensor_problem(code, checkpoint, name, found, expected, "CAP-11")


def shapes(config: Config) -> dict[str, Shape]:
    """The compact rows of every MoE layer: names and shapes."""
    model = config.model
    rows: dict[str, Shape] = {}
    for layer in config.model.moe_layers:
        retained = len(config.substitution.layer(layer, model.num_experts).retained)
        wide = (retained, model.intermediate_size, model.hidden_size)
        tall = (retained, model.hidden_size, model.intermediate_size)
        for stack, shape in zip(STACKS, (wide, wide, tall), strict=True):
            rows[f"{model.family.experts_path(layer)}.{stack}"] = shape
    return rows


def _path(family: Family) -> str:
    return f"{family.stack}.{{layer}}.{family.experts}"
