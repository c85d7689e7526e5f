"""The fast path as an engine: MoE layers on ``torch.nn.functional.grouped_mm``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import __version__, moe
from mone_ref import layer as layers
from mone_ref.backend import (
    FEATURES,
    Backend,
    BackendInfo,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Refused,
    Session,
    Unavailable,
)
from mone_ref.backends import grouped_experts
from mone_ref.backends.grouped_experts import GroupedLayer
from mone_ref.backends.grouped_model import GroupedModel, moved
from mone_ref.backends.model_session import ModelSession
from mone_ref.backends.reference import DTYPES, load_model
from mone_ref.errors import Code, Phase
from mone_ref.precision import exact_products, plain

OLDEST_GPU = (8, 0)
"""The compute capability from which torch has a grouped_mm for CUDA."""


class GroupedBackend(Backend):
    """The model around grouped MoE layers, on the CPU or a GPU.

    Raises ``ImportError`` when torch has no grouped_mm.
    """

    def __init__(self) -> None:
        if not hasattr(torch.nn.functional, "grouped_mm"):
            raise ImportError(
                f"torch {torch.__version__} has no grouped_mm: 2.10 or later is needed"
            )

    def describe(self) -> BackendInfo:
        """Float32, bfloat16 and float16; every listed feature is refused."""
        return BackendInfo(
            name="grouped",
            version=__version__,
            device=default_device(),
            compute={dtype: dtype for dtype in DTYPES},
            features=frozenset(FEATURES),
            components={"torch": torch.__version__},
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load through ``mone_ref.load``, then move and stack layer by layer.

        Raises ``Rejected``; ``Refused`` for a feature; ``ValueError`` for an engine argument or
        ranks; ``Unavailable`` on a GPU that grouped_mm does not run on.
        """
        if options.engine_args:
            raise ValueError(f"no engine arguments are known, got {', '.join(options.engine_args)}")
        if options.tensor_parallel > 1 or options.pipeline_parallel > 1:
            raise ValueError("this backend runs a whole model in one process")
        device = usable(options.device)
        return GroupedSession(GroupedModel(load_model(checkpoint, options), device))

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """One MoE layer; ``Unavailable`` for routers that no family here has.

        Raises ``Refused`` when the ranks do not divide the intermediate size.
        """
        if layer.scaling_factor != 1 or layer.groups or layer.correction_bias:
            raise Unavailable("routers with a scaling factor, groups or a bias are not built here")
        try:
            return GroupedLayerSession(layer, tensors, usable(layer.device))
        except ValueError as error:
            raise Refused(str(error), phase=Phase.INIT, code=Code.UNSUPPORTED_FEATURE) from error


class GroupedSession(ModelSession[GroupedModel]):
    """One loaded model; all prompts are scored in one batch."""


class GroupedLayerSession(LayerSession):
    """One grouped MoE layer, as the rank of its spec sees it."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, Tensor], device: str) -> None:
        self.spec = spec
        self.device = torch.device(device)
        whole = moved(layers.build(spec, tensors, DTYPES[spec.dtype]), self.device)
        rank, size = spec.tp
        ranks = range(size) if spec.reduced else (rank,)
        self.shards: dict[layers.Rank, GroupedLayer] = {
            (one, size): grouped_experts.build(
                replace(whole, experts=layers.shard(whole.experts, (one, size)))
            )
            for one in ranks
        }

    @property
    def _any(self) -> GroupedLayer:
        """Any of the shards: constants, routes and rows are the same on every rank."""
        return next(iter(self.shards.values()))

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Route by the layer's rule, then as ``forward_routed``."""
        precision = plain(DTYPES[self.spec.dtype])
        weights, ids = moe.routes(router_logits.to(self.device), self._any.layer, precision)
        return self.forward_routed(hidden_states, weights, ids)

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """This rank's partial, or the sum over all ranks where the spec asks for it."""
        x, weights, ids = (t.to(self.device) for t in (hidden_states, topk_weights, topk_ids))
        with torch.inference_mode(), exact_products():
            partials = [
                grouped_experts.forward_routed(x, weights, ids, shard, layers.adds_constants(tp))
                for tp, shard in self.shards.items()
            ]  # each [T, H]
            return torch.stack(partials).sum(dim=0).cpu()

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both steps of substitution; the constants' sum padded like the activations."""
        given, ids = topk_weights.to(self.device), topk_ids.to(self.device)
        weights, rows = grouped_experts.rewrite_routes(given, ids, self._any)  # [T, K]
        total = grouped_experts.constant_sum(given, ids, self._any)  # [T, H]
        constants = layers.padded(total.to(DTYPES[self.spec.dtype]), self.spec.activation_size)
        return weights.cpu(), rows.cpu(), constants.cpu()

    def expert_rows(self) -> int:
        """Rows of the stacks."""
        return len(self._any.gate_up)


def default_device() -> str:
    """A GPU when there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable(device: str) -> str:
    """The device asked for, ``auto`` resolved. Raises ``Unavailable`` without a GPU that serves."""
    chosen = default_device() if device == "auto" else device
    if not chosen.startswith("cuda"):
        return chosen
    if not torch.cuda.is_available():
        raise Unavailable("there is no GPU that torch can use here")
    if torch.cuda.get_device_capability(chosen) < OLDEST_GPU:
        oldest = ".".join(map(str, OLDEST_GPU))
        raise Unavailable(f"grouped_mm needs a GPU of compute capability {oldest} or later")
    return chosen
