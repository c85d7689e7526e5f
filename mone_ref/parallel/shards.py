"""What one rank holds: its part of every tensor, and a copy of what no rank can do without.

Heads, intermediate columns and rows of the vocabulary are cut; routers, norms, latents and
constants are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mone_ref import layer as layers
from mone_ref.config import ModelConfig
from mone_ref.experts import ExpertWeights
from mone_ref.layer import Rank
from mone_ref.model.attention import AttentionWeights
from mone_ref.model.decoder import Decoder, DecoderLayer
from mone_ref.model.latent_attention import LatentWeights
from mone_ref.moe import MoeLayer, SharedExperts


@dataclass
class Shard(Decoder):
    """One rank of one stage, as a decoder of its own layers.

    ``first`` is the index of its first layer. ``embedding`` and ``head`` ``[V / ranks, H]``
    and ``norm`` have no row on stages that do not use them.
    """

    rank: Rank
    first: int


def local(model: ModelConfig, size: int) -> ModelConfig:
    """The sizes that one of ``size`` ranks computes with."""
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
    )


def cut(whole: Tensor, dim: int, rank: Rank) -> Tensor:
    """One rank's part of a tensor along one dimension, as memory of its own."""
    index, size = rank
    width = whole.shape[dim] // size
    return whole.narrow(dim, index * width, width).clone()


def vocabulary(whole: Tensor, rank: Rank) -> Tensor:
    """One rank's rows of ``[V, H]``, with zeros at the end where they do not divide."""
    missing = -len(whole) % rank[1]
    return cut(torch.nn.functional.pad(whole, (0, 0, 0, missing)), 0, rank)


def of_layer(whole: DecoderLayer, model: ModelConfig, rank: Rank) -> DecoderLayer:
    """One rank's part of a decoder layer."""
    mlp, attention = whole.mlp, whole.attention
    return replace(
        whole,
        attention=of_latent(attention, rank)
        if isinstance(attention, LatentWeights)
        else of_heads(attention, model, rank),
        mlp=of_moe(mlp, rank) if isinstance(mlp, MoeLayer) else of_mlp(mlp, rank),
    )


def of_heads(whole: AttentionWeights, model: ModelConfig, rank: Rank) -> AttentionWeights:
    """Query heads in order, and with them the key heads that they ask."""
    index, size = rank
    parts = min(size, model.num_kv_heads)
    keys = index * parts // size, parts  # several ranks share a key head where there are too few

    def optional(bias: Tensor | None, part: Rank) -> Tensor | None:
        return None if bias is None else cut(bias, 0, part)

    return replace(
        whole,
        q=cut(whole.q, 0, rank),
        k=cut(whole.k, 0, keys),
        v=cut(whole.v, 0, keys),
        o=cut(whole.o, 1, rank),
        q_bias=optional(whole.q_bias, rank),
        k_bias=optional(whole.k_bias, keys),
        v_bias=optional(whole.v_bias, keys),
    )


def of_latent(whole: LatentWeights, rank: Rank) -> LatentWeights:
    """The upward projections head by head; the latents are whole on every rank."""
    return replace(
        whole,
        q_up=cut(whole.q_up, 0, rank),
        kv_up=cut(whole.kv_up, 0, rank),
        o=cut(whole.o, 1, rank),
    )


def of_moe(whole: MoeLayer, rank: Rank) -> MoeLayer:
    """Columns of every expert; router and constants are whole."""
    return replace(
        whole,
        experts=layers.shard(whole.experts, rank),
        constants=whole.constants.clone(),
        shared=None if whole.shared is None else of_shared(whole.shared, rank),
    )


def of_shared(whole: SharedExperts, rank: Rank) -> SharedExperts:
    """Columns of the shared experts; their gate is whole."""
    return replace(whole, weights=of_mlp(whole.weights, rank))


def of_mlp(whole: ExpertWeights, rank: Rank) -> ExpertWeights:
    """Columns of a dense MLP, or of shared experts."""
    return ExpertWeights(cut(whole.gate, 1, rank), cut(whole.up, 1, rank), cut(whole.down, 2, rank))
