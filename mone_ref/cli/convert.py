"""``mone-ref convert``: a substituted checkpoint -> the same one in the other form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mone_ref.cli import rewrite
from mone_ref.rewrite import convert
from mone_ref.rewrite.plan import Form


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

    def design() -> rewrite.Design:
        return convert.blueprint(directory, form, scan=not dry_run), convert.as_document(form)

    rewrite.carry_out(directory, design, out, restart=restart, dry_run=dry_run, as_json=as_json)
