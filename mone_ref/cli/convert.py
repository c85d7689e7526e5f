"""``mone-ref convert``: a substituted checkpoint -> the same one in the other form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.cli import rewrite
from mone_ref.cli.progress import Interrupted
from mone_ref.errors import Rejected
from mone_ref.rewrite import convert
from mone_ref.rewrite.forecast import forecast
from mone_ref.rewrite.make import Made
from mone_ref.rewrite.plan import Form
from mone_ref.rewrite.writer import Written


def register(parent: typer.Typer) -> None:
    """Add the ``convert`` command."""
    parent.command("convert")(convert_directory)


def convert_directory(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A substituted checkpoint.")],
    form: Annotated[Form, typer.Option("--to", help="The form of the output.")],
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
    """Declare the same experts in the other form; tensors keep their bytes.

    Reads both forms, and the approx form as mode-pd writes it. What `validate` calls an error is
    refused. Exits 0 when the output is there (or could be made), 1 on errors, 2 when DIR cannot
    be read, 130 or 143 when interrupted: the same command then goes on.
    """
    if (out is None) is not dry_run:
        raise typer.BadParameter("one of --out and --dry-run", param_hint="--out")
    made: Made | None = None
    written: Written | None = None
    try:
        made = convert.blueprint(directory, form, scan=not dry_run)
        found = made.problems
        if out is not None and made.blueprint is not None:
            written = rewrite.write(made.blueprint, out, convert.as_document(form), restart)
    except Rejected as rejected:
        found = (*made.problems, *rejected.problems) if made else rejected.problems
    except Interrupted as interrupted:
        typer.echo(f"interrupted by {interrupted}: the same command goes on", err=True)
        raise typer.Exit(interrupted.status) from None
    status = rewrite.exit_status(found)
    expected = forecast(made.structure, made.blueprint) if made and made.blueprint else None
    if as_json:
        told = rewrite.document(directory, found, made, expected, written, status)
        typer.echo(json.dumps(told, indent=2))
    else:
        for line in rewrite.lines(directory, found, made, expected):
            typer.echo(line)
        if written is not None:
            typer.echo(rewrite.summary(written))
    raise typer.Exit(status)
