"""Retained experts one after the other, each matrix on the left: float32 on a CPU.

There ``grouped_mm`` is a loop over the experts too, and multiplies few rows by a large matrix.
With the matrix on the left the same product is faster from a few rows on (docs/fast-path.md), in
oneDNN still more, which torch offers for float32 by an operator of its compiler alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LEAST_ROWS = 4
"""Rows per expert, on average, from which this is faster than ``grouped_mm`` (measured)."""


def available() -> bool:
    """Whether this torch has the operator: builds without oneDNN do not."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pays(x: Tensor, routes: int, experts: int) -> bool:
    """Whether ``routes`` inputs like ``x`` to that many experts are worth it."""
    served = x.device.type == "cpu" and x.dtype == torch.float32
    return served and routes >= LEAST_ROWS * experts and available()


def outputs(x: Tensor, tokens: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What the expert of each route makes of its token: ``[N, H]``.

    ``x`` ``[T, H]``; ``tokens`` ``[N]`` by physical row, of which ``counts`` ``[R]`` tells how many
    each row has; ``gate_up`` ``[R, 2I, H]``, gate above up; ``down`` ``[R, H, I]``.
    """
    made = x.new_empty(len(tokens), down.shape[1])  # [N, H]
    end = 0
    for row, count in enumerate(counts.tolist()):
        start, end = end, end + count
        if count:
            inputs = x.index_select(0, tokens[start:end])  # [n, H]
            made[start:end] = expert(inputs, gate_up[row], down[row]).T
    return made


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert, its tokens in columns: ``[n, H]`` -> ``[H, n]``."""
    gate, up = left(gate_up, x).chunk(2)  # [I, n] each
    return left(down, functional.silu(gate, inplace=True).mul_(up).T)  # [H, n]


def left(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix`` ``[out, in]`` times each of ``rows`` ``[n, in]``, in columns: ``[out, n]``."""
    products: Tensor = torch.ops.mkldnn._linear_pointwise(matrix, rows, None, "none", [], "")
    return products
