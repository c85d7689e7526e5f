"""Rules on the tensors that every model has, routers among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mone_ref import layout
from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.checkpoint.tensor_problem import tensor_problem as _problem
from mone_ref.checkpoint.text import count, some
from mone_ref.config import Config
from mone_ref.errors import Code, Problem, Severity, show
from mone_ref.rules import naming, shared

MASK = 1e4
"""Magnitude of a router row that can only be a mask, far beyond trained weights."""


def routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every MoE layer has its router, under its family's name (FMT-1)."""
    misnamed = list(naming.no_router(config, checkpoint))
    if misnamed:
        yield from misnamed
        return
    for layer, name in zip(config.model.moe_layers, _routers(config), strict=True):
        if name not in checkpoint.tensors:
            found = "nothing"
            if candidates := naming.router_candidates(config, checkpoint, layer):
                found = f"{some(candidates, 'unread tensor')} of as many rows"
            expected = f"the router of layer {layer}"
            yield _problem(Code.MISSING_TENSOR, checkpoint, name, found, expected, "FMT-1")


def model_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Everything but experts, constants and routers that the model needs is there."""
    elsewhere, experts = set(_routers(config)), f".{config.model.family.experts}."
    for name in layout.of_model(config):
        if experts not in name and name not in elsewhere and name not in checkpoint.tensors:
            expected = "a tensor of the model"
            yield _problem(Code.MISSING_TENSOR, checkpoint, name, "nothing", expected)


def tensor_shapes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every tensor of the model has the shape that the config implies.

    A router with fewer than E rows is the common case: experts were deleted (FMT-28).
    """
    routers = _routers(config)
    for name, shape in layout.of_model(config).items():
        entry = checkpoint.tensors.get(name)
        if entry and entry.shape != shape:
            found, expected = f"shape {show(list(entry.shape))}", show(list(shape))
            clause = "FMT-28" if name in routers else ""
            yield _problem(Code.TENSOR_SHAPE, checkpoint, name, found, expected, clause)


def tensor_dtypes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every tensor of the model is stored in a float type: no quantised weights."""
    for name in layout.of_model(config):
        entry = checkpoint.tensors.get(name)
        if entry and entry.dtype not in dtypes.FLOATS:
            found, expected = f"type {show(entry.dtype)}", f"one of {', '.join(dtypes.FLOATS)}"
            yield _problem(Code.TENSOR_DTYPE, checkpoint, name, found, expected)


def tied_head(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A head that is stored although it is tied must equal the embeddings.

    Loaders overwrite it, so a different one is lost without a word.
    """
    embedding = config.model.family.embedding_name
    stored = embedding in checkpoint.tensors and shared.HEAD in checkpoint.tensors
    if not config.model.tie_word_embeddings or not stored:
        return
    equal = _equal(checkpoint, embedding, shared.HEAD)
    found = "a copy of the embeddings" if equal else "a head that differs from the embeddings"
    expected = "none: tie_word_embeddings is true"
    severity = Severity.NOTE if equal else Severity.ERROR
    yield _problem(Code.TIED_HEAD, checkpoint, shared.HEAD, found, expected, "", severity)


def non_finite_routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A router with NaN or infinity makes routing meaningless; small enough to look at."""
    for name, values in _read_routers(config, checkpoint):
        bad = ~np.isfinite(values)  # [E, H]
        if bad.any():
            total, rows = count(int(bad.sum()), "value"), np.flatnonzero(bad.any(axis=1)).tolist()
            found = f"{total} of NaN or infinity, for experts {show(rows)}"
            code, warning = Code.NON_FINITE_ROUTER, Severity.WARNING
            yield _problem(code, checkpoint, name, found, "finite values", "", warning)


def masked_routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A row of one huge value is meant as a mask on a logit, and is none.

    The logit is that value times the sum of the hidden state, whose sign varies: for half
    of the tokens the masked expert wins.
    """
    for name, values in _read_routers(config, checkpoint):
        first = values[:, 0]  # [E]
        huge = np.isfinite(first) & (np.abs(first) >= MASK) & (values.shape[1] > 1)
        masked = huge & (values == first[:, None]).all(axis=1)
        if masked.any():
            rows = show(np.flatnonzero(masked).tolist())
            found = f"one value beyond {MASK:g} all over the rows of experts {rows}"
            expected = "router weights: a row times a hidden state is a logit"
            code, warning = Code.ROUTER_MASK, Severity.WARNING
            yield _problem(code, checkpoint, name, found, expected, "", warning)


def _read_routers(
    config: Config, checkpoint: Checkpoint
) -> Iterator[tuple[str, NDArray[np.floating[Any]]]]:
    """Routers ``[E, H]`` of the right shape and a float type, one in memory at a time."""
    shapes = layout.of_model(config)
    for name in _routers(config):
        entry = checkpoint.tensors.get(name)
        if entry and entry.dtype in dtypes.FLOATS and entry.shape == shapes[name]:
            yield name, dtypes.decode(checkpoint.read(name), entry.dtype).reshape(entry.shape)


def _routers(config: Config) -> list[str]:
    family = config.model.family
    return [family.router_name(layer) for layer in config.model.moe_layers]


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors store the same values, compared piece by piece."""
    one, other = checkpoint.tensors[first], checkpoint.tensors[second]
    return (one.dtype, one.shape, one.size) == (other.dtype, other.shape, other.size) and all(
        left == right
        for left, right in zip(checkpoint.chunks(first), checkpoint.chunks(second), strict=True)
    )
