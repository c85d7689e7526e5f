"""Whether two values are the same bit for bit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from mone_ref.loading import Model


def identical(one: Any, other: Any) -> bool:
    """Equal in every field of nested dataclasses, tensors bit for bit, and models."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, Model) and isinstance(other, Model):
        mine, theirs = (vars(model) for model in (one, other))
        return all(identical(mine[name], theirs[name]) for name in mine)
    if is_dataclass(one) and type(one) is type(other):
        return all(
            identical(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    return bool(one == other)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which tell NaN from NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)
