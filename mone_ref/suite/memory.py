"""Uninitialised memory that shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill what torch allocates without a value with NaN, in this process.

    What an engine never writes would otherwise hold what an earlier call left in the same
    place: zeros, or often the right numbers.
    """
    mode = torch.get_deterministic_debug_mode()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # use_deterministic_algorithms() does the same and imports the compiler, for two seconds.
    torch.set_deterministic_debug_mode("warn")
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(mode)
