"""``mone-ref rewrite``: a checkpoint and a plan -> another checkpoint, or what it would be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems
from mone_ref.cli.problems import gigabytes
from mone_ref.errors import Code, Problem, Rejected
from mone_ref.rewrite import make, plan
from mone_ref.rewrite.forecast import Forecast, forecast
from mone_ref.rewrite.make import Made

NO_INPUT = (Code.NOT_A_CHECKPOINT, Code.PLAN_FILE)


def register(parent: typer.Typer) -> None:
    """Add the ``rewrite`` command."""
    parent.command("rewrite")(rewrite)


def rewrite(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    plan_file: Annotated[Path, typer.Option("--plan", help="A plan in YAML or JSON.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; read headers only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Substitute or prune experts as a plan says.

    Exits 0 when the plan fits, 1 on errors, 2 when DIR or the plan cannot be read.
    """
    if not dry_run:
        raise typer.BadParameter("only --dry-run is implemented", param_hint="--dry-run")
    made: Made | None = None
    try:
        made = make.blueprint(directory, plan.read(plan_file))
        found = made.problems
    except Rejected as rejected:
        found = rejected.problems
    status = exit_status(found)
    expected = forecast(made.structure, made.blueprint) if made and made.blueprint else None
    if as_json:
        typer.echo(json.dumps(document(directory, found, made, expected, status), indent=2))
    else:
        for line in lines(directory, found, made, expected):
            typer.echo(line)
    raise typer.Exit(status)


def exit_status(found: tuple[Problem, ...]) -> int:
    """0 without errors, 1 with errors, 2 where an input cannot be read at all."""
    stopping = problems.errors(found)
    if any(problem.code in NO_INPUT for problem in stopping):
        return 2
    return 1 if stopping else 0


def lines(
    directory: Path, found: tuple[Problem, ...], made: Made | None, expected: Forecast | None
) -> Iterator[str]:
    """Problems, then what would be written."""
    yield from problems.lines(found)
    if made is None or made.blueprint is None or expected is None:
        counted = count(len(problems.errors(found)), "error")
        yield f"{plain(str(directory))}: {counted}, nothing to write"
        return
    yield f"{'':12} {'source':>12} {'output':>12}"
    for component, size in expected.before.components.items():
        new = expected.after.components[component]
        if size or new:
            yield f"{component:12} {gigabytes(size):>12} {gigabytes(new):>12}"
    before, after = expected.before, expected.after
    yield f"{'total':12} {gigabytes(before.size):>12} {gigabytes(after.size):>12}"
    yield f"{'tensors':12} {before.tensors:>12} {after.tensors:>12}"
    yield f"{'shards':12} {before.shards:>12} {after.shards:>12}"
    share = 100 * expected.saved / before.size if before.size else 0.0
    yield f"memory saved: {gigabytes(expected.saved)} of weights ({share:.1f} %)"
    copies = count(len(made.blueprint.copies), "other file")
    yield f"copied: {copies}, {gigabytes(expected.copied)}"


def document(
    directory: Path,
    found: tuple[Problem, ...],
    made: Made | None,
    expected: Forecast | None,
    status: int,
) -> dict[str, Any]:
    """The same as JSON-ready data; ``forecast`` is null where nothing can be written."""
    return {
        "path": str(directory),
        "exit_code": status,
        "forecast": expected.as_dict() if expected else None,
        "files": _files(made) if made and made.blueprint else None,
        "findings": [problem.as_dict() for problem in found],
    }


def _files(made: Made) -> list[str]:
    """Every file of the output."""
    assert made.blueprint is not None
    shards = [shard.name for shard in made.blueprint.shards]
    return [*shards, *made.blueprint.documents, *made.blueprint.copies]
