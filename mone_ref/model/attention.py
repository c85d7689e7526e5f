"""Norms and grouped-query attention of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.config import ModelConfig
from mone_ref.model import rope
from mone_ref.precision import Precision, operand, product


@dataclass
class AttentionWeights:
    """Projections ``[out, in]``, norms of queries and keys, and biases ``[out]``.

    The length of a norm says what it spans: all heads at once (OLMoE), or each head by
    itself (Qwen3). Norms and biases are None where the model has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """Root-mean-square norm over the last axis; statistics in float32 or wider."""
    x = x.to(precision.wide)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)  # [..., 1]
    return (x * scale).to(precision.between) * weight.to(precision.between)


def attention(
    x: Tensor, weights: AttentionWeights, model: ModelConfig, precision: Precision
) -> Tensor:
    """Causal attention over one prompt: ``[T, H]`` -> ``[T, H]``."""
    query = projected(x, weights.q, weights.q_bias, precision)  # [T, heads * D]
    key = projected(x, weights.k, weights.k_bias, precision)  # [T, kv_heads * D]
    value = projected(x, weights.v, weights.v_bias, precision)  # [T, kv_heads * D]
    query = qk_norm(query, weights.q_norm, model.rms_norm_eps, precision)
    key = qk_norm(key, weights.k_norm, model.rms_norm_eps, precision)
    return attend(query, key, value, weights.o, model, precision)


def attend(
    query: Tensor, key: Tensor, value: Tensor, o: Tensor, model: ModelConfig, precision: Precision
) -> Tensor:
    """From projections, normed where the model norms them, to the output: ``[T, H]``.

    ``query`` ``[T, heads * D]``, ``key`` and ``value`` ``[T, kv_heads * D]``, ``o``
    ``[H, heads * D]``.
    """
    if model.clip_qkv is not None:
        query, key, value = (t.clamp(-model.clip_qkv, model.clip_qkv) for t in (query, key, value))

    q = split_heads(query, model.num_heads).to(precision.attention)  # [heads, T, D]
    k = split_heads(key, model.num_kv_heads).to(precision.attention)  # [kv_heads, T, D]
    v = split_heads(value, model.num_kv_heads).to(precision.attention)  # [kv_heads, T, D]
    cos, sin = rope.table(len(query), model.rope, precision.attention)  # [T, size/2]
    q, k = (rope.rotate(heads, cos, sin, model.rope) for heads in (q, k))
    mixed = causal_mix(q, k, v, model.head_dim**-0.5, precision)  # [T, heads * D]
    return product(mixed, o, precision)  # [T, H]


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision) -> Tensor:
    """``x @ weight.T + bias``: ``[T, in]`` -> ``[T, out]``."""
    y = product(x, weight, precision)  # [T, out]
    return y if bias is None else y + bias.to(y.dtype)


def qk_norm(x: Tensor, weight: Tensor | None, eps: float, precision: Precision) -> Tensor:
    """Norm over every ``len(weight)`` columns of a projection ``[T, heads * D]``."""
    if weight is None:
        return x
    parts = x.view(len(x), -1, len(weight))  # [T, 1, heads * D] or [T, heads, D]
    return rms_norm(parts, weight, eps, precision).view(x.shape)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[T, heads * D]`` -> ``[heads, T, D]``."""
    return x.view(len(x), heads, -1).transpose(0, 1)


def causal_mix(q: Tensor, k: Tensor, v: Tensor, scale: float, precision: Precision) -> Tensor:
    """Softmax of ``scale`` times the scores over earlier positions, applied to the values.

    ``q`` ``[heads, T, D]``, ``k`` ``[kv_heads, T, D]``, ``v`` ``[kv_heads, T, Dv]`` ->
    ``[T, heads * Dv]``.
    """
    heads, tokens, _ = q.shape
    k = k.repeat_interleave(heads // len(k), dim=0)  # [heads, T, D]
    v = v.repeat_interleave(heads // len(v), dim=0)  # [heads, T, Dv]
    raw = operand(q, precision) @ operand(k, precision).transpose(1, 2)  # [heads, T, T]
    scores = raw.to(precision.wide) * scale  # [heads, T, T]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)  # [T, T]
    share = scores.masked_fill(future, -torch.inf).softmax(dim=-1)  # [heads, T, T]
    mixed: Tensor = operand(share.to(v.dtype), precision) @ operand(v, precision)  # [heads, T, Dv]
    return mixed.transpose(0, 1).reshape(tokens, -1)  # [T, heads * Dv]
