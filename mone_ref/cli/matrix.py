"""``mone-ref matrix``: planted faults against cases, and the score of the suite."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mone_ref import backends
from mone_ref.cli.failure import fail
from mone_ref.errors import show
from mone_ref.faults import FAULTS, Fault
from mone_ref.faults.plant import StaleFault
from mone_ref.suite import cases as case_files
from mone_ref.suite import data, fault_coverage, matrix_report, spec, spread
from mone_ref.suite.cases import CaseError
from mone_ref.suite.matrix import Matrix, MatrixError
from mone_ref.suite.matrix_report import Report
from mone_ref.suite.spec import SpecError


def register(parent: typer.Typer) -> None:
    """Add the ``matrix`` command."""
    parent.command("matrix")(show_matrix)


def show_matrix(
    names: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="ID", help="Only this fault; may be repeated."),
    ] = None,
    first_kill: Annotated[
        bool, typer.Option("--first-kill", help="End each fault with its first kill.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Processes; default: one for every core."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write one JSON document.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a table.")
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the faults and run nothing.")
    ] = False,
) -> None:
    """Plant every fault in the reference and ask which cases see it.

    Exits 1 when a fault survives, when one that is called equivalent is seen, when no case
    calls a step that a fault replaces, or when a case claims a fault that it does not kill.
    """
    faults = chosen(names or [])
    if list_only:
        for line in matrix_report.listing(faults, read_cases()):
            typer.echo(line)
        return
    for path in (json_file, markdown_file):
        check_place(path)
    if jobs is not None and jobs < 1:
        fail(f"--jobs {jobs}: expected a number from 1")
    report = run(faults, first_kill, min(jobs or spread.cores(), len(faults)))
    if json_file:
        text = json.dumps(matrix_report.document(report), indent=2)
        json_file.write_text(text + "\n", encoding="utf-8")
    if markdown_file:
        markdown_file.write_text(matrix_report.markdown(report), encoding="utf-8")
    raise typer.Exit(0 if report.matrix.good else 1)


def run(faults: Sequence[Fault], first_kill: bool, jobs: int) -> Report:
    """Run, print each row as it is known, then the summary."""
    began, root = time.monotonic(), data.root()
    every = read_cases()
    matrix = Matrix(faults, {}, every, first_kill, whole=len(faults) == len(FAULTS))
    found = {}
    reference = backends.find("reference")
    try:
        clauses, reasons = spec.load(root), fault_coverage.read_reasons(root)
        made = spread.rows(root, reference, faults, first_kill=first_kill, jobs=jobs)
        for fault, row in zip(faults, made, strict=True):
            found[fault.id] = row
            typer.echo(matrix_report.row_line(fault, row, matrix.layers))
    except (CaseError, MatrixError, SpecError, StaleFault, OSError, ValueError) as error:
        fail(str(error))
    report = Report(Matrix(faults, found, every, first_kill, matrix.whole), clauses, reasons)
    typer.echo("")
    for line in matrix_report.summary(report):
        typer.echo(line)
    seconds = time.monotonic() - began
    typer.echo(f"time         {seconds:.0f} s in {matrix_report.processes(jobs)}")
    return report


def chosen(names: Sequence[str]) -> list[Fault]:
    """The named faults in the order of the library, or all."""
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        fail(f"no fault {', '.join(map(show, unknown))}; `mone-ref matrix --list` lists them")
    faults = [fault for fault in FAULTS.values() if not names or fault.id in names]
    if not faults:
        fail("the library holds no fault")
    return faults


def read_cases() -> Sequence[case_files.Case]:
    """All cases."""
    try:
        return case_files.load(data.root())
    except (CaseError, OSError) as error:
        fail(str(error))


def check_place(path: Path | None) -> None:
    """A file must be one that can be written, before anything is run."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if (path.exists() and not path.is_file()) or not place.exists():
        fail(f"{path}: no place for a file")
    if not os.access(place, os.W_OK):
        fail(f"{path}: cannot be written")
