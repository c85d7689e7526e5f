"""Multi-head latent attention (MLA): keys and values through one narrow latent per token.

Written with keys and values spelt out, head by head. Engines absorb the upward projections
into queries and outputs, which is the same function (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.config import ModelConfig
from mone_ref.model import rope
from mone_ref.model.attention import causal_mix, rms_norm, split_heads
from mone_ref.precision import Precision, product


@dataclass
class LatentWeights:
    """Projections ``[out, in]`` and norms of the latents.

    ``q_down`` and its norm are None where queries have no latent. ``kv_down`` gives the
    latent and, behind it, the one key of the position that all heads share.
    """

    q_down: Tensor | None
    q_norm: Tensor | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    kv_up: Tensor
    o: Tensor


def attention(
    x: Tensor, weights: LatentWeights, model: ModelConfig, precision: Precision
) -> Tensor:
    """Causal attention over one prompt: ``[T, H]`` -> ``[T, H]``."""
    sizes = model.latent
    assert sizes is not None
    cos, sin = rope.table(len(x), model.rope, precision.attention)  # [T, P/2]

    heads = split_heads(queries(x, weights, model, precision), model.num_heads)
    q, q_place = torch.split(heads.to(precision.attention), [sizes.plain, sizes.rotated], dim=-1)
    q = torch.cat([q, rope.rotate(q_place, cos, sin, model.rope)], dim=-1)  # [heads, T, N + P]

    down = product(x, weights.kv_down, precision)  # [T, R + P]
    latent, place = torch.split(down, [sizes.rank, sizes.rotated], dim=-1)
    latent = rms_norm(latent, weights.kv_norm, model.rms_norm_eps, precision)  # [T, R]
    heads = split_heads(product(latent, weights.kv_up, precision), model.num_heads)
    k, v = torch.split(heads.to(precision.attention), [sizes.plain, sizes.value], dim=-1)
    shared = rope.rotate(place[None].to(precision.attention), cos, sin, model.rope)  # [1, T, P]
    k = torch.cat([k, shared.expand(len(k), -1, -1)], dim=-1)  # [heads, T, N + P]

    mixed = causal_mix(q, k, v, score_scale(model), precision)  # [T, heads * V]
    return product(mixed, weights.o, precision)  # [T, H]


def queries(x: Tensor, weights: LatentWeights, model: ModelConfig, precision: Precision) -> Tensor:
    """Queries of all heads, through their own latent where there is one: ``[T, heads * D]``."""
    if weights.q_down is not None and weights.q_norm is not None:
        x = product(x, weights.q_down, precision)  # [T, query rank]
        x = rms_norm(x, weights.q_norm, model.rms_norm_eps, precision)
    return product(x, weights.q_up, precision)


def score_scale(model: ModelConfig) -> float:
    """``1 / sqrt(D)``, sharpened where YaRN asks for it."""
    yarn = model.rope.yarn
    return float(model.head_dim**-0.5 * (yarn.score_scale if yarn else 1.0))
