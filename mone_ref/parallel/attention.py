"""Attention over ranks: each has some of the heads, and its output is a partial."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mone_ref.config import ModelConfig
from mone_ref.families import QkNorm
from mone_ref.model import decoder
from mone_ref.model.attention import AttentionWeights, attend, projected, qk_norm
from mone_ref.model.latent_attention import LatentWeights
from mone_ref.parallel.group import Group
from mone_ref.precision import Precision

Weights = AttentionWeights | LatentWeights


def partials(
    x: Tensor, held: Sequence[Weights], model: ModelConfig, precision: Precision, group: Group
) -> list[Tensor]:
    """What each rank held gives to the reduction, ``[T, H]``; ``model`` has a rank's sizes."""
    spanning = [part for part in held if isinstance(part, AttentionWeights)]
    if model.qk_norm is QkNorm.PROJECTION and spanning:
        return with_spanning_norms(x, spanning, model, precision, group)
    return [decoder.attend(x, weights, model, precision) for weights in held]


def with_spanning_norms(
    x: Tensor,
    held: Sequence[AttentionWeights],
    model: ModelConfig,
    precision: Precision,
    group: Group,
) -> list[Tensor]:
    """Where one norm spans all heads (OLMoE), no rank can form it alone."""
    queries = [projected(x, part.q, part.q_bias, precision) for part in held]
    keys = [projected(x, part.k, part.k_bias, precision) for part in held]
    values = [projected(x, part.v, part.v_bias, precision) for part in held]
    queries = normed(queries, held[0].q_norm, model.rms_norm_eps, precision, group)
    keys = normed(keys, held[0].k_norm, model.rms_norm_eps, precision, group)
    return [
        attend(query, key, value, part.o, model, precision)
        for query, key, value, part in zip(queries, keys, values, held, strict=True)
    ]


def normed(
    parts: Sequence[Tensor], weight: Tensor | None, eps: float, precision: Precision, group: Group
) -> list[Tensor]:
    """One norm over the heads of all ranks; each rank takes back its own: ``[T, heads * D]``."""
    if weight is None:
        return list(parts)
    tokens, width = parts[0].shape
    every = group.gather(parts).view(tokens, -1, width)  # [T, ranks, heads * D]
    copies = every.shape[1] * width // len(weight)  # ranks that hold the same key heads
    whole = every[:, ::copies].reshape(tokens, -1)  # [T, all heads * D]
    shares = qk_norm(whole, weight, eps, precision).view(tokens, -1, width)
    return [shares[:, index // copies] for index, _ in group.held]
