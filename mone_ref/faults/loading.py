"""Wrong loading: which tensors an engine reads, and where it puts them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mone_ref import loading
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import Config, LayerSubstitution
from mone_ref.errors import Problem
from mone_ref.faults.plant import Fault, Patch
from mone_ref.loading import Tensors

# The right steps, bound before anything is planted.
_read_constants = loading.read_constants


def config_order(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Stack constants as the config lists them; lookups stay ascending."""
    ascending = _read_constants(config, tensors, layer)
    rows = [layer.substituted.index(expert) for expert in layer.listed]
    return ascending[rows]


def neighbour(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Give every expert the constant of the next one."""
    return _read_constants(config, tensors, layer).roll(1, dims=0)


def zeros_where_absent(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Leave the row of an absent constant at zero."""
    constants = torch.zeros(
        len(layer.substituted), config.model.hidden_size, dtype=tensors.dtype
    )  # [S, H]
    for row, expert in enumerate(layer.substituted):
        if layer.constants[expert] in tensors:
            constants[row] = tensors.read(layer.constants[expert])
    return constants


def nothing_missing(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Never look whether a constant is there."""
    return iter(())


READ = "mone_ref.loading", "read_constants"
MISSING = "mone_ref.rules.constants", "missing_constants"

FAULTS = (
    Fault(
        "config-order",
        "Constants are stored in the order of the config and looked up in ascending order.",
        ("FMT-2", "FMT-5"),
        "load",
        (Patch(*READ, config_order),),
        "loading",
    ),
    Fault(
        "neighbour",
        "Every substituted expert gets the constant of its neighbour.",
        ("FMT-5",),
        "load",
        (Patch(*READ, neighbour),),
        "loading",
    ),
    Fault(
        "missing-constant-is-zero",
        "A missing constant is read as zero.",
        ("LOAD-7",),
        "load",
        (Patch(*MISSING, nothing_missing), Patch(*READ, zeros_where_absent)),
        "loading",
    ),
)
