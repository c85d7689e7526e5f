"""The layer stack: token ids -> log-probabilities of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref import experts, moe
from mone_ref.config import ModelConfig
from mone_ref.experts import ExpertWeights
from mone_ref.model import latent_attention
from mone_ref.model.attention import AttentionWeights, attention, rms_norm
from mone_ref.model.latent_attention import LatentWeights
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision, product


@dataclass
class DecoderLayer:
    """One pre-norm decoder layer, with experts or with one dense MLP.

    A dense MLP is an expert that every token takes, unweighted: ``ExpertWeights`` of one row.
    """

    attention_norm: Tensor
    attention: AttentionWeights | LatentWeights
    mlp_norm: Tensor
    mlp: MoeLayer | ExpertWeights


@dataclass
class Decoder:
    """All weights of a decoder: ``embedding`` and ``head`` ``[V, H]``, ``norm`` ``[H]``."""

    embedding: Tensor
    layers: list[DecoderLayer]
    norm: Tensor
    head: Tensor

    @property
    def moe_layers(self) -> dict[int, MoeLayer]:
        """Layer index -> the MoE layer there; dense layers are absent."""
        return {i: x.mlp for i, x in enumerate(self.layers) if isinstance(x.mlp, MoeLayer)}


def ignore(name: str, value: Tensor) -> None:
    """Record nothing."""


def logits(
    prompt: Tensor,
    decoder: Decoder,
    model: ModelConfig,
    precision: Precision,
    record: Record = ignore,
) -> Tensor:
    """Logits at every position of one prompt: ids ``[T]`` -> ``[T, V]``.

    ``record`` receives ``layers.{L}.<name>`` for every intermediate of each layer's MLP.
    """
    residual = decoder.embedding[prompt].to(precision.residual)  # [T, H]
    for index, layer in enumerate(decoder.layers):
        x = rms_norm(residual, layer.attention_norm, model.rms_norm_eps, precision)  # [T, H]
        residual = residual + attend(x, layer.attention, model, precision).to(residual.dtype)

        x = rms_norm(residual, layer.mlp_norm, model.rms_norm_eps, precision)  # [T, H]
        y = forward_mlp(x, layer.mlp, precision, prefixed(record, f"layers.{index}."))  # [T, H]
        residual = residual + y.to(residual.dtype)
        record(f"layers.{index}.residual", residual)
    x = rms_norm(residual, decoder.norm, model.rms_norm_eps, precision)  # [T, H]
    return product(x, decoder.head, precision)  # [T, V]


def attend(
    x: Tensor, weights: AttentionWeights | LatentWeights, model: ModelConfig, precision: Precision
) -> Tensor:
    """Attention of the kind that a layer has: ``[T, H]`` -> ``[T, H]``."""
    if isinstance(weights, LatentWeights):
        return latent_attention.attention(x, weights, model, precision)
    return attention(x, weights, model, precision)


def forward_mlp(
    x: Tensor, mlp: MoeLayer | ExpertWeights, precision: Precision, record: Record
) -> Tensor:
    """The experts of a layer, or its dense MLP: ``[T, H]`` -> ``[T, H]``."""
    if isinstance(mlp, MoeLayer):
        return moe.forward(x, mlp, precision, record)
    y = experts.mlp(x, mlp, 0, precision)  # [T, H]
    record("dense_in", x)
    record("dense_out", y)
    return y


def log_probabilities(z: Tensor, precision: Precision) -> Tensor:
    """Logits ``[T, V]`` -> log-probabilities ``[T, V]`` in nats, in float32 or wider."""
    return torch.log_softmax(z.to(precision.wide), dim=-1)


def prefixed(record: Record, prefix: str) -> Record:
    """A recorder that puts a layer's name before every intermediate."""
    return lambda name, value: record(prefix + name, value)
