"""Wrong changes: what an update or a reload of a loaded model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from mone_ref import loading, updates
from mone_ref.errors import Code, Problem
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.model.decoder import Decoder

# The right steps, bound before anything is planted.
_update = updates.update
_constant_places = updates.constant_places
_update_problems = updates.update_problems
_write = updates.write
_reload = updates.reload


# -- updates


def nothing_written(tensors: Mapping[str, Tensor], places: Mapping[str, Sequence[Tensor]]) -> None:
    """Change a copy that nothing reads."""


def others_cleared(tensors: Mapping[str, Tensor], places: Mapping[str, Sequence[Tensor]]) -> None:
    """Start from constants of zero, as a first load does."""
    for rows in places.values():
        for place in rows:
            place.zero_()
    _write(tensors, places)


def added_up(tensors: Mapping[str, Tensor], places: Mapping[str, Sequence[Tensor]]) -> None:
    """Add the new value to the old one."""
    for name, value in tensors.items():
        for place in places[name]:
            place.add_(value)


def first_owner(tensors: Mapping[str, Tensor], places: Mapping[str, Sequence[Tensor]]) -> None:
    """Change one of the rows that share a constant."""
    _write(tensors, {name: rows[:1] for name, rows in places.items()})


def next_place(weights: Decoder) -> dict[str, list[Tensor]]:
    """Take the row of the next constant."""
    places = _constant_places(weights)
    names = [*places]
    return {name: places[after] for name, after in zip(names, names[1:] + names[:1], strict=True)}


def one_by_one(weights: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Check and write tensor by tensor: what came before a bad one stays changed."""
    for name, value in tensors.items():
        _update(weights, {name: value})


def known_names_only(weights: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Skip what is no constant of the model."""
    places = _constant_places(weights)
    _update(weights, {name: value for name, value in tensors.items() if name in places})


def each_name_once(weights: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Forget a name once its constant has come: a second value for it is skipped."""
    taken = vars(weights).setdefault("taken", set())
    _update(weights, {name: value for name, value in tensors.items() if name not in taken})
    taken.update(tensors)


def shape_unchecked(name: str, value: Tensor, place: Tensor | None) -> list[Problem]:
    """Let the copy broadcast."""
    problems = _update_problems(name, value, place)
    return [problem for problem in problems if problem.code is not Code.CONSTANT_SHAPE]


def finiteness_unchecked(name: str, value: Tensor, place: Tensor | None) -> list[Problem]:
    """Look for NaN and infinity at load only."""
    problems = _update_problems(name, value, place)
    return [problem for problem in problems if problem.code is not Code.NON_FINITE_CONSTANT]


# -- reloads


def nothing_reloaded(weights: Decoder, path: str | Path) -> None:
    """Return as if the reload had been made."""


def constants_reloaded_first(weights: Decoder, path: str | Path) -> None:
    """Refuse when the constants have been replaced already."""
    fresh = _constant_places(loading.load(path).weights)
    _write({name: rows[0] for name, rows in fresh.items()}, _constant_places(weights))
    _reload(weights, path)


def constants_cleared_first(weights: Decoder, path: str | Path) -> None:
    """Refuse when the constants have been cleared already."""
    others_cleared({}, _constant_places(weights))
    _reload(weights, path)


def read_first(weights: Decoder, path: str | Path) -> None:
    """Refuse when the new checkpoint has been read, and touch nothing."""
    loading.load(path)
    _reload(weights, path)


# -- the faults

UPDATE = "mone_ref.updates", "update"
WRITE = "mone_ref.updates", "write"
PROBLEMS = "mone_ref.updates", "update_problems"
RELOAD = "mone_ref.updates", "reload"


of_update = partial(plant.fault, stage="update", group="update")
of_reload = partial(plant.fault, stage="reload", group="reload")

FAULTS = (
    of_update(
        "update-lost",
        "An update is accepted and changes nothing.",
        "UPD-1",
        Patch(*WRITE, nothing_written),
    ),
    of_update(
        "update-clears-others",
        "An update of some constants clears all others.",
        "UPD-1",
        Patch(*WRITE, others_cleared),
    ),
    of_update(
        "update-adds",
        "An update is added to the constant that it replaces.",
        "UPD-1",
        Patch(*WRITE, added_up),
    ),
    of_update(
        "update-of-neighbour",
        "An update changes the constant after the one that it names.",
        "UPD-1",
        Patch("mone_ref.updates", "constant_places", next_place),
    ),
    of_update(
        "second-update-lost",
        "A constant that was updated before keeps its value.",
        "UPD-1",
        Patch(*UPDATE, each_name_once),
    ),
    of_update(
        "shared-update-first-owner",
        "An update of a shared constant reaches only the first of its experts.",
        "FMT-29",
        Patch(*WRITE, first_owner),
    ),
    of_update(
        "update-half-applied",
        "What an update holds before its bad tensor stays changed.",
        "UPD-2",
        Patch(*UPDATE, one_by_one),
    ),
    of_update(
        "update-of-unknown-name-skipped",
        "A name in an update that no constant has is skipped.",
        "UPD-2",
        Patch(*UPDATE, known_names_only),
    ),
    of_update(
        "update-shape-unchecked",
        "A constant of another shape is broadcast by an update.",
        "UPD-2",
        Patch(*PROBLEMS, shape_unchecked),
    ),
    of_update(
        "update-finiteness-unchecked",
        "An update with NaN or infinity is accepted.",
        "UPD-3",
        Patch(*PROBLEMS, finiteness_unchecked),
    ),
    of_reload(
        "reload-lost",
        "A reload is accepted and changes nothing.",
        "UPD-4",
        Patch(*RELOAD, nothing_reloaded),
    ),
    of_reload(
        "refused-reload-replaces-constants",
        "A refused reload leaves the new constants.",
        "UPD-5",
        Patch(*RELOAD, constants_reloaded_first),
    ),
    of_reload(
        "refused-reload-clears-constants",
        "A refused reload leaves constants of zero.",
        "UPD-5",
        Patch(*RELOAD, constants_cleared_first),
    ),
    of_reload(
        "reload-refused-late",
        "A reload is refused after the new checkpoint was read.",
        "UPD-4",
        Patch(*RELOAD, read_first),
        equivalent="The refusal is the same, and so are the answers after it.",
    ),
)
