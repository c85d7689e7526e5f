"""One MoE layer without a model: built from its tensors, whole or as one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mone_ref import moe
from mone_ref.backend import LayerSpec
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.families import OLMOE, RouterRule
from mone_ref.moe import MoeLayer
from mone_ref.precision import Precision

Rank = tuple[int, int]
"""One rank of tensor parallelism and the number of ranks."""


def build(spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> MoeLayer:
    """The layer with its parameters in ``dtype``; its router is empty, since logits are handed in.

    ``tensors`` are named as in an OLMoE checkpoint. Raises ``KeyError`` for one that is absent.
    """
    substitution = own_entry(spec)

    def stack(experts: tuple[int, ...], part: str, *shape: int) -> Tensor:
        stacked = torch.empty(len(experts), *shape, dtype=dtype)
        for row, expert in enumerate(experts):
            stacked[row] = tensors[f"{spec.path}.{expert}.{part}"]
        return stacked

    hidden, inner, retained = spec.hidden_size, spec.intermediate_size, substitution.retained
    return MoeLayer(
        router=torch.empty(0, hidden, dtype=dtype),
        experts=ExpertWeights(
            gate=stack(retained, f"{OLMOE.gate}.weight", inner, hidden),  # [R, I, H]
            up=stack(retained, f"{OLMOE.up}.weight", inner, hidden),  # [R, I, H]
            down=stack(retained, f"{OLMOE.down}.weight", hidden, inner),  # [R, H, I]
        ),
        constants=stack(substitution.substituted, OLMOE.constant, hidden),  # [S, H]
        substitution=substitution,
        rule=RouterRule(spec.scoring, spec.normalise),
        top_k=spec.top_k,
    )


def own_entry(spec: LayerSpec) -> LayerSubstitution:
    """The entry of the list that the layer index in ``spec.path`` names (EXEC-6)."""
    index = next(int(part) for part in spec.path.split(".") if part.isdecimal())
    listed = spec.declared.get(index, ())
    names = {expert: f"{spec.path}.{expert}.{OLMOE.constant}" for expert in sorted(listed)}
    return LayerSubstitution(index, spec.num_logical_experts, listed, names)


def shard(experts: ExpertWeights, tp: Rank) -> ExpertWeights:
    """One rank's part of the intermediate dimension of every expert.

    Raises ``ValueError`` when the number of ranks does not divide it.
    """
    inner, (rank, size) = experts.gate.shape[1], tp
    if inner % size:
        raise ValueError(f"an intermediate size of {inner} does not divide among {size} ranks")
    part = slice(rank * inner // size, (rank + 1) * inner // size)
    return ExpertWeights(experts.gate[:, part], experts.up[:, part], experts.down[:, :, part])


def partial(
    x: Tensor, weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision, tp: Rank
) -> Tensor:
    """What one rank gives to the reduction, ``[T, H]``; ``layer`` holds its shard.

    ``weights`` and logical ``ids`` ``[T, K]``.
    """
    y = moe.retained(x, weights, ids, layer, precision)  # [T, H]
    if adds_constants(tp):
        y = y + moe.constants(weights, ids, layer, precision)
    return y


def adds_constants(tp: Rank) -> bool:
    """Constants are added on one rank, before the reduction (EXEC-4)."""
    rank, _ = tp
    return rank == 0


def padded(total: Tensor, width: int) -> Tensor:
    """Constants' sums ``[T, H]`` beside activations of another width: zero beyond H (SEM-10)."""
    return torch.nn.functional.pad(total, (0, max(width - total.shape[1], 0)))  # [T, W]
