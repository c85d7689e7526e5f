"""``mone-ref validate``: every rule a checkpoint must keep, without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mone_ref import validate
from mone_ref.checkpoint.dtypes import PARAMETER_DTYPES
from mone_ref.checkpoint.text import count, plain
from mone_ref.cli import problems
from mone_ref.errors import Problem, Severity, show
from mone_ref.validate import Report


def register(parent: typer.Typer) -> None:
    """Add the ``validate`` command."""
    parent.command("validate")(validate_directory)


def known_dtype(dtype: str | None) -> str | None:
    """A dtype in which parameters can be held, as an option. Raises ``typer.BadParameter``."""
    if dtype not in (None, *PARAMETER_DTYPES):
        expected = ", ".join(PARAMETER_DTYPES)
        raise typer.BadParameter(f"found {show(dtype)}, expected one of {expected}")
    return dtype


def validate_directory(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory.")],
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            callback=known_dtype,
            help="Dtype in which parameters will be held; constants must stay finite in it.",
        ),
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Read every weight and report NaN and infinity.")
    ] = False,
) -> None:
    """Check a checkpoint: config, files, and every tensor against the list.

    Exits 0 when it is fine, 1 on errors, 2 when DIR cannot be read as a directory.
    """
    report = validate.check(directory, dtype, scan=scan)
    if strict:
        report = replace(report, problems=tuple(_hardened(report.problems)))
    status = exit_status(report)
    if as_json:
        typer.echo(json.dumps(document(directory, report, status), indent=2))
    else:
        for line in lines(directory, report):
            typer.echo(line)
    raise typer.Exit(status)


def exit_status(report: Report) -> int:
    """0 without errors, 1 with errors, 2 where there is no directory to check."""
    if report.checkpoint is None:
        return 2
    return 1 if report.errors else 0


def _hardened(problems: Sequence[Problem]) -> Iterator[Problem]:
    for problem in problems:
        is_warning = problem.severity is Severity.WARNING
        yield replace(problem, severity=Severity.ERROR) if is_warning else problem


def lines(directory: Path, report: Report) -> Iterator[str]:
    """The report as text: one line per finding, long runs of one code cut, then a summary."""
    yield from problems.lines(report.problems)
    yield f"{plain(str(directory))}: {_counted(report)}"
    missed = "not checked: names, shapes and types of the model's tensors, nor experts"
    if report.config:
        missed = "not computed by the reference"
    for limit in report.not_modelled:
        yield f"{missed}: {limit.where}: found {limit.found}, expected {limit.expected}"


def _counted(report: Report) -> str:
    parts = [
        count(len(report.errors), "error"),
        count(len(report.warnings), "warning"),
        count(len(report.notes), "note"),
    ]
    if report.checkpoint is not None:
        tensors, files = len(report.checkpoint.tensors), len(report.checkpoint.files)
        parts.append(f"{count(tensors, 'tensor')} in {count(files, 'file')}")
    if report.config is not None:
        layers = report.config.substitution.layers
        experts = sum(len(layer.listed) for layer in layers.values())
        parts.append(f"{count(experts, 'substituted expert')} in {count(len(layers), 'layer')}")
    return ", ".join(parts)


def document(directory: Path, report: Report, status: int) -> dict[str, Any]:
    """The report as JSON-ready data; sizes are null where they could not be read."""
    checkpoint, config = report.checkpoint, report.config
    return {
        "path": str(directory),
        "exit_code": status,
        "counts": {
            "error": len(report.errors),
            "warning": len(report.warnings),
            "note": len(report.notes),
        },
        "files": list(checkpoint.files) if checkpoint else None,
        "tensors": len(checkpoint.tensors) if checkpoint else None,
        "tensor_bytes": sum(t.size for t in checkpoint.tensors.values()) if checkpoint else None,
        "form": config.substitution.form if config else None,
        "substituted": _substituted(report),
        "not_modelled": [problem.as_dict() for problem in report.not_modelled],
        "findings": [problem.as_dict() for problem in report.problems],
    }


def _substituted(report: Report) -> dict[str, list[int]] | None:
    """Layer -> substituted ids, ascending."""
    if report.config is None:
        return None
    layers = report.config.substitution.layers
    return {str(index): list(layer.substituted) for index, layer in layers.items()}
