"""The faults. Each sentence says what a wrong engine does; the clauses say what it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mone_ref import loading, substitution
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import Config, LayerSubstitution
from mone_ref.errors import Problem
from mone_ref.faults import layer_steps
from mone_ref.faults.plant import Fault, Patch
from mone_ref.loading import Tensors

# The right steps, bound before anything is planted.
_constant_sum = substitution.constant_sum
_rewrite_routes = substitution.rewrite_routes
_read_constants = loading.read_constants


def no_constants(
    weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]
) -> Tensor:
    """Drop the second sum of SEM-1."""
    return torch.zeros_like(_constant_sum(weights, ids, values, substituted))


def unweighted(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Add ``v`` instead of ``w * v``."""
    return _constant_sum(torch.ones_like(weights), ids, values, substituted)


def twice(weights: Tensor, ids: Tensor, values: Tensor, substituted: Sequence[int]) -> Tensor:
    """Add every constant a second time."""
    return 2 * _constant_sum(weights, ids, values, substituted)


def renormalised(weights: Tensor, ids: Tensor, layer: LayerSubstitution) -> tuple[Tensor, Tensor]:
    """Share the whole of a token's router weight among its retained routes."""
    kept, rows = _rewrite_routes(weights, ids, layer)
    share = kept.sum(dim=-1, keepdim=True)  # [T, 1]
    scale = weights.sum(dim=-1, keepdim=True) / share  # [T, 1]
    return torch.where(share > 0, kept * scale, kept), rows


def logical_id_as_row(
    weights: Tensor, ids: Tensor, layer: LayerSubstitution
) -> tuple[Tensor, Tensor]:
    """Index the compact weights with the logical id, the last row where it is too large."""
    kept, _ = _rewrite_routes(weights, ids, layer)
    rows = ids.clamp(max=len(layer.retained) - 1)  # [T, K]
    return kept, torch.where(kept != 0, rows, torch.zeros_like(rows))


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


SUM = "mone_ref.substitution", "constant_sum"
REWRITE = "mone_ref.substitution", "rewrite_routes"
READ = "mone_ref.loading", "read_constants"
LOOP = "mone_ref.experts", "weighted_sum"
RANK = "mone_ref.layer", "adds_constants"
MISSING = "mone_ref.rules.constants", "missing_constants"

FAULTS = {
    fault.id: fault
    for fault in (
        Fault(
            "dropped",
            "Substituted routes add nothing.",
            ("SEM-1",),
            "run",
            (Patch(*SUM, no_constants),),
        ),
        Fault(
            "unweighted",
            "A substituted route adds its constant without the router weight.",
            ("SEM-1",),
            "run",
            (Patch(*SUM, unweighted),),
        ),
        Fault(
            "renormalised",
            "The weights of substituted routes are handed to the retained routes.",
            ("SEM-2",),
            "run",
            (Patch(*REWRITE, renormalised),),
        ),
        Fault(
            "twice",
            "Constants are added twice.",
            ("SEM-1",),
            "run",
            (Patch(*SUM, twice),),
        ),
        Fault(
            "config-order",
            "Constants are stored in the order of the config and looked up in ascending order.",
            ("FMT-2", "FMT-5"),
            "load",
            (Patch(*READ, config_order),),
        ),
        Fault(
            "logical-id-as-row",
            "The logical id indexes the compact weights.",
            ("LOAD-1",),
            "run",
            (Patch(*REWRITE, logical_id_as_row),),
        ),
        Fault(
            "neighbour",
            "Every substituted expert gets the constant of its neighbour.",
            ("FMT-5",),
            "load",
            (Patch(*READ, neighbour),),
        ),
        Fault(
            "missing-constant-is-zero",
            "A missing constant is read as zero.",
            ("LOAD-7",),
            "load",
            (Patch(*MISSING, nothing_missing), Patch(*READ, zeros_where_absent)),
        ),
        Fault(
            "narrow-constant-sum",
            "Constants are weighted and summed in bfloat16.",
            ("SEM-3",),
            "run",
            (Patch(*SUM, layer_steps.narrow_sum),),
        ),
        Fault(
            "dense-constant-sum",
            "The constants' sum is a dense product, in which zero times infinity is NaN.",
            ("LOAD-8",),
            "run",
            (Patch(*SUM, layer_steps.dense_sum),),
        ),
        Fault(
            "repeated-id-overwrites",
            "Of two routes of a token to one substituted expert the last one counts.",
            ("SEM-9",),
            "run",
            (Patch(*SUM, layer_steps.last_route_counts),),
        ),
        Fault(
            "ids-wrap-around",
            "An id outside the logical range indexes from the other end.",
            ("SEM-8",),
            "run",
            (Patch(*REWRITE, layer_steps.wrapped),),
        ),
        Fault(
            "row-0-keeps-weight",
            "Substituted routes keep their weight on row 0.",
            ("SEM-4", "EXEC-3"),
            "run",
            (Patch(*REWRITE, layer_steps.row_0_keeps_weight),),
        ),
        Fault(
            "weight-zero-is-computed",
            "Routes of weight zero are computed, and zero times infinity is added.",
            ("SEM-5",),
            "run",
            (Patch(*LOOP, layer_steps.weight_zero_computed),),
        ),
        Fault(
            "constant-on-every-rank",
            "Every tensor-parallel rank adds the constants before the reduction.",
            ("EXEC-4", "PAR-1"),
            "run",
            (Patch(*RANK, layer_steps.every_rank),),
        ),
    )
}
