"""In which dtype each named step of a forward pass runs.

The oracle is one piece of code at any precision. The low-precision runs that
budgets are made of (SPEC, Numbers) differ from the plain run in one switch each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which a model can be held, and a constant can come (FMT-27)."""

TF32_DROPPED_BITS = 13  # float32 keeps 23 fraction bits, TF32 keeps 10


@dataclass(frozen=True)
class Precision:
    """The dtype of every named step.

    ``params`` holds the weights and enters every matrix product. ``between`` is what
    norms, activations and sums between two products return; ``residual``,
    ``attention`` (rope, scores, values) and ``router`` (softmax) name their steps.
    ``round_each_route`` rounds every weighted expert output before it is added.
    ``tf32`` rounds the inputs of every product to 10 fraction bits.
    """

    params: torch.dtype
    between: torch.dtype
    residual: torch.dtype
    attention: torch.dtype
    router: torch.dtype
    round_each_route: bool = False
    tf32: bool = False

    @property
    def wide(self) -> torch.dtype:
        """Float32, or float64 in a float64 run: reductions never run narrower (SEM-3)."""
        return torch.promote_types(self.params, torch.float32)


def plain(dtype: torch.dtype, *, tf32: bool = False) -> Precision:
    """Everything in ``dtype``; only the router's softmax is at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return Precision(dtype, dtype, dtype, dtype, router=wide, tf32=tf32)


def cast_points(base: Precision) -> dict[str, Precision]:
    """The cast points of the number rule around a ``plain`` precision, by name.

    Six for a 16-bit type. In float32 only the plain run is left: the others move a
    rounding that is not there.
    """
    dtype, wide = base.params, base.wide
    if dtype == wide:
        return {"plain": base}
    return {
        "plain": base,
        "router-softmax": replace(base, router=dtype),
        "each-route": replace(base, round_each_route=True),
        "residual-wide": replace(base, residual=wide),
        "attention-wide": replace(base, attention=wide),
        "wide-between-products": replace(base, between=wide, residual=wide, attention=wide),
    }


def product(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """``x @ weight.T``: ``[..., in]``, ``[out, in]`` -> ``[..., out]`` in ``between``.

    Inputs are rounded to the dtype of the weights first, as a matrix unit does; the
    result is rounded to it too, unless ``between`` is wider.
    """
    x, weight = operand(x.to(weight.dtype), precision), operand(weight, precision)
    exact = torch.promote_types(weight.dtype, precision.between)
    return (x.to(exact) @ weight.to(exact).T).to(precision.between)


def operand(x: Tensor, precision: Precision) -> Tensor:
    """An input of a matrix product as the matrix unit sees it."""
    return round_to_tf32(x) if precision.tf32 else x


def round_to_tf32(x: Tensor) -> Tensor:
    """Round float32 values to TF32's 10 fraction bits, ties to even."""
    bits = x.contiguous().view(torch.int32)
    odd = (bits >> TF32_DROPPED_BITS) & 1
    half = (1 << (TF32_DROPPED_BITS - 1)) - 1
    kept = (bits + half + odd) & ~((1 << TF32_DROPPED_BITS) - 1)
    return torch.where(x.isfinite(), kept.view(torch.float32), x)


@contextmanager
def exact_products() -> Iterator[None]:
    """Keep torch's float32 products in float32, whatever the caller's global switch says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
