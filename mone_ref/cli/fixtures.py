"""``mone-ref fixtures``: fill recipes, check pinned fixtures, list them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer

from mone_ref.cli.failure import fail
from mone_ref.errors import Rejected
from mone_ref.fill import fixture, layer_golden, pins
from mone_ref.fill import ranks as rank_budgets
from mone_ref.fill import recipe as recipes
from mone_ref.fill.layer_recipe import LayerRecipeError
from mone_ref.fill.recipe import RecipeError
from mone_ref.suite import cases, data, layer_cases, spread
from mone_ref.suite.cases import CaseError
from mone_ref.suite.printable import printable

app = typer.Typer(help="Fill, check and list fixture checkpoints.", no_args_is_help=True)

Root = Annotated[
    Path | None, typer.Option("--root", help="Directory of fixtures; default: the pinned ones.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(parent: typer.Typer) -> None:
    """Add the ``fixtures`` command group."""
    parent.add_typer(app, name="fixtures")


@app.command("fill")
def fill(
    recipe: Annotated[Path, typer.Argument(help="A recipe.yaml.")],
    out: Annotated[Path, typer.Option("--out", help="Directory that receives <name>/.")],
) -> None:
    """Make a certified fixture and its plain control from a recipe."""
    try:
        made = fixture.fill_pair(recipes.read(recipe), out)
    except (RecipeError, Rejected, OSError) as error:
        fail(str(error), 1)
    for one in made:
        typer.echo(printable(f"filled {one.directory}"))


@app.command("check")
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Fixture names; default: all.")] = None,
    root: Root = None,
    as_json: AsJson = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Processes; default: one for every core."),
    ] = None,
) -> None:
    """Refill every fixture from its recipe and compare; exit 1 on any difference."""
    place = root or data.root() / "fixtures"
    found: dict[str, list[str]] = {}
    try:
        chosen = [one.directory for one in select(place, names or [])]
        for name, differences in checked(chosen, jobs or spread.cores()):
            found[name] = differences
            if not as_json:
                tell(name, differences)
    except (RecipeError, Rejected, OSError) as error:
        fail(str(error), 1)
    if not names:
        found["SHA256SUMS"] = pins.differences(place)
        if not as_json:
            tell("SHA256SUMS", found["SHA256SUMS"])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    raise typer.Exit(1 if any(found.values()) else 0)


def tell(name: str, differences: Sequence[str]) -> None:
    """The lines of one fixture."""
    typer.echo(f"{'differs' if differences else 'ok':8} {name}")
    for line in differences:
        typer.echo(f"         {line}")


@app.command("pin")
def pin(
    root: Annotated[Path, typer.Option("--root", help="Directory of fixtures.")],
) -> None:
    """Write SHA256SUMS for a directory of fixtures."""
    try:
        select(root, [])
        pins.write(root)
    except (RecipeError, OSError) as error:
        fail(str(error), 1)
    typer.echo(printable(f"pinned {root / pins.PINS}"))


@app.command("layers")
def layers() -> None:
    """Write the goldens of layer cases that have none."""
    root = data.root()
    try:
        for name, document in cases.read_documents(root).items():
            path = layer_cases.golden_path(root, name)
            if document["expect"].get("output") != layer_cases.GOLDEN or path.exists():
                continue
            recipe, ranks = layer_cases.build_recipe(document["layer"]), document.get("ranks", [1])
            made = layer_golden.golden(recipe, document["call"], document["given"], ranks)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(layer_golden.as_text(made), encoding="utf-8")
            typer.echo(f"wrote {path}")
    except (CaseError, LayerRecipeError, OSError) as error:
        fail(str(error), 1)


@app.command("ranks")
def ranks(root: Root = None) -> None:
    """Write the budgets of tensor parallelism for fixtures that have none."""
    try:
        for one in select(root or data.root() / "fixtures", []):
            if not (one.directory / rank_budgets.FILE).exists():
                names = fixture.add_ranks(one)
                typer.echo(f"{one.directory.name}: {', '.join(names) or 'no size divides'}")
    except (RecipeError, Rejected, OSError) as error:
        fail(str(error), 1)


@app.command("list")
def list_fixtures(root: Root = None, as_json: AsJson = False) -> None:
    """Name, sizes and substituted experts of every fixture."""
    place = root or data.root() / "fixtures"
    try:
        rows = [describe(one) for one in select(place, [])]
    except (RecipeError, OSError) as error:
        fail(str(error), 1)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(
            f"{row['name']:26} {row['family']:8} E={row['experts']:<3} k={row['top_k']:<2} "
            f"V={row['vocab']:<4} substituted {row['substitution'] or 'none'}"
        )


def select(place: Path, names: list[str]) -> list[fixture.Fixture]:
    """The named fixtures, or all. Raises ``RecipeError`` for a name that is not there."""
    present = sorted(path.parent.name for path in place.glob("*/recipe.yaml"))
    for name in names:
        if name not in present:
            raise RecipeError(f"no fixture {name} in {place}; there are {present}")
    if not present:
        raise RecipeError(f"no fixtures in {place}")
    return [fixture.read(place / name) for name in names or present]


def checked(directories: Sequence[Path], jobs: int) -> Iterator[tuple[str, list[str]]]:
    """Name and differences of every fixture, in order, made in several processes.

    One thread in each: a fixture's products are too small to share.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        differences = pool.map(refill, directories)
        yield from zip((place.name for place in directories), differences, strict=True)


def refill(directory: Path) -> list[str]:
    """What a fresh fill of one fixture does not reproduce."""
    pinned = fixture.read(directory)
    with tempfile.TemporaryDirectory() as scratch:
        return fixture.differences(pinned, fixture.fill(pinned.recipe, Path(scratch)))


def describe(one: fixture.Fixture) -> dict[str, object]:
    """One row of ``list``."""
    recipe = one.recipe
    return {
        "name": recipe.name,
        "family": recipe.family,
        "experts": recipe.num_experts,
        "top_k": recipe.top_k,
        "vocab": recipe.vocab_size,
        "substitution": dict(recipe.substitution),
        "prompts": list(recipe.prompts),
        "compute_types": list(recipe.compute_types),
        "control": recipe.control_name if not recipe.is_plain else None,
    }
