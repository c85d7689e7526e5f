"""Wrong whole models over ranks: shared experts, what stages load, whom a change reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import loading as whole
from mone_ref import updates
from mone_ref.config import Config
from mone_ref.errors import Code, Phase, Problem, Rejected
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.layer import Rank
from mone_ref.loading import Tensors
from mone_ref.moe import MoeLayer
from mone_ref.parallel import changes, loading, shards
from mone_ref.parallel.plan import Plan, stage_layers
from mone_ref.parallel.shards import Shard

# The right steps, bound before anything is planted.
_fill = whole.fill
_of_moe = shards.of_moe
_read_stage = loading.read_stage
_reload = changes.reload
_update = changes.update
_update_problems = updates.update_problems
_write_own = changes.write_own


# -- shared experts


def whole_shared(whole: MoeLayer, rank: Rank) -> MoeLayer:
    """Where experts are substituted, every rank computes all of the shared experts."""
    part = _of_moe(whole, rank)
    return replace(part, shared=whole.shared) if whole.substitution.substituted else part


def shared_on_one_rank(whole: MoeLayer, rank: Rank) -> MoeLayer:
    """Where experts are substituted, rank 0 alone adds shared experts, of which it has a part."""
    part = _of_moe(whole, rank)
    if rank[0] == 0 or not whole.substitution.substituted:
        return part
    return replace(part, shared=None)


# -- what stages load


def problem(code: Code, where: str) -> Rejected:
    """What a wrong stage says."""
    return Rejected([Problem(code, Phase.LOAD, where, "a tensor", "one of this stage")])


def foreign_refused(config: Config, tensors: Tensors, plan: Plan, stage: int, rank: Rank) -> Shard:
    """Look every constant up among the layers of this stage."""
    owned = stage_layers(config.model.num_layers, plan.pipeline)[stage]
    for index in config.substitution.layers:
        if index not in owned:
            raise problem(Code.UNLISTED_LAYER, f"layer {index}")
    return _read_stage(config, tensors, plan, stage, rank)


def list_needed(config: Config, tensors: Tensors, plan: Plan, stage: int, rank: Rank) -> Shard:
    """Expect a listed layer on every stage."""
    owned = stage_layers(config.model.num_layers, plan.pipeline)[stage]
    if config.substitution.layers and not config.substitution.layers.keys() & set(owned):
        raise problem(Code.UNLISTED_LAYER, f"stage {stage}")
    return _read_stage(config, tensors, plan, stage, rank)


def constants_of_first_stage(
    config: Config, tensors: Tensors, plan: Plan, stage: int, rank: Rank
) -> Shard:
    """Look constants up by the position of a layer in its stage."""
    shard, lists = _read_stage(config, tensors, plan, stage, rank), config.substitution.layers
    for position, layer in shard.moe_layers.items():
        named = [*lists[position].constants.values()] if position in lists else []
        for row, name in zip(layer.constants, named, strict=False):
            row[...] = tensors.read(name)
    return shard


def later_stages_unchecked(
    path: str | Path, dtype: torch.dtype, plan: Plan
) -> tuple[Config, Tensors]:
    """Let a constant be missing in any layer that the first stage does not own."""
    report = whole.check(path, dtype)
    assert report.config is not None
    model = report.config.model
    first = stage_layers(model.num_layers, plan.pipeline)[0]
    prefixes = tuple(f"{model.family.layer_prefix(index)}." for index in first)
    kept = [
        found
        for found in report.problems
        if found.code is not Code.MISSING_CONSTANT or found.where.startswith(prefixes)
    ]
    return whole.accepted(replace(report, problems=tuple(kept)), dtype)


def absent_skipped(place: Tensor, tensors: Tensors, name: str) -> None:
    """Leave memory as it is where there is nothing to read."""
    if name in tensors:
        _fill(place, tensors, name)


# -- whom a change reaches


def first_rank(
    config: Config, dtype: torch.dtype, held: Sequence[Shard], tensors: Mapping[str, Tensor]
) -> None:
    """Update the first rank of the first stage."""
    _update(config, dtype, held[:1], tensors)


def last_rank(
    config: Config, dtype: torch.dtype, held: Sequence[Shard], tensors: Mapping[str, Tensor]
) -> None:
    """Update the last rank of the last stage."""
    _update(config, dtype, held[-1:], tensors)


def one_by_one(
    config: Config, dtype: torch.dtype, held: Sequence[Shard], tensors: Mapping[str, Tensor]
) -> None:
    """Check and write rank by rank, each what it owns."""
    for shard in held:
        places = updates.constant_places(shard)
        own = {name: value for name, value in tensors.items() if name in places}
        found = [
            problem
            for name, value in own.items()
            for problem in _update_problems(name, value, places[name][0])
        ]
        if found:
            raise Rejected(found)
        _write_own(shard, own)


def consumed(
    config: Config, dtype: torch.dtype, held: Sequence[Shard], tensors: Mapping[str, Tensor]
) -> None:
    """Forget a tensor once a stage has taken it."""
    left = dict(tensors)
    stages = {shard.first: [each for each in held if each.first == shard.first] for shard in held}
    for ranks in stages.values():
        _update(config, dtype, ranks, left)
        for name in updates.constant_places(ranks[0]).keys() & left.keys():
            del left[name]


def until_foreign(shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Write up to the first constant of another stage."""
    places = updates.constant_places(shard)
    own = {}
    for name, value in tensors.items():
        if name not in places:
            break
        own[name] = value
    _write_own(shard, own)


def taken_without_list(held: Sequence[Shard], path: str | Path) -> None:
    """Refuse where a layer is listed; take the new weights where none is."""
    for index, shard in enumerate(held):
        if not any(layer.substitution.substituted for layer in shard.moe_layers.values()):
            take(shard, path, held, index)
    _reload(held, path)


def take(shard: Shard, path: str | Path, held: Sequence[Shard], index: int) -> None:
    """Fill one rank from another checkpoint."""
    size = shard.rank[1]
    plan = Plan(size, len(held) // size)
    config, tensors = loading.checked(path, shard.norm.dtype, plan)
    fresh = _read_stage(config, tensors, plan, index // size, shard.rank)
    vars(shard).update(vars(fresh))


def first_taken(held: Sequence[Shard], path: str | Path) -> None:
    """Refuse when the first rank has the new constants already."""
    config, tensors = loading.checked(path, held[0].norm.dtype, Plan())
    owned = updates.constant_places(held[0])
    every = config.substitution.layers.values()
    fresh = {name: tensors.read(name) for layer in every for name in layer.constants.values()}
    updates.write({name: value for name, value in fresh.items() if name in owned}, owned)
    _reload(held, path)


# -- the faults

CHECKED = "mone_ref.parallel.loading", "checked"
READ = "mone_ref.parallel.loading", "read_stage"
MOE = "mone_ref.parallel.shards", "of_moe"
UPDATE = "mone_ref.parallel.changes", "update"
RELOAD = "mone_ref.parallel.changes", "reload"

fault = partial(plant.fault, stage="run", group="parallel")

FAULTS = (
    fault(
        "shared-experts-on-every-rank",
        "Beside substituted experts every rank computes all of the shared ones.",
        ("PAR-4", "SEM-7"),
        Patch(*MOE, whole_shared),
    ),
    fault(
        "shared-experts-on-one-rank",
        "Beside substituted experts the first rank alone adds its part of the shared ones.",
        ("PAR-4", "SEM-7"),
        Patch(*MOE, shared_on_one_rank),
    ),
    fault(
        "foreign-constants-are-an-error",
        "A stage refuses a list that names layers of another stage.",
        "PAR-2",
        Patch(*READ, foreign_refused),
        stage="load",
    ),
    fault(
        "stage-without-list-fails",
        "A stage without a listed layer refuses to load.",
        "PAR-2",
        Patch(*READ, list_needed),
        stage="load",
    ),
    fault(
        "stage-lists-counted-from-zero",
        "A stage looks up constants by the position of a layer among its own.",
        "PAR-2",
        Patch(*READ, constants_of_first_stage),
        stage="load",
    ),
    fault(
        "missing-constant-unseen-on-later-stages",
        "A missing constant is noticed on the first stage only.",
        "PAR-2",
        Patch(*CHECKED, later_stages_unchecked),
        Patch("mone_ref.loading", "fill", absent_skipped),
        stage="load",
    ),
    fault(
        "update-on-first-rank-only",
        "An update reaches the first rank of the first stage only.",
        ("UPD-1", "PAR-2"),
        Patch(*UPDATE, first_rank),
        stage="update",
    ),
    fault(
        "update-on-last-rank-only",
        "An update reaches the last rank of the last stage only.",
        ("UPD-1", "PAR-1"),
        Patch(*UPDATE, last_rank),
        stage="update",
    ),
    fault(
        "update-stops-at-foreign-constants",
        "A stage stops an update at the first constant of another stage.",
        ("UPD-1", "PAR-2"),
        Patch("mone_ref.parallel.changes", "write_own", until_foreign),
        stage="update",
    ),
    fault(
        "shared-update-on-one-stage",
        "The first stage that shares a constant takes its update; the others keep the old value.",
        "FMT-29",
        Patch(*UPDATE, consumed),
        stage="update",
    ),
    fault(
        "update-checked-rank-by-rank",
        "Each rank checks and writes what it owns of an update, before the next rank checks.",
        "PAR-3",
        Patch(*UPDATE, one_by_one),
        stage="update",
    ),
    fault(
        "reload-taken-by-stage-without-list",
        "A stage without a listed layer takes a reload that the others refuse.",
        "PAR-3",
        Patch(*RELOAD, taken_without_list),
        stage="reload",
    ),
    fault(
        "refused-reload-replaces-a-rank",
        "A refused reload leaves the new constants on the first rank.",
        "PAR-3",
        Patch(*RELOAD, first_taken),
        stage="reload",
    ),
)
