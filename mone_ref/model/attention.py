"""Norms, rotary embedding and grouped-query attention of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref.config import ModelConfig
from mone_ref.precision import Precision, operand, product


@dataclass
class AttentionWeights:
    """Projections ``[out, in]`` and norms of queries and keys.

    The length of a norm says what it spans: all heads at once (OLMoE), or each head by
    itself (Qwen3); None where the family has none (Mixtral).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float, precision: Precision) -> Tensor:
    """Root-mean-square norm over the last axis; statistics in float32 or wider."""
    x = x.to(precision.wide)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)  # [..., 1]
    return (x * scale).to(precision.between) * weight.to(precision.between)


def rope_table(
    tokens: int, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, D]`` of the half-split rotary embedding.

    Angles are formed in float64 at every precision, then rounded once.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim  # [D/2]
    positions = torch.arange(tokens, dtype=torch.float64)  # [T]
    half = torch.outer(positions, theta**-exponents)  # [T, D/2]
    angles = torch.cat([half, half], dim=-1)  # [T, D]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of every head: ``[heads, T, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention(
    x: Tensor, weights: AttentionWeights, model: ModelConfig, precision: Precision
) -> Tensor:
    """Causal attention over one prompt: ``[T, H]`` -> ``[T, H]``."""
    query = product(x, weights.q, precision)  # [T, heads * D]
    key = product(x, weights.k, precision)  # [T, kv_heads * D]
    value = product(x, weights.v, precision)  # [T, kv_heads * D]
    query = qk_norm(query, weights.q_norm, model.rms_norm_eps, precision)
    key = qk_norm(key, weights.k_norm, model.rms_norm_eps, precision)
    if model.clip_qkv is not None:
        query, key, value = (t.clamp(-model.clip_qkv, model.clip_qkv) for t in (query, key, value))

    q = split_heads(query, model.num_heads).to(precision.attention)  # [heads, T, D]
    k = split_heads(key, model.num_kv_heads).to(precision.attention)  # [kv_heads, T, D]
    v = split_heads(value, model.num_kv_heads).to(precision.attention)  # [kv_heads, T, D]
    cos, sin = rope_table(len(x), model.head_dim, model.rope_theta, precision.attention)
    mixed = causal_mix(rotate(q, cos, sin), rotate(k, cos, sin), v, precision)  # [T, heads * D]
    return product(mixed, weights.o, precision)  # [T, H]


def qk_norm(x: Tensor, weight: Tensor | None, eps: float, precision: Precision) -> Tensor:
    """Norm over every ``len(weight)`` columns of a projection ``[T, heads * D]``."""
    if weight is None:
        return x
    parts = x.view(len(x), -1, len(weight))  # [T, 1, heads * D] or [T, heads, D]
    return rms_norm(parts, weight, eps, precision).view(x.shape)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[T, heads * D]`` -> ``[heads, T, D]``."""
    return x.view(len(x), heads, -1).transpose(0, 1)


def causal_mix(q: Tensor, k: Tensor, v: Tensor, precision: Precision) -> Tensor:
    """Softmax of scaled scores over earlier positions, applied to the values."""
    heads, tokens, head_dim = q.shape
    k = k.repeat_interleave(heads // len(k), dim=0)  # [heads, T, D]
    v = v.repeat_interleave(heads // len(v), dim=0)  # [heads, T, D]
    raw = operand(q, precision) @ operand(k, precision).transpose(1, 2)  # [heads, T, T]
    scores = raw.to(precision.wide) * head_dim**-0.5  # [heads, T, T]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)  # [T, T]
    share = scores.masked_fill(future, -torch.inf).softmax(dim=-1)  # [heads, T, T]
    mixed: Tensor = operand(share.to(v.dtype), precision) @ operand(v, precision)  # [heads, T, D]
    return mixed.transpose(0, 1).reshape(tokens, -1)  # [T, heads * D]
