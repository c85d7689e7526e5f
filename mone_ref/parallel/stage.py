"""One pipeline stage over the ranks that this process holds of it.

What every rank computes alike (norms, residuals) is computed once; what a rank computes by
itself is a partial, and ``Group.reduce`` makes it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mone_ref import experts, layer, moe
from mone_ref.config import ModelConfig
from mone_ref.experts import ExpertWeights
from mone_ref.layer import Rank
from mone_ref.model.attention import rms_norm
from mone_ref.model.decoder import prefixed
from mone_ref.moe import MoeLayer, Record
from mone_ref.parallel import attention, shards
from mone_ref.parallel.group import Group
from mone_ref.parallel.shards import Shard
from mone_ref.precision import Precision, product


def embed(prompt: Tensor, held: Sequence[Shard], precision: Precision, group: Group) -> Tensor:
    """Ids ``[T]`` -> the residual of the first stage, ``[T, H]``: each row comes from one rank."""
    return group.reduce([own_rows(prompt, shard) for shard in held]).to(precision.residual)


def own_rows(prompt: Tensor, shard: Shard) -> Tensor:
    """Embeddings of the tokens in one rank's part of the vocabulary, zero elsewhere: ``[T, H]``."""
    index, _ = shard.rank
    rows = prompt - index * len(shard.embedding)  # [T]
    mine = (rows >= 0) & (rows < len(shard.embedding))  # [T]
    found = torch.zeros(len(prompt), shard.embedding.shape[1], dtype=shard.embedding.dtype)
    found[mine] = shard.embedding[rows[mine]]
    return found


def run_layers(
    residual: Tensor,
    held: Sequence[Shard],
    model: ModelConfig,
    precision: Precision,
    group: Group,
    record: Record,
) -> Tensor:
    """The residual ``[T, H]`` after the layers of one stage; ``model`` has the whole sizes."""
    own = shards.local(model, held[0].rank[1])
    for position in range(len(held[0].layers)):
        parts = [shard.layers[position] for shard in held]
        x = rms_norm(residual, parts[0].attention_norm, model.rms_norm_eps, precision)  # [T, H]
        partials = attention.partials(
            x, [part.attention for part in parts], own, precision, group
        )  # each [T, H]
        residual = residual + group.reduce(partials).to(residual.dtype)

        x = rms_norm(residual, parts[0].mlp_norm, model.rms_norm_eps, precision)  # [T, H]
        note = prefixed(record, f"layers.{held[0].first + position}.")
        partials = [
            mlp_partial(x, part.mlp, shard.rank, precision, note)
            for shard, part in zip(held, parts, strict=True)
        ]  # each [T, H]
        y = group.reduce(partials)  # [T, H]
        note("moe_out" if isinstance(parts[0].mlp, MoeLayer) else "dense_out", y)
        residual = residual + y.to(residual.dtype)
        note("residual", residual)
    return residual


def mlp_partial(
    x: Tensor, mlp: MoeLayer | ExpertWeights, rank: Rank, precision: Precision, record: Record
) -> Tensor:
    """What one rank gives to the reduction of a layer's MLP, ``[T, H]``."""
    if not isinstance(mlp, MoeLayer):
        record("dense_in", x)
        return experts.mlp(x, mlp, 0, precision)
    logits = product(x, mlp.router, precision)  # [T, E]
    weights, ids = moe.routes(logits, mlp, precision)  # [T, K]
    y = layer.partial(x, weights, ids, mlp, precision, rank)
    if mlp.shared is not None:
        y = y + moe.shared(x, mlp.shared, precision)
    record("moe_in", x)
    record("router_logits", logits)
    record("router_weights", weights)
    record("router_ids", ids)
    return y


def logits(
    residual: Tensor,
    held: Sequence[Shard],
    model: ModelConfig,
    precision: Precision,
    group: Group,
) -> Tensor:
    """The last stage's residual ``[T, H]`` -> logits ``[T, V]`` from every rank's vocabulary."""
    x = rms_norm(residual, held[0].norm, model.rms_norm_eps, precision)  # [T, H]
    parts = [product(x, shard.head, precision) for shard in held]  # each [T, V / ranks]
    return group.gather(parts)[:, : model.vocab_size]
