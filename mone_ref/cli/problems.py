"""Printing of what is wrong, the same in every command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mone_ref.errors import Problem, Severity

SHOWN = 20  # findings of one code that the text output lists; JSON lists all


def lines(problems: Sequence[Problem]) -> Iterator[str]:
    """One line per finding, long runs of one code cut."""
    totals = Counter((problem.severity, problem.code) for problem in problems)
    printed: Counter[tuple[Severity, str]] = Counter()
    for problem in problems:
        kind = problem.severity, problem.code
        printed[kind] += 1
        if printed[kind] <= SHOWN:
            yield line(problem)
        if printed[kind] == SHOWN < totals[kind]:
            yield f"... and {totals[kind] - SHOWN} more {problem.code} (--json lists all)"


def line(problem: Problem) -> str:
    """One finding on one line."""
    clause = f" [{problem.clause}]" if problem.clause else ""
    return (
        f"{problem.severity} {problem.code} {problem.file}: {problem.where}: "
        f"found {problem.found}, expected {problem.expected}{clause}"
    )


def gigabytes(size: int) -> str:
    """Bytes for people: ``13.84 GB``, ``512 B``."""
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= bytes_:
            return f"{size / bytes_:.2f} {unit}"
    return f"{size} B"
