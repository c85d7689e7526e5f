"""A user's own fixtures as cases: whether a directory holds any, and what an engine owes to each.

Nothing of them is pinned. Instead the oracle answers every prompt again: a golden that no
longer belongs to its checkpoint would blame the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mone_ref import loading
from mone_ref.errors import Rejected
from mone_ref.fill import fixture
from mone_ref.fill.fixture import GOLDEN_TOLERANCE, Fixture
from mone_ref.fill.recipe import RecipeError
from mone_ref.suite import golden
from mone_ref.suite.cases import Case, Expected, Kind
from mone_ref.suite.options import OptionError

PREFIX = "fixtures"
"""The first level of the ids, which no case of the suite has."""


def cases(directory: Path) -> tuple[Case, ...]:
    """One output case for every substituted fixture, one control case for every plain one.

    Raises ``OptionError`` for a directory that is no fixture set, and for a fixture that
    is not whole, has no control beside it, or has a golden of another checkpoint.
    """
    try:
        found = read(directory)
        for name, one in found.items():
            for flaw in flaws(one, found):
                raise OptionError(f"--fixtures {directory}: {name}: {flaw}")
    except OptionError:
        raise
    except (RecipeError, Rejected, OSError, ValueError) as error:
        raise OptionError(f"--fixtures {directory}: {error}") from error
    return tuple(case(one) for one in found.values())


def read(directory: Path) -> dict[str, Fixture]:
    """Every fixture of a directory by its name, controls first. Raises ``OptionError``."""
    if (directory / "recipe.yaml").is_file():
        raise OptionError(f"--fixtures {directory}: is one fixture, name the directory above it")
    places = sorted(path.parent for path in directory.glob("*/recipe.yaml"))
    if not places:
        raise OptionError(
            f"--fixtures {directory}: no fixture, expected NAME/{{recipe.yaml, checkpoint/, "
            "golden.safetensors} as written by mone-ref fixtures fill RECIPE --out DIR"
        )
    found = {place.name: fixture.read(place) for place in places}
    return dict(sorted(found.items(), key=lambda entry: not entry[1].recipe.is_plain))


def flaws(one: Fixture, found: Mapping[str, Fixture]) -> Iterator[str]:
    """Why a fixture cannot be judged against."""
    name, recipe = one.directory.name, one.recipe
    if recipe.name != name:
        yield f"recipe.yaml is of {recipe.name}, expected the name of its directory"
    control = found.get(recipe.control_name)
    if not recipe.is_plain and (control is None or not control.recipe.is_plain):
        yield (
            f"no control {recipe.control_name} beside it; "
            f"mone-ref fixtures fill {one.directory / 'recipe.yaml'} --out DIR makes both"
        )
    stale = stale_golden(one)
    if stale:
        yield f"golden.safetensors is stale: {stale}; fill the recipe again"


def stale_golden(one: Fixture) -> str:
    """Where the golden holds other answers than its checkpoint gives in float64."""
    pinned = golden.read(one.directory / "golden.safetensors")
    oracle = loading.load(one.checkpoint, torch.float64)
    for index, prompt in enumerate(pinned.prompts):
        (answer,) = oracle.score([prompt.ids])  # [T, V]
        if answer.shape != prompt.logprobs.shape:
            shapes = f"{list(prompt.logprobs.shape)}, the checkpoint gives {list(answer.shape)}"
            return f"prompt {index} has the shape {shapes}"
        error = float((answer - prompt.logprobs).abs().max() / answer.abs().max())
        if not error <= GOLDEN_TOLERANCE:  # also where it is NaN
            return f"prompt {index} is off by {error:.1e} of what the checkpoint gives"
    return ""


def case(one: Fixture) -> Case:
    """What is asked of an engine about one fixture."""
    name, recipe = one.directory.name, one.recipe
    about = "a plain model" if recipe.is_plain else "a model with substituted experts"
    return Case(
        id=f"{PREFIX}/{name}",
        kind=Kind.CONTROL if recipe.is_plain else Kind.OUTPUT,
        statement=f"{name}, {about}, gives its golden answers.",
        why=f"The fixture is one of your own: {one.directory / 'recipe.yaml'}.",
        clauses=("GEN-3",) if recipe.is_plain else ("GEN-1", "SEM-1", "SEM-2"),
        fixture=name,
        control=recipe.control_name if not recipe.is_plain else name,
        expected=Expected(),
    )
