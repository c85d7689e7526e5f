"""One prompt through a loaded model: its scores, and where its routes went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.config import LayerSubstitution
from mone_ref.loading import Model
from mone_ref.model_config import ModelConfig

ROUTER_IDS = ".router_ids"  # of the intermediates that a layer records: ids [T, K]


@dataclass(frozen=True)
class LayerRoutes:
    """Routes of one prompt in one MoE layer.

    ``total`` counts (token, slot) pairs; ``substituted`` says how many of them hit each
    substituted expert, by ascending logical id, those that nothing hit included.
    """

    layer: int
    total: int
    substituted: dict[int, int]

    @property
    def hits(self) -> int:
        """Routes to any substituted expert: what the constants answer for."""
        return sum(self.substituted.values())

    @property
    def share(self) -> float:
        """``hits`` as a part of all routes, from 0 to 1."""
        return self.hits / self.total


@dataclass(frozen=True)
class Observation:
    """Log-probabilities ``[T, V]`` of the next token in nats, and the routes of every MoE layer."""

    logprobs: Tensor
    layers: tuple[LayerRoutes, ...]


def peak_bytes(model: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes in use at once for one prompt of ``tokens``, beside the parameters.

    The larger of two, in float32 or wider: attention holds four ``[heads, T, T]`` (products,
    scaled, masked, softmax), the answer three ``[T, V]`` (logits as computed, wide, normalised).
    """
    width = torch.promote_types(dtype, torch.float32).itemsize
    return width * tokens * max(4 * model.num_heads * tokens, 3 * model.vocab_size)


def observe(model: Model, prompt: Sequence[int]) -> Observation:
    """Score one prompt and count its routes; the oracle computes as it always does.

    Raises ``ValueError`` on an empty prompt or an id outside the vocabulary.
    """
    recorded: dict[str, Tensor] = {}

    def record(name: str, value: Tensor) -> None:
        if name.endswith(ROUTER_IDS):
            recorded[name] = value

    (logprobs,) = model.score([prompt], record)  # [T, V]
    layers = (
        count(layer.substitution, recorded[f"layers.{index}{ROUTER_IDS}"])
        for index, layer in model.weights.moe_layers.items()
    )
    return Observation(logprobs, tuple(layers))


def count(layer: LayerSubstitution, ids: Tensor) -> LayerRoutes:
    """The routes ``[T, K]`` of one layer, by the substituted expert that they hit."""
    hits = {expert: int((ids == expert).sum()) for expert in layer.substituted}
    return LayerRoutes(layer.layer, ids.numel(), hits)
