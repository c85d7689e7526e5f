"""``mone-ref findings``: a page about one engine for its maintainers, from a report and notes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mone_ref.cli.failure import fail
from mone_ref.suite import cases, data, findings, report, spec
from mone_ref.suite.cases import CaseError
from mone_ref.suite.findings import FindingsError
from mone_ref.suite.report import ReportError
from mone_ref.suite.spec import SpecError


def register(app: typer.Typer) -> None:
    """Add the ``findings`` command."""
    app.command("findings")(write_findings)


def write_findings(
    run: Annotated[
        Path, typer.Argument(metavar="REPORT.jsonl", help="What `conform --report` wrote.")
    ],
    notes: Annotated[
        Path,
        typer.Option(
            "--notes", metavar="FILE.yaml", help="Causes; their scripts lie in the folder FILE."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.md", help="Write the page here.")],
    excerpt: Annotated[
        Path | None,
        typer.Option(
            "--excerpt", metavar="FILE.jsonl", help="Keep the lines that the page is made of."
        ),
    ] = None,
) -> None:
    """Write what an engine's maintainers should know: failures by cause, with scripts.

    Exits 0, 1 when report or notes are malformed or do not speak of the same failures, 2 when a
    file cannot be read or written.
    """
    places = [path.resolve() for path in (run, notes, out, excerpt) if path is not None]
    if len(set(places)) < len(places):
        fail("expected a different file for the report, --notes, --out and --excerpt", 2)
    for path in (out, excerpt):
        if path is not None and path.exists() and not path.is_file():
            fail(f"{path}: not a regular file", 2)
    try:
        judged, told, root = report.read(run), findings.read(notes), data.root()
        folder = findings.scripts(notes)
        page = findings.render(told, folder, judged, cases.load(root), spec.load(root))
    except ReportError as error:
        fail(f"{run}: {error}", 1)
    except FindingsError as error:
        fail(str(error), 1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", 2)
    except (CaseError, SpecError) as error:
        fail(str(error), 2)
    try:
        out.write_text(page, encoding="utf-8")
        if excerpt is not None:
            findings.write_excerpt(judged, excerpt)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", 2)
    typer.echo(f"{len(told['findings'])} findings written to {out}")
