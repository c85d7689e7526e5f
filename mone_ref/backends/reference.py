"""The oracle itself as an engine: the default of ``make conformance``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import __version__, generation, layer, loading, moe, substitution
from mone_ref.backend import (
    FEATURES,
    PARALLEL,
    Backend,
    BackendInfo,
    Generation,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Refused,
    Session,
    Unavailable,
)
from mone_ref.backends.model_session import ModelSession
from mone_ref.errors import Code, Phase
from mone_ref.loading import Model
from mone_ref.moe import MoeLayer
from mone_ref.parallel import model as parallel
from mone_ref.parallel.model import ParallelModel
from mone_ref.parallel.plan import Plan
from mone_ref.precision import exact_products, plain

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ReferenceBackend(Backend):
    """mone-ref's own oracle at an engine's precision.

    One thread: the products of fixtures are too small to share, and threads that wait for each
    other take a busy machine twice the time and more.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def describe(self) -> BackendInfo:
        """Float32, bfloat16 and float16 on the CPU; every listed feature is refused."""
        return BackendInfo(
            name="reference",
            version=__version__,
            device="cpu",
            compute={dtype: dtype for dtype in DTYPES},
            features=frozenset(FEATURES),
            components={"torch": torch.__version__},
            parallel=frozenset(PARALLEL),
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load through ``mone_ref.load``; several ranks are simulated.

        Raises ``Rejected``; ``Refused`` for a feature.
        """
        plan = Plan(options.tensor_parallel, options.pipeline_parallel)
        if plan == Plan():
            return ReferenceSession(load_model(checkpoint, options))
        return RanksSession(load_ranks(checkpoint, options, plan))

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """One MoE layer; ``Unavailable`` for routers that no family here has.

        Raises ``Refused`` when the ranks do not divide the intermediate size.
        """
        if layer.scaling_factor != 1 or layer.groups or layer.correction_bias:
            raise Unavailable("routers with a scaling factor, groups or a bias are not built here")
        try:
            return ReferenceLayer(layer, tensors)
        except ValueError as error:
            raise Refused(str(error), phase=Phase.INIT, code=Code.UNSUPPORTED_FEATURE) from error


def load_model(checkpoint: Path, options: LoadOptions) -> Model:
    """Refuse every feature that substitution excludes (CAP-2), then load.

    Raises ``Refused`` for a feature, ``Rejected`` for a checkpoint.
    """
    refuse_features(options)
    return loading.load(checkpoint, DTYPES[options.dtype])


def load_ranks(checkpoint: Path, options: LoadOptions, plan: Plan) -> ParallelModel:
    """The same over the ranks of a plan. Raises as ``load_model``."""
    refuse_features(options)
    return parallel.load(checkpoint, DTYPES[options.dtype], plan)


def refuse_features(options: LoadOptions) -> None:
    """Raise ``Refused`` with every requested feature in one message (CAP-13)."""
    if options.features:
        names = ", ".join(sorted(options.features))
        raise Refused(
            f"expert substitution excludes: {names}",
            phase=Phase.INIT,
            code=Code.UNSUPPORTED_FEATURE,
        )


class ReferenceSession(ModelSession[Model]):
    """One loaded ``mone_ref.Model``; each prompt is scored alone."""

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Each prompt continued alone."""
        return generation.generate_each(self.model, prompts, steps)


class RanksSession(ModelSession[ParallelModel]):
    """The same over several ranks, which nothing continues."""


class ReferenceLayer(LayerSession):
    """One ``MoeLayer``, as the rank of its spec sees it."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.precision = plain(DTYPES[spec.dtype])
        whole = layer.build(spec, tensors, DTYPES[spec.dtype])
        rank, size = spec.tp
        ranks = range(size) if spec.reduced else (rank,)
        self.shards: dict[layer.Rank, MoeLayer] = {
            (one, size): replace(whole, experts=layer.shard(whole.experts, (one, size)))
            for one in ranks
        }

    @property
    def _layer(self) -> MoeLayer:
        """Any of the shards: constants, routes and rows are the same on every rank."""
        return next(iter(self.shards.values()))

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Route by the layer's rule, then as ``forward_routed``."""
        weights, ids = moe.routes(router_logits, self._layer, self.precision)  # [T, K]
        return self.forward_routed(hidden_states, weights, ids)

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """This rank's partial, or the sum over all ranks where the spec asks for it."""
        with torch.inference_mode(), exact_products():
            partials = [
                layer.partial(hidden_states, topk_weights, topk_ids, shard, self.precision, tp)
                for tp, shard in self.shards.items()
            ]  # each [T, H]
            return torch.stack(partials).sum(dim=0)

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both steps of substitution; the constants' sum padded like the activations."""
        weights, rows = substitution.rewrite_routes(
            topk_weights, topk_ids, self._layer.substitution
        )  # [T, K]
        total = moe.constants(topk_weights, topk_ids, self._layer, self.precision)  # [T, H]
        return weights, rows, layer.padded(total, self.spec.activation_size)

    def expert_rows(self) -> int:
        """Rows of the compact weights."""
        return self._layer.experts.rows
