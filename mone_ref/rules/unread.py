"""Rules on tensors that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from mone_ref import layout
from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem as _problem
from mone_ref.checkpoint.text import some
from mone_ref.config import Config
from mone_ref.errors import Code, Problem, Severity
from mone_ref.rules import shared
from mone_ref.tensor_names import expert_tensor


def unbuilt_layers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Tensors of layers past the last are skipped: MTP layers, for one (LOAD-4)."""
    declared = layout.constants(config)
    unbuilt = [
        name
        for name in checkpoint.tensors
        if name not in declared and not shared.is_built(config, name)
    ]
    if unbuilt:
        found = f"{some(unbuilt, 'tensor')} of layers that are not built"
        expected = f"layers 0 to {config.model.num_layers - 1} (others are skipped)"
        where, note = unbuilt[0], Severity.NOTE
        yield _problem(Code.UNKNOWN_TENSOR, checkpoint, where, found, expected, "LOAD-4", note)


def unknown_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Names that nothing reads, one problem per kind.

    A constant or an expert under an unread name is probably a mistake; it never stands in
    for one of the decoder's own layers (LOAD-12).
    """
    constants, experts, others = [], [], []
    for name in _unread(config, checkpoint):
        path = name.split(".")
        if path[-1] == config.model.family.constant:
            constants.append(name)
        elif "experts" in path:
            experts.append(name)
        else:
            others.append(name)
    stack = f"names in {config.model.family.stack}.N.{config.model.family.experts}.J"
    for names, kind, expected, clause, severity in (
        (constants, "constant", stack, "LOAD-12", Severity.WARNING),
        (experts, "expert tensor", stack, "", Severity.WARNING),
        (others, "tensor", "tensors of the model only", "", Severity.NOTE),
    ):
        if names:
            found = f"{some(names, kind)}, not read"
            yield _problem(
                Code.UNKNOWN_TENSOR, checkpoint, names[0], found, expected, clause, severity
            )


def _unread(config: Config, checkpoint: Checkpoint) -> Iterator[str]:
    """Names that no rule above has spoken of."""
    constants = layout.constants(config).keys() | layout.unbuilt_constants(config)
    for name in checkpoint.tensors:
        if name in constants or shared.is_models_own(config, name):
            continue
        tensor = expert_tensor(config.model.family, name)
        spoken_of = tensor is not None and (
            tensor.is_constant
            or tensor.is_fused
            or shared.is_listed(config, tensor.layer, tensor.expert)
        )
        if not spoken_of and shared.is_built(config, name):
            yield name
