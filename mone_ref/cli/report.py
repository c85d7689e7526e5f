"""``mone-ref report``: reports of one or several engines as a page, or as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.cli.failure import fail
from mone_ref.suite import clause_table, data, page
from mone_ref.suite.cases import CaseError
from mone_ref.suite.merge import Merged, merge
from mone_ref.suite.printable import printable
from mone_ref.suite.report import ReportError
from mone_ref.suite.spec import SpecError


def register(app: typer.Typer) -> None:
    """Add the ``report`` command."""
    app.command("report")(write_report)


def write_report(
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT.jsonl...", help="What `conform --report` wrote."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Write the page here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the clause x engine table as JSON.")
    ] = False,
) -> None:
    """Put reports of one suite side by side, as one HTML file without any request.

    Exits 0 whatever the verdicts are, 1 when a report is incomplete or does not fit
    the others or the installed suite, 2 when a file cannot be read or written.
    """
    if out is None and not as_json:
        fail("expected --out FILE.html, --json or both", 2)
    if out is not None and out.resolve() in {path.resolve() for path in reports}:
        fail(f"{out}: is one of the reports", 2)
    if out is not None and out.exists() and not out.is_file():
        fail(f"{out}: not a regular file", 2)
    try:
        merged = merge(reports, data.root())
    except ReportError as error:
        fail(str(error), 1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", 2)
    except (CaseError, SpecError) as error:
        fail(str(error), 2)
    if out is not None:
        _write(merged, out, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(clause_table.document(merged), indent=2))


def _write(merged: Merged, out: Path, quiet: bool) -> None:
    """The page, and a line for each engine."""
    content = page.render(merged)
    try:
        _replace(out, content)
    except OSError as error:
        fail(f"{out}: {error.strerror}", 2)
    if quiet:
        return
    for engine in merged.engines:
        word = page.verdict_look(engine).word
        typer.echo(printable(f"{engine.title} ({engine.setting}): {word}"))
    typer.echo(f"written to {out}, {len(content.encode()) / 1000:.0f} kB")


def _replace(out: Path, content: str) -> None:
    """Write a file that is whole or not there."""
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        Path(name).chmod(0o644)
        Path(name).replace(out)
    except OSError:
        Path(name).unlink()
        raise
