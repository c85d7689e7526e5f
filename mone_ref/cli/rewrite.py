"""``mone-ref rewrite``: a checkpoint and a plan -> another checkpoint, or what it would be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems, progress
from mone_ref.cli.problems import gigabytes
from mone_ref.cli.progress import Interrupted
from mone_ref.errors import Code, Problem, Rejected, only_errors
from mone_ref.rewrite import make, plan, writer
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.forecast import Forecast, forecast
from mone_ref.rewrite.make import Made
from mone_ref.rewrite.uncollected import uncollected
from mone_ref.rewrite.writer import Written

NO_INPUT = (Code.NOT_A_CHECKPOINT, Code.PLAN_FILE)

Design = tuple[Made, Mapping[str, Any]]
"""What to write, and the plan that the manifest tells."""


def register(parent: typer.Typer) -> None:
    """Add the ``rewrite`` command."""
    parent.command("rewrite")(rewrite)


def rewrite(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    plan_file: Annotated[Path, typer.Option("--plan", help="A plan in YAML or JSON.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The directory that will appear; not there yet.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished output away; do not go on.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; read headers only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Substitute or prune experts as a plan says.

    Exits 0 when the output is there (or the plan fits), 1 on errors, 2 when DIR or the plan cannot
    be read, 130 or 143 when interrupted: the same command then goes on.
    """

    def design() -> Design:
        chosen = plan.read(plan_file)
        made = make.blueprint(directory, chosen, scan=not dry_run)
        return made, plan.as_document(chosen)

    carry_out(directory, design, out, restart=restart, dry_run=dry_run, as_json=as_json)


def carry_out(
    directory: Path,
    design: Callable[[], Design],
    out: Path | None,
    *,
    restart: bool,
    dry_run: bool,
    as_json: bool,
) -> NoReturn:
    """Make a blueprint, write it unless this is a dry run, tell, and exit with the status."""
    if (out is None) is not dry_run:
        raise typer.BadParameter("one of --out and --dry-run", param_hint="--out")
    made: Made | None = None
    expected: Forecast | None = None
    written: Written | None = None
    try:
        made, said, expected = _designed(design)
        found = made.problems
        if out is not None and made.blueprint is not None:
            written = write(made.blueprint, out, said, restart)
    except Rejected as rejected:
        found = (*made.problems, *rejected.problems) if made else rejected.problems
    except Interrupted as interrupted:
        typer.echo(f"interrupted by {interrupted}: the same command goes on", err=True)
        raise typer.Exit(interrupted.status) from None
    status = exit_status(found)
    if as_json:
        told = document(directory, found, made, expected, written, status)
        typer.echo(json.dumps(told, indent=2))
    else:
        for line in lines(directory, found, made, expected):
            typer.echo(line)
        if written is not None:
            typer.echo(summary(written))
    raise typer.Exit(status)


@uncollected
def _designed(design: Callable[[], Design]) -> tuple[Made, Mapping[str, Any], Forecast | None]:
    made, said = design()
    return made, said, forecast(made.structure, made.blueprint) if made.blueprint else None


def write(blueprint: Blueprint, out: Path, said: Mapping[str, Any], restart: bool) -> Written:
    """Write the output with a progress bar; the manifest says by which plan.

    Raises ``Rejected``, ``Interrupted``.
    """
    size = blueprint.tensor_bytes
    with progress.interruptible(), progress.shown("rewrite", size) as advance:
        return writer.write(blueprint, out, said, restart=restart, advance=advance)


def summary(written: Written) -> str:
    """What is there now."""
    resumed = f", {len(written.resumed)} of them by an earlier try" if written.resumed else ""
    files = count(len(written.written) + len(written.resumed), "file")
    return f"{plain(str(written.directory))}: {files}{resumed}, {gigabytes(written.size)}"


def exit_status(found: tuple[Problem, ...]) -> int:
    """0 without errors, 1 with errors, 2 where an input cannot be read at all."""
    stopping = only_errors(found)
    if any(problem.code in NO_INPUT for problem in stopping):
        return 2
    return 1 if stopping else 0


def lines(
    directory: Path, found: tuple[Problem, ...], made: Made | None, expected: Forecast | None
) -> Iterator[str]:
    """Problems, then what would be written."""
    yield from problems.lines(found)
    if made is None or made.blueprint is None or expected is None:
        counted = count(len(only_errors(found)), "error")
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
    written: Written | None,
    status: int,
) -> dict[str, Any]:
    """The same as JSON-ready data; ``forecast`` is null where nothing can be written, ``output``
    where nothing was."""
    return {
        "path": str(directory),
        "exit_code": status,
        "output": str(written.directory) if written else None,
        "resumed": list(written.resumed) if written else None,
        "forecast": expected.as_dict() if expected else None,
        "files": _files(made) if made and made.blueprint else None,
        "findings": [problem.as_dict() for problem in found],
    }


def _files(made: Made) -> list[str]:
    """Every file of the output."""
    assert made.blueprint is not None
    shards = [shard.name for shard in made.blueprint.shards]
    return [*shards, *made.blueprint.documents, *made.blueprint.copies]
