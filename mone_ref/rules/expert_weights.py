"""Rules on the MLPs of experts: whole where retained, gone where substituted, never fused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem as _problem
from mone_ref.checkpoint.text import count, some
from mone_ref.config import Config
from mone_ref.errors import Code, Problem, Severity, show
from mone_ref.rules import naming, shared


def fused_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """No tensor that holds several projections or experts of a layer (CAP-11, LOAD-13).

    On a substituted layer the format forbids it; on any other it is not read here.
    """
    for layer, names in shared.fused_layers(config, checkpoint).items():
        clause = ""
        if layer in config.substitution.layers:
            clause = "LOAD-13" if _has_separate(config, checkpoint, layer) else "CAP-11"
        found = f"fused {some(names, 'tensor')}"
        expected = "one tensor per expert and projection: unfuse them under logical ids"
        yield _problem(Code.FUSED_EXPERTS, checkpoint, names[0], found, expected, clause)


def _has_separate(config: Config, checkpoint: Checkpoint, layer: int) -> bool:
    """Whether every retained expert of a layer has its own projections."""
    family = config.model.family
    return all(
        family.projection_name(layer, expert, part) in checkpoint.tensors
        for expert in config.substitution.layer(layer, config.model.num_experts).retained
        for part in family.projections
    )


def retained_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every expert that is not listed has its three projections (LOAD-10, LOAD-11).

    Experts of an unlisted layer, or with a constant, that lack all three say that the
    checkpoint was pruned and the list is lost or stale: one problem for the layer.
    """
    misnamed = list(naming.no_expert(config, checkpoint))
    if misnamed:
        yield from misnamed
        return
    family = config.model.family
    constants = shared.stray_constants(config, checkpoint)
    fused = shared.fused_layers(config, checkpoint)
    for layer in config.model.moe_layers:
        if layer in fused:
            continue
        pruned: list[int] = []
        for expert in config.substitution.layer(layer, config.model.num_experts).retained:
            names = [family.projection_name(layer, expert, part) for part in family.projections]
            missing = [name for name in names if name not in checkpoint.tensors]
            listed = layer in config.substitution.layers
            if len(missing) == len(names) and (not listed or (layer, expert) in constants):
                pruned.append(expert)
                continue
            for name in missing:
                expected = f"a projection of retained expert {expert} of layer {layer}"
                yield _problem(
                    Code.MISSING_EXPERT, checkpoint, name, "nothing", expected, "LOAD-10"
                )
        if pruned:
            found = f"no projections of experts {show(pruned)}: the layer looks pruned"
            expected = f"them, or their ids for layer {layer} in {shared.declaration_place(config)}"
            where = family.experts_path(layer)
            yield _problem(Code.MISSING_EXPERT, checkpoint, where, found, expected, "LOAD-11")


def leftover_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A substituted expert needs no projections; they are skipped (LOAD-2), and cost bytes."""
    leftovers: dict[tuple[int, int | None], list[str]] = defaultdict(list)
    for tensor in shared.expert_tensors(config, checkpoint):
        if shared.is_listed(config, tensor.layer, tensor.expert) and not tensor.is_constant:
            leftovers[tensor.layer, tensor.expert].append(tensor.name)
    for (_, expert), names in leftovers.items():
        wasted = sum(checkpoint.tensors[name].size for name in names)
        found = f"{some(names, 'tensor')} ({count(wasted, 'byte')}) of substituted expert {expert}"
        expected = "its constant only"
        warning = Severity.WARNING
        yield _problem(
            Code.LEFTOVER_EXPERT, checkpoint, names[0], found, expected, "LOAD-2", warning
        )
