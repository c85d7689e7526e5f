"""The eight low-precision runs of the number rule: cast points and permutations.

Each is the oracle with one switch moved, or the oracle on permuted columns. Together they
span what an honest engine may round differently at one compute type. A 16-bit type has six
cast points and two permutations; float32 and TF32 have one and seven, since there only the
order of sums is left to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import loading, precision
from mone_ref.config import ModelConfig
from mone_ref.experts import ExpertWeights
from mone_ref.loading import Model
from mone_ref.model.attention import AttentionWeights
from mone_ref.model.decoder import Decoder, DecoderLayer
from mone_ref.model.latent_attention import LatentWeights
from mone_ref.moe import MoeLayer, SharedExperts

STORAGE = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Parameter dtype of each compute type."""

UNIT_ROUNDOFF = {
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}

RUNS = 8


@dataclass(frozen=True)
class Variant:
    """One low-precision run. ``hidden`` is the order of its hidden columns, ``[H]``; None as
    stored."""

    compute_type: str
    name: str
    model: Model
    hidden: Tensor | None = None


def variants(checkpoint: Path, compute_type: str) -> Iterator[Variant]:
    """The eight runs of one compute type, in their fixed order."""
    base = loading.load(checkpoint, STORAGE[compute_type])
    plain = precision.plain(base.precision.params, tf32=compute_type == "tf32")
    cast_points = precision.cast_points(plain)
    for name, cast_point in cast_points.items():
        yield Variant(compute_type, name, Model(base.config, base.weights, cast_point))
    for seed in range(1, RUNS - len(cast_points) + 1):
        model = Model(base.config, permuted(base, seed), plain)
        yield Variant(compute_type, f"permuted-{seed}", model, hidden_order(base, seed))


def hidden_order(model: Model, seed: int) -> Tensor:
    """The order of hidden columns in ``permuted``, ``[H]``: its first draw."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(model.config.model.hidden_size, generator=generator)


def permuted(model: Model, seed: int) -> Decoder:
    """The same function with hidden, intermediate and value columns in another order.

    Sums inside products then run in another order, as they do in another kernel.
    """
    sizes = model.config.model
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(sizes.hidden_size, generator=generator)  # [H]
    inner = torch.randperm(sizes.intermediate_size, generator=generator)  # [I]
    value_dim = sizes.latent.value if sizes.latent else sizes.head_dim
    column = torch.randperm(value_dim, generator=generator)  # [D of values]
    dense = torch.randperm(sizes.dense_intermediate_size, generator=generator)  # [I of dense]
    shared = torch.randperm(sizes.shared_intermediate_size, generator=generator)  # [I of shared]

    weights = model.weights
    return Decoder(
        embedding=weights.embedding[:, hidden],
        layers=[
            DecoderLayer(
                attention_norm=layer.attention_norm[hidden],
                attention=permuted_latent(layer.attention, sizes, hidden, column)
                if isinstance(layer.attention, LatentWeights)
                else permuted_attention(layer.attention, hidden, column),
                mlp_norm=layer.mlp_norm[hidden],
                mlp=permuted_moe(layer.mlp, hidden, inner, shared)
                if isinstance(layer.mlp, MoeLayer)
                else permuted_experts(layer.mlp, hidden, dense),
            )
            for layer in weights.layers
        ],
        norm=weights.norm[hidden],
        head=weights.head[:, hidden],
    )


def permuted_attention(
    weights: AttentionWeights, hidden: Tensor, column: Tensor
) -> AttentionWeights:
    """Hidden columns everywhere; value columns inside each head, undone by ``o``."""
    per_head = weights.v.view(-1, len(column), weights.v.shape[1])  # [kv_heads, D, H]
    outputs = weights.o.view(weights.o.shape[0], -1, len(column))  # [H, heads, D]
    bias = weights.v_bias
    return replace(
        weights,
        q=weights.q[:, hidden],
        k=weights.k[:, hidden],
        v=per_head[:, column].reshape(weights.v.shape)[:, hidden],
        v_bias=None if bias is None else bias.view(-1, len(column))[:, column].reshape(-1),
        o=outputs[:, :, column].reshape(weights.o.shape)[hidden],
    )


def permuted_latent(
    weights: LatentWeights, sizes: ModelConfig, hidden: Tensor, column: Tensor
) -> LatentWeights:
    """Hidden columns everywhere; value columns inside each head, undone by ``o``.

    Latents keep their order: a permutation would run through their norms, and end where
    it began.
    """
    assert sizes.latent is not None
    plain, value = sizes.latent.plain, sizes.latent.value
    per_head = weights.kv_up.view(-1, plain + value, weights.kv_up.shape[1])  # [heads, N + V, R]
    kept = torch.cat([torch.arange(plain), plain + column])  # [N + V]
    outputs = weights.o.view(weights.o.shape[0], -1, value)  # [H, heads, V]
    q_up = weights.q_up[:, hidden] if weights.q_down is None else weights.q_up
    return replace(
        weights,
        q_down=None if weights.q_down is None else weights.q_down[:, hidden],
        q_up=q_up,
        kv_down=weights.kv_down[:, hidden],
        kv_up=per_head[:, kept].reshape(weights.kv_up.shape),
        o=outputs[:, :, column].reshape(weights.o.shape)[hidden],
    )


def permuted_moe(layer: MoeLayer, hidden: Tensor, inner: Tensor, shared: Tensor) -> MoeLayer:
    """Hidden and intermediate columns of router, experts, shared experts and constants."""
    return replace(
        layer,
        router=layer.router[:, hidden],
        experts=permuted_experts(layer.experts, hidden, inner),
        constants=layer.constants[:, hidden],
        shared=None if layer.shared is None else permuted_shared(layer.shared, hidden, shared),
    )


def permuted_shared(layer: SharedExperts, hidden: Tensor, inner: Tensor) -> SharedExperts:
    """Hidden and intermediate columns of shared experts, and of their gate."""
    gate = None if layer.gate is None else layer.gate[:, hidden]
    return SharedExperts(permuted_experts(layer.weights, hidden, inner), gate)


def permuted_experts(weights: ExpertWeights, hidden: Tensor, inner: Tensor) -> ExpertWeights:
    """Hidden and intermediate columns of experts, or of a dense MLP."""
    return ExpertWeights(
        gate=weights.gate[:, inner][:, :, hidden],
        up=weights.up[:, inner][:, :, hidden],
        down=weights.down[:, hidden][:, :, inner],
    )


def all_variants(checkpoint: Path, compute_types: Iterable[str]) -> list[Variant]:
    """The eight runs of every compute type."""
    return [variant for name in compute_types for variant in variants(checkpoint, name)]
