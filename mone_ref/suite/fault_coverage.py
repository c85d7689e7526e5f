"""Clauses against faults: a rule that a case judges has a fault that breaks it, or a reason.

A case whose clause no planted fault breaks may judge nothing at all, and nobody would know.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mone_ref.faults import Fault
from mone_ref.suite.spec import CitesClauses, Clause, Level


def read_reasons(root: Path) -> dict[str, str]:
    """``conformance/no_fault.toml``: clause id -> why no fault can break it."""
    path = root / "conformance" / "no_fault.toml"
    reasons: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))
    return reasons


def breaking(faults: Sequence[Fault]) -> dict[str, list[str]]:
    """Clause id -> the faults that break it; equivalent ones break nothing."""
    found: dict[str, list[str]] = {}
    for fault in faults:
        for clause in fault.clauses if not fault.equivalent else ():
            found.setdefault(clause, []).append(fault.id)
    return found


def judged(clauses: Sequence[Clause], cases: Sequence[CitesClauses]) -> list[Clause]:
    """MUST clauses that a case cites."""
    cited = {name for case in cases for name in case.clauses}
    return [clause for clause in clauses if clause.level is Level.MUST and clause.id in cited]


def gate(
    clauses: Sequence[Clause],
    cases: Sequence[CitesClauses],
    faults: Sequence[Fault],
    reasons: Mapping[str, str],
) -> list[str]:
    """Everything that is loose between judged clauses, faults and reasons; empty is good."""
    return [*_loose_clauses(clauses, cases, faults, reasons), *_loose_reasons(clauses, reasons)]


def _loose_clauses(
    clauses: Sequence[Clause],
    cases: Sequence[CitesClauses],
    faults: Sequence[Fault],
    reasons: Mapping[str, str],
) -> Iterator[str]:
    """Judged clauses with neither a fault nor a reason, and clauses with both."""
    broken = breaking(faults)
    for clause in judged(clauses, cases):
        if clause.id not in broken and clause.id not in reasons:
            yield f"{clause.id}: no fault breaks it and no_fault.toml gives no reason"
    for name in reasons:
        if name in broken:
            yield f"{name}: {broken[name][0]} breaks it, but no_fault.toml excuses it"


def _loose_reasons(clauses: Sequence[Clause], reasons: Mapping[str, str]) -> Iterator[str]:
    """Reasons that are empty, or about no clause."""
    known = {clause.id for clause in clauses}
    for name, reason in reasons.items():
        if name not in known:
            yield f"no_fault.toml: {name} is no clause of SPEC.md"
        if not reason.strip():
            yield f"no_fault.toml: {name} has no reason"
