"""A fixture on disk: ``<name>/{recipe.yaml, checkpoint/, golden.safetensors}``.

Where its sizes divide among ranks, ``ranks.safetensors`` holds the budgets of those.
Goldens never lie inside ``checkpoint/``: some engines read every safetensors file of a
directory.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mone_ref import loading
from mone_ref.checkpoint.opening import require_regular
from mone_ref.fill import certificate, checkpoint, golden, ranks
from mone_ref.fill import recipe as recipes
from mone_ref.fill.recipe import Recipe, RecipeError
from mone_ref.fill.variants import all_variants

NUMBERS = ("golden.safetensors", ranks.FILE)
GOLDEN_TOLERANCE = 1e-12  # share of max|O|; kernels differ by 4e-15, float32 would show 1e-7


@dataclass(frozen=True)
class Fixture:
    """One fixture that was read back."""

    directory: Path
    recipe: Recipe

    @property
    def checkpoint(self) -> Path:
        """What an engine loads."""
        return self.directory / "checkpoint"

    def golden(self) -> dict[str, Tensor]:
        """Every pinned number, by name, with those of ranks."""
        return self.numbers("golden.safetensors") | self.numbers(ranks.FILE)

    def numbers(self, name: str) -> dict[str, Tensor]:
        """The numbers of one file; none where it is absent, as that of ranks may be.

        Raises ``RecipeError``, OSError.
        """
        path = self.directory / name
        if name == ranks.FILE and not path.exists():
            return {}
        require_regular(path)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RecipeError(f"{path}: {error}") from error


def read(directory: Path) -> Fixture:
    """Open a fixture. Raises ``RecipeError``."""
    return Fixture(directory, recipes.read(directory / "recipe.yaml"))


def fill(recipe: Recipe, parent: Path) -> Fixture:
    """Make ``parent/<name>``; it appears whole or not at all.

    Raises ``RecipeError`` when the recipe cannot be certified or the directory exists, and
    ``Rejected`` when the recipe describes a checkpoint that the loader refuses.
    """
    target = parent / recipe.name
    if target.exists():
        raise RecipeError(f"{target}: exists already")
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{recipe.name}-", dir=parent))
    try:
        write(recipe, work)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Fixture(target, recipe)


def write(recipe: Recipe, directory: Path) -> None:
    """Write recipe, checkpoint and golden into an empty directory."""
    (directory / "recipe.yaml").write_text(recipes.dump(recipe), encoding="utf-8")
    place = directory / "checkpoint"
    place.mkdir()
    checkpoint.write(recipe, place)

    oracle = loading.load(place, torch.float64)
    runs = all_variants(place, recipe.compute_types)
    prompts = [
        certificate.grow(recipe, index, length, oracle, runs)
        for index, length in enumerate(recipe.prompts)
    ]
    certificate.check_coverage(recipe, oracle, prompts)
    certificate.check_headroom(recipe, runs, prompts)
    metadata = {
        "format": "pt",
        "fixture": recipe.name,
        "compute_types": ",".join(recipe.compute_types),
    }
    numbers = golden.golden(oracle, runs, prompts)
    save_file(numbers, directory / "golden.safetensors", metadata=metadata)
    truth = [numbers[f"prompt.{index}.logprobs"] for index in range(len(prompts))]
    ranks.write(place, runs, prompts, truth, directory / ranks.FILE)


def add_ranks(fixture: Fixture) -> list[str]:
    """Write the budgets of ranks for a fixture that has none; returns their names."""
    pinned = fixture.numbers("golden.safetensors")
    count = len(fixture.recipe.prompts)
    prompts = [pinned[f"prompt.{index}.ids"].tolist() for index in range(count)]
    truth = [pinned[f"prompt.{index}.logprobs"] for index in range(count)]
    runs = all_variants(fixture.checkpoint, fixture.recipe.compute_types)
    return ranks.write(fixture.checkpoint, runs, prompts, truth, fixture.directory / ranks.FILE)


def fill_pair(recipe: Recipe, parent: Path) -> list[Fixture]:
    """A fixture and its plain control; a control that is there already is kept."""
    control = parent / recipe.control_name
    if recipe.is_plain:
        return [fill(recipe, parent)]
    if not control.exists():
        return [fill(recipe.plain(), parent), fill(recipe, parent)]
    if same_model(read(control).recipe) != same_model(recipe.plain()):
        raise RecipeError(f"{control}: exists already, and is not the control of {recipe.name}")
    return [fill(recipe, parent)]


def same_model(recipe: Recipe) -> Recipe:
    """A recipe without what only says how it is asked."""
    return replace(recipe, prompts=[], compute_types=[])


def differences(pinned: Fixture, again: Fixture) -> list[str]:
    """What a refilled fixture does not reproduce; empty when all is well.

    Recipe, config, weights and prompts compare byte for byte, goldens to 1e-12 of the
    largest value, budgets as closely as kernels allow.
    """
    found = [
        f"{name}: bytes differ"
        for name in sorted(files(pinned.directory) | files(again.directory))
        if name not in NUMBERS
        and content(pinned.directory / name) != content(again.directory / name)
    ]
    old, new = pinned.golden(), again.golden()
    if old.keys() != new.keys():
        return [*found, f"golden: tensors {sorted(old.keys() ^ new.keys())} on one side only"]
    for name, value in old.items():
        found += number_differences(name, value, new[name])
    return found


BUDGET_ROOM = 2.0
"""How far a prompt's median token budget, or its ``M``, may move between two fills. Budgets
are rounding noise of the kernels that ran; over four instruction sets the largest move
measured is 1.9 (float32)."""

TOKEN_ROOM = 9.0
"""The same for a single token: the square of the rule's multiplier, since either fill may have
met or missed an unlucky sum. The largest move measured is 2.9."""


def number_differences(name: str, old: Tensor, new: Tensor) -> list[str]:
    """Compare one pinned tensor with its rebuilt twin."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return [
            f"golden {name}: {old.dtype} {list(old.shape)} against {new.dtype} {list(new.shape)}"
        ]
    if name.endswith(".ids"):
        return [] if torch.equal(old, new) else [f"golden {name}: another prompt"]
    if name.endswith(".logprobs"):
        error = float((old - new).abs().max() / old.abs().max())
        return [] if error <= GOLDEN_TOLERANCE else [f"golden {name}: off by {error:.1e} of max"]
    moved = torch.maximum(old / new, new / old)
    change = float(old.median() / new.median())
    if max(change, 1 / change) <= BUDGET_ROOM and bool((moved <= TOKEN_ROOM).all()):
        return []
    return [f"golden {name}: budget off by a factor {float(moved.max()):.2f}"]


def files(directory: Path) -> set[str]:
    """Relative names of all files below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def content(path: Path) -> bytes | None:
    """A file's bytes; None when it is absent."""
    return path.read_bytes() if path.is_file() else None
