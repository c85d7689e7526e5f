"""Features that substitution excludes, switched on all the same: what comes out then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import explicit, loading, quantisation
from mone_ref.backend import LoadOptions, Refused
from mone_ref.declaration import Bounds, Named
from mone_ref.errors import Code, Phase
from mone_ref.faults import plant
from mone_ref.faults.loading import LEFT_UNFILLED
from mone_ref.faults.plant import Fault, Patch
from mone_ref.fields import Fields
from mone_ref.loading import Model
from mone_ref.moe import MoeLayer

# The right steps, bound before anything is planted.
_check = quantisation.check
_read = explicit.read
_load = loading.load

Damage = Callable[[MoeLayer], Tensor]
"""What stands in for the constants ``[S, H]`` of a layer."""


def accepted(feature: str, damage: Damage) -> Callable[[Path, LoadOptions], Model]:
    """Load with one feature on, and what it does to the constants; refuse all others."""

    def load_model(checkpoint: Path, options: LoadOptions) -> Model:
        others = options.features - {feature}
        if others:
            raise Refused("another feature", phase=Phase.INIT, code=Code.UNSUPPORTED_FEATURE)
        model = _load(checkpoint, getattr(torch, options.dtype))
        for layer in model.weights.moe_layers.values() if options.features else ():
            layer.constants = damage(layer)
        return model

    return load_model


# -- what a feature does to constants


def of_the_first_rank(layer: MoeLayer) -> Tensor:
    """Only the rank that holds the first half of the experts has its constants."""
    here = torch.tensor(layer.substitution.substituted) < layer.substitution.num_logical // 2  # [S]
    return torch.where(here[:, None], layer.constants, 0.0)  # [S, H]


def from_two_replicas(layer: MoeLayer) -> Tensor:
    """Both replicas add them before the reduction."""
    return 2 * layer.constants


def of_another_expert(layer: MoeLayer) -> Tensor:
    """Experts were moved, and the list of the substituted ones was not."""
    return layer.constants.roll(1, dims=0)


def none(layer: MoeLayer) -> Tensor:
    """The wrapped layer knows of no constants."""
    return torch.zeros_like(layer.constants)


def in_eight_bits(layer: MoeLayer) -> Tensor:
    """Constants are quantised like the experts beside them."""
    return layer.constants.to(torch.float8_e4m3fn).to(layer.constants.dtype)


def untransformed(layer: MoeLayer) -> Tensor:
    """The outputs of experts are rotated and constants are not, as seen after turning back."""
    return layer.constants.roll(1, dims=1)


# -- compressed-tensors beside the explicit form


def compressed_tensors_unnoticed(fields: Fields) -> None:
    """Report any quantisation but compressed-tensors."""
    if not any(map(quantisation.is_compressed_tensors, quantisation.declared(fields))):
        _check(fields)


def dropped_beside_compressed_tensors(fields: Fields, bounds: Bounds) -> Named | None:
    """Lose the declaration with the config that another parser reads."""
    if any(map(quantisation.is_compressed_tensors, quantisation.declared(fields))):
        return {}
    return _read(fields, bounds)


def of_feature(
    id: str, sentence: str, clause: str, feature: str, damage: Damage, looks_like: str = ""
) -> Fault:
    """A feature that is accepted and silently answers otherwise."""
    patch = Patch("mone_ref.backends.reference", "load_model", accepted(feature, damage))
    clauses = ("CAP-2", clause)
    return plant.fault(
        id, sentence, clauses, patch, stage="load", group="loading", looks_like=looks_like
    )


FAULTS = (
    of_feature(
        "expert-parallel-loses-constants",
        "With expert parallelism constants of experts on other ranks are never added.",
        "CAP-3",
        "expert_parallel",
        of_the_first_rank,
    ),
    of_feature(
        "data-parallel-adds-twice",
        "With data parallelism every replica adds the constants before the reduction.",
        "CAP-4",
        "data_parallel",
        from_two_replicas,
        "twice",
    ),
    of_feature(
        "eplb-moves-experts",
        "Load balancing moves experts and leaves the list of substituted ones behind.",
        "CAP-5",
        "eplb",
        of_another_expert,
        "neighbour",
    ),
    of_feature(
        "lora-drops-constants",
        "The LoRA layer around a substituted layer adds no constants.",
        "CAP-6",
        "lora",
        none,
        "dropped",
    ),
    of_feature(
        "fused-shared-experts-shift-ids",
        "Shared experts that are fused into the routed ones shift the ids of constants.",
        "CAP-7",
        "fused_shared_experts",
        of_another_expert,
        "neighbour",
    ),
    of_feature(
        "constants-quantised",
        "With quantised experts constants are rounded to eight bits.",
        "CAP-8",
        "quantized_experts",
        in_eight_bits,
    ),
    of_feature(
        "constants-not-transformed",
        "With a transform of the routed output constants are added on the wrong side of it.",
        "CAP-9",
        "routed_transforms",
        untransformed,
    ),
    of_feature(
        "deferred-finalize-forgets-constants",
        "Where the output is finalised later nobody adds the constants.",
        "CAP-10",
        "deferred_finalize",
        none,
        "dropped",
    ),
    plant.fault(
        "dropped-beside-compressed-tensors",
        "Beside compressed-tensors the explicit form is dropped, and experts without weights are"
        " not filled.",
        "FMT-12",
        Patch("mone_ref.quantisation", "check", compressed_tensors_unnoticed),
        Patch("mone_ref.explicit", "read", dropped_beside_compressed_tensors),
        *LEFT_UNFILLED,
        stage="parse",
        group="config",
    ),
)
