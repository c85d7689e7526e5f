"""Reports of engines that never ran: every case of the suite, ok unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mone_ref.backend import BackendInfo
from mone_ref.suite import cases, judge, report, spec, verdict
from mone_ref.suite.compare import Numbers
from mone_ref.suite.outcomes import Outcome, Result

ROOT = Path(__file__).resolve().parent.parent
CASES = cases.load(ROOT)
CLAUSES = spec.load(ROOT)
LEVELS = verdict.levels(CASES, CLAUSES)
FINE = Numbers(2, 0.002, 0.002, 1.0, 0.004, 0.005, 0.8, 1.0, 1.0)
FAR = Numbers(5, 0.12, 0.003, 40.0, 0.5, 0.01, 50.0, 1.25, 0.875)

BROKEN_MUST = "outputs/olmoe-approx"
"""An output case that cites MUST clauses."""
BROKEN_SHOULD = "explicit/constant-nan"
"""A refusal case that cites a SHOULD clause, LOAD-8."""


def write(
    path: Path,
    name: str = "engine",
    version: str = "1.0",
    command: tuple[str, ...] = ("--backend=engine",),
    changes: Mapping[str, Mapping[str, Any]] = {},
    only: frozenset[str] | None = None,
) -> Path:
    """A report of one engine at float32. ``changes`` are laid over result lines, by case."""
    chosen = [case for case in CASES if only is None or case.id in only]
    info = BackendInfo(
        name,
        version,
        "cpu",
        {"float32": "float32"},
        components={"torch": "2.13"},
        parallel=frozenset({"tensor_parallel"}),
    )
    results = [result(case, changes.get(case.id, {})) for case in chosen]
    writer = report.Writer(path)
    writer.write(report.header(ROOT, info, ["float32"], command, reliable=True))
    for case, found in zip(chosen, results, strict=True):
        writer.write(report.start(case.id, "float32"))
        line = report.result(case, LEVELS[case.id], found, status(case.id, found))
        writer.write(line | extra(changes.get(case.id, {})))
    concluded = verdict.conclude(results, CASES, CLAUSES, partial=only is not None)
    writer.write(report.footer(concluded, results, {}, 12.5))
    writer.close()
    return path


def result(case: cases.Case, change: Mapping[str, Any]) -> Result:
    """One result; whatever ``Result`` holds may be changed."""
    fields = {key: value for key, value in change.items() if key in Result.__dataclass_fields__}
    numbers = FINE if case.kind is cases.Kind.OUTPUT else None
    right = {"outcome": Outcome.OK, "found": "as expected", "numbers": numbers}
    return Result(case.id, "float32", **{"expected": judge.expectation(case), **right, **fields})


def status(case: str, found: Result) -> str:
    """As a run without an expectation file says."""
    if found.outcome.failed:
        return {"MUST": "failed", "SHOULD": "advice", "MAY": "differs"}[LEVELS[case]]
    return "ok" if found.outcome is Outcome.OK else "undecided"


def extra(change: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the line that are no fields of a result."""
    own = ("status", "diagnosis", "declared")
    return {key: value for key, value in change.items() if key in own}
