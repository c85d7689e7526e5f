"""``mone-ref verify``: whether an output is what its source and plan make, byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mone_ref.checkpoint.findings import flaw
from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems, progress
from mone_ref.cli.problems import gigabytes
from mone_ref.errors import Code, Problem, Rejected, only_errors, show
from mone_ref.rewrite import convert, make, manifest, plan, verify
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.make import Made
from mone_ref.rewrite.shard_check import require_readable
from mone_ref.rewrite.verify import Verified


def register(parent: typer.Typer) -> None:
    """Add the ``verify`` command."""
    parent.command("verify")(verify_directory)


def verify_directory(
    directory: Annotated[
        Path, typer.Argument(metavar="OUT", help="The output of a rewrite or conversion.")
    ],
    source: Annotated[Path, typer.Option("--against", help="The checkpoint it was made of.")],
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="The plan; default: the one in the manifest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Make the output's blueprint anew from source and plan, and compare every byte.

    Exits 0 when the output is proven, 1 when anything differs, 2 when OUT, the source or the plan
    cannot be read.
    """
    found: tuple[Problem, ...]
    done: Verified | None = None
    try:
        said, blueprint = _expected(directory, source, plan_file)
        with progress.shown("verify", blueprint.tensor_bytes) as advance:
            done = verify.verify(directory, blueprint, said, advance=advance)
        found = done.problems
    except Rejected as rejected:
        found = rejected.problems
    status = exit_status(found, done)
    if as_json:
        typer.echo(json.dumps(document(directory, found, done, status), indent=2))
    else:
        for line in lines(directory, found, done):
            typer.echo(line)
    raise typer.Exit(status)


def _expected(directory: Path, source: Path, file: Path | None) -> tuple[dict[str, Any], Blueprint]:
    """The plan that is given, or the manifest's, and what it makes of the source.

    Constants in a manifest's plan are in the source or beside it.
    """
    if file is not None:
        chosen = plan.read(file)
        return plan.as_document(chosen), _required(make.blueprint(source, chosen))
    require_readable(directory)
    said = manifest.read(directory)["plan"]
    form = convert.from_document(said)
    if form is not None:
        return said, _required(convert.blueprint(source, form))
    chosen = plan.from_document(said, source, manifest.NAME)
    if chosen.constants is not None and not os.path.exists(chosen.constants):
        where, found = "$.plan.constants", f"no file {show(str(chosen.constants))}"
        expected = "the constants there, or --plan with the plan that names them"
        raise Rejected([flaw(Code.PLAN_CONSTANTS, manifest.NAME, where, found, expected)])
    return plan.as_document(chosen), _required(make.blueprint(source, chosen))


def _required(made: Made) -> Blueprint:
    if made.blueprint is None:
        raise Rejected(only_errors(made.problems))
    return made.blueprint


def exit_status(found: tuple[Problem, ...], done: Verified | None) -> int:
    """0 when all is as planned, 1 when anything differs, 2 when nothing could be compared."""
    if done is None:
        return 2
    return 1 if only_errors(found) else 0


def lines(directory: Path, found: tuple[Problem, ...], done: Verified | None) -> Iterator[str]:
    """Every difference, then what was compared."""
    yield from problems.lines(found)
    name = plain(str(directory))
    if done is None:
        yield f"{name}: not compared"
        return
    verdict = count(len(found), "difference") if found else "proven"
    parts = [count(done.files, "file"), count(done.tensors, "tensor"), gigabytes(done.size)]
    yield f"{name}: {verdict}: {', '.join(parts)} compared"


def document(
    directory: Path, found: tuple[Problem, ...], done: Verified | None, status: int
) -> dict[str, Any]:
    """The same as JSON-ready data; counts are null where nothing could be compared."""
    return {
        "path": str(directory),
        "exit_code": status,
        "files": done.files if done else None,
        "tensors": done.tensors if done else None,
        "bytes": done.size if done else None,
        "findings": [problem.as_dict() for problem in found],
    }
