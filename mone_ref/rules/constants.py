"""Rules on constants: there, of the right shape and type, finite, and for listed experts only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.checkpoint.tensor_problem import tensor_problem as _problem
from mone_ref.checkpoint.text import count
from mone_ref.config import Config
from mone_ref.errors import Code, Problem, show
from mone_ref.rules import shared


def missing_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every substituted expert has its constant (LOAD-7)."""
    for layer in config.substitution.layers.values():
        for expert in layer.substituted:
            name = layer.constants[expert]
            if name not in checkpoint.tensors:
                expected = f"the constant of substituted expert {expert} of layer {layer.layer}"
                yield _problem(
                    Code.MISSING_CONSTANT, checkpoint, name, "nothing", expected, "LOAD-7"
                )


def constant_names(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The explicit form names no tensor of the model itself, which would be consumed (LOAD-9)."""
    for layer in config.substitution.layers.values():
        for expert, name in layer.constants.items():
            if shared.is_models_own(config, name):
                found = f"the constant of expert {expert} of layer {layer.layer}"
                expected = "a tensor that the model itself does not need"
                yield _problem(Code.CONSTANT_NAME, checkpoint, name, found, expected, "LOAD-9")


def constant_shapes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is one vector ``[H]``, without any further dimension (FMT-5)."""
    hidden = config.model.hidden_size
    for entry in shared.stored_constants(config, checkpoint):
        if entry.shape != (hidden,):
            found, expected = f"shape {show(list(entry.shape))}", f"[{hidden}], the hidden size"
            yield _problem(Code.CONSTANT_SHAPE, checkpoint, entry.name, found, expected, "FMT-5")


def constant_dtypes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is stored in a float type of at least 16 bits (FMT-27)."""
    for entry in shared.stored_constants(config, checkpoint):
        if entry.dtype not in dtypes.FLOATS:
            found, expected = f"type {show(entry.dtype)}", f"one of {', '.join(dtypes.FLOATS)}"
            yield _problem(Code.CONSTANT_DTYPE, checkpoint, entry.name, found, expected, "FMT-27")


def non_finite_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is finite as stored (LOAD-8)."""
    for entry in shared.readable_constants(config, checkpoint):
        finite = np.isfinite(dtypes.decode(checkpoint.read(entry.name), entry.dtype))  # [H]
        if not finite.all():
            bad = np.flatnonzero(~finite)
            found = f"{count(len(bad), 'value')} of NaN or infinity, the first at index {bad[0]}"
            expected = "finite values"
            yield _problem(
                Code.NON_FINITE_CONSTANT, checkpoint, entry.name, found, expected, "LOAD-8"
            )


def overflowing_constants(
    config: Config, checkpoint: Checkpoint, dtype: str | None
) -> Iterator[Problem]:
    """A constant stays finite in the dtype in which parameters are held (LOAD-8)."""
    if dtype is None:
        return
    bound = dtypes.overflow_bound(dtype)
    for entry in shared.readable_constants(config, checkpoint):
        values = dtypes.decode(checkpoint.read(entry.name), entry.dtype).astype(np.float64)  # [H]
        bad = np.flatnonzero(np.isfinite(values) & (np.abs(values) >= bound))
        if len(bad):
            found = (
                f"{count(len(bad), 'value')} beyond {dtype},"
                f" the first at index {bad[0]}: {values[bad[0]]:g}"
            )
            expected = f"magnitudes that stay finite in {dtype}"
            yield _problem(
                Code.CONSTANT_OVERFLOW, checkpoint, entry.name, found, expected, "LOAD-8"
            )


def unlisted_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """No constant without an entry in the list (LOAD-9, LOAD-11).

    One problem per constant in a listed layer. A layer that is not listed at all gives
    one problem: what is wrong is its missing entry.
    """
    unlisted: dict[int, dict[int, str]] = defaultdict(dict)
    for (layer, expert), name in shared.stray_constants(config, checkpoint).items():
        unlisted[layer][expert] = name
    for layer, names in unlisted.items():
        if layer in config.substitution.layers:
            for expert, name in names.items():
                yield _unlisted_constant(config, checkpoint, layer, expert, name)
        else:
            # Without any list the whole checkpoint looks like a plain one (LOAD-11).
            clause = "LOAD-9" if config.substitution.layers else "LOAD-11"
            found = f"constants of experts {show(sorted(names))}"
            expected = f"an entry for layer {layer} in {shared.declaration_place(config)}"
            first = names[min(names)]
            yield _problem(Code.UNLISTED_LAYER, checkpoint, first, found, expected, clause)


def _unlisted_constant(
    config: Config, checkpoint: Checkpoint, layer: int, expert: int, name: str
) -> Problem:
    """A constant in a listed layer whose name no declaration gives."""
    if shared.is_listed(config, layer, expert):
        declared = show(config.substitution.layers[layer].constants[expert])
        found = f"a constant of expert {expert}, whose constant is {declared}"
        expected = "one constant per substituted expert"
        return _problem(Code.UNNAMED_CONSTANT, checkpoint, name, found, expected, "LOAD-9")
    kind = "retained" if expert < config.model.num_experts else "unknown"
    found, expected = f"a constant of {kind} expert {expert}", "constants of listed experts only"
    return _problem(Code.UNLISTED_CONSTANT, checkpoint, name, found, expected, "LOAD-9")
