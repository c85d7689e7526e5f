"""Clause x engine: what became of every clause of SPEC.md on every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mone_ref.suite import text
from mone_ref.suite.merge import Engine, Merged
from mone_ref.suite.spec import Clause
from mone_ref.suite.verdict import Coverage

FORMAT = 1
"""Version of the JSON document (``clause_table.schema.json``)."""


class Status(StrEnum):
    """What a result meant for its run (``run.Run.status``), the gravest first."""

    FAILED = "failed"
    ADVICE = "advice"
    DIFFERS = "differs"
    DECLARED = "declared"
    UNDECIDED = "undecided"
    OK = "ok"


@dataclass(frozen=True)
class Cell:
    """One clause on one engine: its cases by the gravest status among their dtypes."""

    cases: Mapping[Status, tuple[str, ...]]

    @property
    def status(self) -> Status | None:
        """The gravest; None where no case ran."""
        return next(iter(self.cases), None)


@dataclass(frozen=True)
class Row:
    """One clause, with a cell per engine. ``not_judged`` says why it has no case."""

    clause: Clause
    cells: tuple[Cell, ...]
    not_judged: str

    @property
    def status(self) -> Status | None:
        """The gravest of its cells."""
        return gravest(cell.status for cell in self.cells if cell.status)


def gravest(found: Iterable[Status]) -> Status | None:
    """The first in the order of ``Status``; None of none."""
    order = list(Status)
    return min(found, key=order.index, default=None)


def status_of(engine: Engine, case: str) -> Status | None:
    """The gravest status of a case among its dtypes."""
    return gravest(Status(result["status"]) for result in engine.results_of(case))


def rows(merged: Merged) -> tuple[Row, ...]:
    """Every clause in the order of SPEC.md."""
    found = [
        {case.id: status_of(engine, case.id) for case in merged.cases} for engine in merged.engines
    ]
    return tuple(
        Row(clause, cells(clause, found, merged), merged.not_judged.get(clause.id, ""))
        for clause in merged.clauses
    )


def cells(
    clause: Clause, found: Iterable[Mapping[str, Status | None]], merged: Merged
) -> tuple[Cell, ...]:
    """One clause on every engine."""
    citing = [case.id for case in merged.cases if clause.id in case.clauses]
    return tuple(
        Cell(
            {
                status: tuple(case for case in citing if of_engine[case] is status)
                for status in Status
                if any(of_engine[case] is status for case in citing)
            }
        )
        for of_engine in found
    )


# -- as JSON


def document(merged: Merged) -> dict[str, Any]:
    """The table as JSON-ready data."""
    return {
        "format": FORMAT,
        "suite": dict(merged.engines[0].report.header["suite"]),
        "engines": [engine_entry(engine) for engine in merged.engines],
        "clauses": [clause_entry(row) for row in rows(merged)],
    }


def engine_entry(engine: Engine) -> dict[str, Any]:
    """Who was judged, and the verdict."""
    header, footer = engine.report.header, engine.report.footer
    told = {key: header["backend"][key] for key in ("name", "version", "device", "components")}
    return told | {
        "arguments": list(engine.arguments),
        "dtypes": list(header["dtypes"]),
        "verdict": footer["verdict"],
        "coverage": asdict(coverage(footer)) | {"sentence": str(coverage(footer))},
        "counts": dict(footer["counts"]),
    }


def clause_entry(row: Row) -> dict[str, Any]:
    """One clause, its cells in the order of the engines."""
    return {
        "id": row.clause.id,
        "level": str(row.clause.level),
        "visibility": str(row.clause.visibility),
        "title": text.first_sentence(row.clause.text),
        "not_judged": row.not_judged or None,
        "engines": [
            {
                "status": cell.status and str(cell.status),
                "cases": {str(status): list(names) for status, names in cell.cases.items()},
            }
            for cell in row.cells
        ],
    }


def coverage(footer: Mapping[str, Any]) -> Coverage:
    """The coverage that a report states."""
    counts = footer["coverage"]
    names = ("total", "judged", "in_layers", "without_case", "unreached")
    numbers = {name: counts[name] for name in names}
    return Coverage(**numbers, silent=tuple(counts.get("silent", ())))
