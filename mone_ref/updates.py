"""What may change in a loaded model: single constants, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mone_ref.errors import Code, Phase, Problem, Rejected, show
from mone_ref.model.decoder import Decoder
from mone_ref.precision import FLOATS


def update(weights: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Change constants in place, all or none (UPD-1, UPD-2).

    ``tensors`` maps names in the checkpoint to new values ``[H]``. Raises ``Rejected`` as
    ``Model.update`` says.
    """
    places = constant_places(weights)
    problems = [
        problem
        for name, value in tensors.items()
        for problem in update_problems(name, value, places[name][0] if name in places else None)
    ]
    if problems:
        raise Rejected(problems)
    write(tensors, places)


def constant_places(weights: Decoder) -> dict[str, list[Tensor]]:
    """Constant name -> the rows ``[H]`` that hold it; several where it is shared (FMT-29)."""
    places: dict[str, list[Tensor]] = defaultdict(list)
    for layer in weights.moe_layers.values():
        for row, expert in enumerate(layer.substitution.substituted):
            places[layer.substitution.constants[expert]].append(layer.constants[row])
    return dict(places)


def write(tensors: Mapping[str, Tensor], places: Mapping[str, Sequence[Tensor]]) -> None:
    """Put each new value into every row that holds its constant."""
    for name, value in tensors.items():
        for place in places[name]:
            place[...] = value


def update_problems(name: str, value: Tensor, place: Tensor | None) -> list[Problem]:
    """What is wrong with one tensor of an update."""

    def problem(code: Code, found: str, expected: str, clause: str) -> Problem:
        return Problem(
            code, Phase.UPDATE, show(name), found, expected, file="update", clause=clause
        )

    if not isinstance(value, Tensor) or value.is_meta:
        return [problem(Code.CONSTANT_DTYPE, type(value).__name__, "a tensor", "FMT-5")]
    if place is None:
        expected = "the name of a constant of this model"
        return [problem(Code.UPDATE_TARGET, "another name", expected, "UPD-1")]
    if value.shape != place.shape:
        found, expected = str(list(value.shape)), str(list(place.shape))
        return [problem(Code.CONSTANT_SHAPE, found, expected, "FMT-5")]
    if value.dtype not in FLOATS:
        return [problem(Code.CONSTANT_DTYPE, str(value.dtype), "a float type", "FMT-27")]
    if not value.to(place.dtype).isfinite().all():
        found, expected = "NaN or infinity", f"values finite in {place.dtype}"
        return [problem(Code.NON_FINITE_CONSTANT, found, expected, "UPD-3")]
    return []


def reload(weights: Decoder, path: str | Path) -> None:
    """Refuse to reload ``weights`` layer by layer; they stay as they are (UPD-4, UPD-5)."""
    raise Rejected(
        [
            Problem(
                Code.UNSUPPORTED_RELOAD,
                Phase.RELOAD,
                "reload",
                "a layerwise reload",
                "a fresh load, or an update of single constants",
                file=show(str(path)),
                clause="UPD-4",
            )
        ]
    )
