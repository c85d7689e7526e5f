"""One MoE layer of vLLM without a model: its factory, its loading, its routed experts.

Only vLLM computes here. The layer is the single module of a model class that vLLM itself
wraps, initialises and loads; calls then go to the layer's own methods.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mone_ref.backend import LayerSession, LayerSpec, Unavailable

CPU_HIDDEN_MULTIPLE = 32
"""vLLM's CPU kernels for experts take no other hidden sizes."""

ROUTER = ("softmax", False, 1.0, None)
"""The routers built here: scoring, correction bias, scaling factor and groups."""


def build(spec: LayerSpec, tensors: Mapping[str, Tensor], cuda: bool) -> LayerSession:
    """Build and load the layer of one rank; raises ``Unavailable``, or whatever vLLM raises.

    Where no expert kernel takes the hidden size, only the substitution is built.
    """
    if (spec.scoring, spec.correction_bias, spec.scaling_factor, spec.groups) != ROUTER:
        raise Unavailable("only softmax routers without bias, groups and factor are built here")
    if spec.reduced:
        raise Unavailable("vLLM reduces between processes, and a layer is built in one")
    whole = cuda or spec.hidden_size % CPU_HIDDEN_MULTIPLE == 0
    from vllm.config import set_current_vllm_config

    config = _config(spec, cuda)
    with _default_dtype(getattr(torch, spec.dtype)), set_current_vllm_config(config):
        _join_world_of_one()
        model = _loaded(config, spec, tensors, whole)
    return VllmLayer(spec, config, model) if whole else VllmRoutes(spec, model.layer)


class VllmRoutes(LayerSession):
    """The substitution of a layer, which no kernel computes at this size."""

    in_place = True

    def __init__(self, spec: LayerSpec, substitution: Any) -> None:
        self.spec = spec
        self.substitution = substitution

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """vLLM's ``transform_routes``, which takes the activations for their shape and dtype."""
        width = self.spec.activation_size or self.spec.hidden_size
        device = self.substitution.values.device
        weights, ids = topk_weights.to(device), topk_ids.to(device)  # [T, K]
        activations = torch.empty(
            len(ids), width, dtype=getattr(torch, self.spec.dtype), device=device
        )  # [T, W]
        with torch.inference_mode():
            constants = self.substitution.transform_routes(activations, weights, ids)  # [T, W]
        return weights, ids, constants

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Not at this hidden size."""
        raise Unavailable(self._reason)

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Not at this hidden size."""
        raise Unavailable(self._reason)

    @property
    def _reason(self) -> str:
        return (
            f"vLLM's CPU kernels take hidden sizes that {CPU_HIDDEN_MULTIPLE} divides, "
            f"not {self.spec.hidden_size}"
        )


class VllmLayer(VllmRoutes):
    """A whole layer, of one rank."""

    def __init__(self, spec: LayerSpec, config: Any, model: Any) -> None:
        super().__init__(spec, model.layer.routed_experts.expert_substitution)
        self.config = config
        self.layer = model.layer

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """vLLM's router and experts; the factory was told to leave out the final all-reduce."""
        device = self.substitution.values.device
        with self._running(len(hidden_states)):
            output: Tensor = self.layer(
                hidden_states=hidden_states.to(device), router_logits=router_logits.to(device)
            )
        return output

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """vLLM's routed experts, with ids in the dtype that its router would return."""
        device = self.substitution.values.device
        experts = self.layer.routed_experts
        dtype = experts.quant_method.topk_indices_dtype or torch.int32
        with self._running(len(hidden_states)):
            experts._ensure_moe_quant_config_init()
            output: Tensor = experts.forward_modular(
                x=hidden_states.to(device),
                topk_weights=topk_weights.to(device),
                topk_ids=topk_ids.to(device, dtype),
            )
        return output

    def expert_rows(self) -> int:
        """First dimension of the stacked gate and up projections."""
        return int(self.layer.routed_experts.w13_weight.shape[0])

    @contextmanager
    def _running(self, tokens: int) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with (
            torch.inference_mode(),
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config, num_tokens=tokens),
        ):
            yield


def _config(spec: LayerSpec, cuda: bool) -> Any:
    """What vLLM looks at when it builds a layer; a model config in name only."""
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig

    hf_config = SimpleNamespace(
        model_type="olmoe",
        approximate_experts={str(layer): list(ids) for layer, ids in spec.declared.items()},
    )
    config = VllmConfig(
        device_config=DeviceConfig("cuda" if cuda else "cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )
    config.model_config = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        dtype=getattr(torch, spec.dtype),
        enforce_eager=True,
        is_moe=True,
        quantization=None,
        word_embeddings_untied_by_checkpoint=False,
    )
    return config


def _loaded(config: Any, spec: LayerSpec, tensors: Mapping[str, Tensor], whole: bool) -> Any:
    """A model of one layer, initialised, loaded and prepared by vLLM's own functions."""
    from vllm.model_executor.model_loader import utils

    make = _routed_layer if whole else _substitution
    model_class = _model_of(lambda: make(config, spec), spec.path)
    device = config.device_config.device
    with torch.device(device):
        model: Any = utils.initialize_model(config, model_class=model_class)
    model.load_weights((name, tensors[name]) for name in sorted(tensors))
    utils.process_weights_after_loading(model, config.model_config, device)
    return model


def _routed_layer(config: Any, spec: LayerSpec) -> nn.Module:
    """vLLM's factory, told the rank that its process group of one cannot tell."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.fused_moe import config as moe_config

    rank, size = spec.tp
    with patch.object(moe_config, "get_tensor_model_parallel_rank", lambda: rank):
        layer: nn.Module = FusedMoEFactory(
            num_experts=spec.num_logical_experts,
            top_k=spec.top_k,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            params_dtype=config.model_config.dtype,
            renormalize=spec.normalise,
            prefix=spec.path,
            tp_size=size,
            reduce_results=False,
        )
    return layer


def _substitution(config: Any, spec: LayerSpec) -> nn.Module:
    """The part of the factory that builds the substitution."""
    from vllm.model_executor.layers.fused_moe.expert_substitution import make_expert_substitution

    built: nn.Module = make_expert_substitution(
        config.model_config,
        spec.path,
        spec.num_logical_experts,
        spec.hidden_size,
        config.model_config.dtype,
    )
    return built


def drained(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Take every tensor and load none: a substitution has constants only, and vLLM takes them out
    on the way here."""
    for _ in weights:
        pass
    return []


def _model_of(make: Callable[[], nn.Module], path: str) -> type[nn.Module]:
    """A model class whose only module is the layer; vLLM wraps it to take out the constants."""

    class OneLayer(nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.layer = make()

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            below = ((name.removeprefix(f"{path}."), tensor) for name, tensor in weights)
            load = getattr(self.layer, "load_weights", drained)
            return set(load(below))

    return OneLayer


def _join_world_of_one() -> None:
    """The process groups that a layer asks for, unless an earlier layer has made them."""
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.platforms import current_platform

    if model_parallel_is_initialized():
        return
    with tempfile.TemporaryDirectory() as scratch:
        init_distributed_environment(
            1, 0, f"file://{Path(scratch) / 'store'}", 0, current_platform.dist_backend
        )
        ensure_model_parallel_initialized(1, 1)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
