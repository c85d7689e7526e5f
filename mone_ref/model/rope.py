"""Rotary positions: angles from ``Rope``, applied to heads ``[heads, T, D]``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mone_ref.rope_config import Rope, Yarn


def table(tokens: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, size/2]``, one per pair.

    Angles are formed in float64 at every precision, then rounded once.
    """
    positions = torch.arange(tokens, dtype=torch.float64)  # [T]
    angles = torch.outer(positions, frequencies(rope))  # [T, size/2]
    scale = rope.yarn.table_scale if rope.yarn else 1.0
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def frequencies(rope: Rope) -> Tensor:
    """Radians per position of every pair, ``[size/2]`` float64."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float64) / rope.size  # [size/2]
    plain = rope.theta**-exponents  # [size/2]
    return plain if rope.yarn is None else stretched(plain, rope, rope.yarn)


def stretched(plain: Tensor, rope: Rope, yarn: Yarn) -> Tensor:
    """YaRN: slow pairs turn ``factor`` times slower, fast ones as before, a ramp in between."""
    low = max(math.floor(turning_pair(yarn.beta_fast, rope, yarn)), 0)
    high = min(math.ceil(turning_pair(yarn.beta_slow, rope, yarn)), rope.size - 1)
    pairs = torch.arange(len(plain), dtype=torch.float64)  # [size/2]
    slow = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)  # [size/2]
    return plain / yarn.factor * slow + plain * (1 - slow)


def turning_pair(rotations: float, rope: Rope, yarn: Yarn) -> float:
    """The (fractional) pair that turns ``rotations`` times within the original context."""
    wavelengths = yarn.original / (rotations * 2 * math.pi)
    return rope.size * math.log(wavelengths) / (2 * math.log(rope.theta))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """Rotate the leading ``size`` elements of every head, pair by pair: ``[heads, T, D]``."""
    turned, rest = x[..., : rope.size], x[..., rope.size :]  # [heads, T, size], the others
    if rope.neighbours:
        first, second = turned[..., 0::2], turned[..., 1::2]  # [heads, T, size/2]
    else:
        first, second = turned.chunk(2, dim=-1)  # [heads, T, size/2]
    pair = first * cos - second * sin, second * cos + first * sin  # [heads, T, size/2] each
    if rope.neighbours:
        return torch.cat([torch.stack(pair, dim=-1).flatten(-2), rest], dim=-1)
    return torch.cat([*pair, rest], dim=-1)
