"""The kill matrix for people, as JSON and as Markdown. No clock: two runs write the same file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mone_ref.faults import Fault
from mone_ref.suite import fault_coverage
from mone_ref.suite.cases import Case
from mone_ref.suite.matrix import Kill, Matrix, Row, Score
from mone_ref.suite.spec import Clause

FORMAT = 1


@dataclass(frozen=True)
class Report:
    """A matrix beside the clauses of SPEC.md and the reasons of ``no_fault.toml``."""

    matrix: Matrix
    clauses: Sequence[Clause]
    reasons: Mapping[str, str]

    @property
    def judged(self) -> list[Clause]:
        """MUST clauses that a case cites."""
        return fault_coverage.judged(self.clauses, self.matrix.cases)

    @property
    def unbroken(self) -> list[Clause]:
        """Judged clauses that no fault breaks."""
        broken = fault_coverage.breaking(self.matrix.faults)
        return [clause for clause in self.judged if clause.id not in broken]

    def held_by(self, clause: str) -> list[str]:
        """Cases of a clause that kill a fault which breaks it."""
        breaking = [fault for fault in self.matrix.faults if clause in fault.clauses]
        killers = {kill.case for fault in breaking for kill in self.matrix.kills(fault)}
        return [c.id for c in self.matrix.cases if clause in c.clauses and c.id in killers]


# -- lines


def row_line(fault: Fault, row: Row, layers: frozenset[str]) -> str:
    """One fault on one line: how many cases killed it, and the first of them."""
    head = f"{fault.id:40} {fault.stage:7}"
    if not row.kills:
        word = "equivalent" if fault.equivalent else "SURVIVED"
        return f"{head}{word:>10}  of {len(row.asked)} cases none saw it"
    first = row.kills[0]
    only = "  (layer cases only)" if all(kill.case in layers for kill in row.kills) else ""
    return f"{head}{cases(len(row.kills)):>10}  {first.case}: {first.outcome}{only}"


def cases(count: int) -> str:
    """``1 case``, ``2 cases``."""
    return f"{count} case" if count == 1 else f"{count} cases"


def processes(count: int) -> str:
    """``1 process``, ``2 processes``."""
    return f"{count} process" if count == 1 else f"{count} processes"


def summary(report: Report) -> Iterator[str]:
    """The score and everything that is wrong."""
    matrix = report.matrix
    every, without = matrix.score(), matrix.score(layers=False)
    kind = "all faults" if matrix.whole else "some faults"
    kind += ", each until its first kill" if matrix.first_kill else ""
    yield f"score        {every} killed; {without} without layer access ({kind})"
    for group in matrix.groups:
        parts = matrix.score(group=group), matrix.score(group=group, layers=False)
        yield f"  {group:13}{parts[0]}; {parts[1]}"
    yield from troubles(matrix)
    for fault in matrix.faults:
        if fault.equivalent and not matrix.kills(fault):
            yield f"equivalent   {fault.id}: {fault.equivalent}"
    if matrix.whole and not matrix.first_kill:
        yield from coverage(report)


def troubles(matrix: Matrix) -> Iterator[str]:
    """What makes the matrix red, and breakdowns, which may."""
    for fault in matrix.survivors:
        place = ", ".join((fault.stage, *fault.clauses))
        yield f"SURVIVOR     {fault.id} ({place}): {fault.sentence}"
    for fault in matrix.visible_equivalents:
        kill = matrix.kills(fault)[0]
        yield f"NOT EQUAL    {fault.id}: {kill.case} sees it, so its reason is false"
    for fault in matrix.unreached:
        steps = ", ".join(matrix.rows[fault.id].unreached)
        yield f"NOT REACHED  {fault.id}: no case calls {steps}"
    for case, name in matrix.false_claims:
        yield f"FALSE CLAIM  {case} does not kill {name}"
    for fault in matrix.broken:
        outcomes = sorted({str(kill.outcome) for kill in matrix.kills(fault)})
        yield f"breaks down  {fault.id}: killed as {', '.join(outcomes)} only"


def coverage(report: Report) -> Iterator[str]:
    """Clauses without a fault, clauses that no case of theirs holds, cases that kill nothing."""
    unbroken = {clause.id for clause in report.unbroken}
    loose = [c.id for c in report.judged if c.id not in unbroken and not report.held_by(c.id)]
    count = len(report.judged)
    yield f"clauses      {count - len(unbroken)} of {count} judged MUST clauses have a fault"
    for clause in report.unbroken:
        yield f"no fault     {clause.id}: {report.reasons.get(clause.id, 'NO REASON GIVEN')}"
    if loose:
        yield f"not held     {', '.join(loose)}: broken by faults that only other cases kill"
    if idle := [case.id for case in report.matrix.idle]:
        yield f"idle         {cases(len(idle))} that kill nothing, no controls or twins:"
        yield from (f"             {name}" for name in idle)


def listing(faults: Sequence[Fault], every: Sequence[Case]) -> Iterator[str]:
    """The library without running it."""
    for fault in faults:
        yield f"{fault.id}  {fault.group} · {fault.stage} · {', '.join(fault.dtypes)}"
        yield f"    {fault.sentence}"
        yield f"    breaks {', '.join(fault.clauses)}"
        if fault.equivalent:
            yield f"    equivalent: {fault.equivalent}"
        if claims := [case.id for case in every if fault.id in case.kills]:
            yield f"    claimed by {', '.join(claims)}"


# -- documents


def document(report: Report) -> dict[str, Any]:
    """The matrix as JSON-ready data, see ``matrix.schema.json``."""
    matrix = report.matrix
    complete = matrix.whole and not matrix.first_kill
    return {
        "format": FORMAT,
        "whole": matrix.whole,
        "first_kill": matrix.first_kill,
        "good": matrix.good,
        "score": {
            "with_layers": as_dict(matrix.score()),
            "without_layers": as_dict(matrix.score(layers=False)),
        },
        "groups": {
            group: {
                "with_layers": as_dict(matrix.score(group=group)),
                "without_layers": as_dict(matrix.score(group=group, layers=False)),
            }
            for group in matrix.groups
        },
        "survivors": ids(matrix.survivors),
        "visible_equivalents": ids(matrix.visible_equivalents),
        "unreached": ids(matrix.unreached),
        "broken": ids(matrix.broken),
        "false_claims": [list(claim) for claim in matrix.false_claims],
        "idle_cases": [case.id for case in matrix.idle] if complete else None,
        "clauses": {clause.id: clause_entry(report, clause) for clause in report.judged}
        if complete
        else None,
        "faults": [fault_entry(fault, matrix.rows[fault.id]) for fault in matrix.faults],
    }


def as_dict(score: Score) -> dict[str, int]:
    """A score, never without its denominator."""
    return {"killed": score.killed, "of": score.of}


def ids(faults: Sequence[Fault]) -> list[str]:
    """Names of faults."""
    return [fault.id for fault in faults]


def clause_entry(report: Report, clause: Clause) -> dict[str, Any]:
    """A clause with its faults, and the cases that hold it."""
    return {
        "faults": fault_coverage.breaking(report.matrix.faults).get(clause.id, []),
        "held_by": report.held_by(clause.id),
        "no_fault": report.reasons.get(clause.id),
    }


def fault_entry(fault: Fault, row: Row) -> dict[str, Any]:
    """A fault and its row."""
    return {
        "id": fault.id,
        "sentence": fault.sentence,
        "group": fault.group,
        "stage": fault.stage,
        "clauses": list(fault.clauses),
        "dtypes": list(fault.dtypes),
        "looks_like": fault.looks_like,
        "equivalent": fault.equivalent,
        "asked": len(row.asked),
        "kills": [kill_entry(kill) for kill in row.kills],
        "unreached": list(row.unreached),
    }


def kill_entry(kill: Kill) -> dict[str, str]:
    """One kill."""
    return {"case": kill.case, "dtype": kill.dtype, "outcome": str(kill.outcome)}


def markdown(report: Report) -> str:
    """The score and one table row per fault, for a CI job summary."""
    matrix = report.matrix
    every, without = matrix.score(), matrix.score(layers=False)
    lines = [
        f"**{every}** faults killed, **{without}** without layer access",
        "",
        "| fault | what a wrong engine does | clauses | killed by |",
        "|---|---|---|---|",
    ]
    for fault in matrix.faults:
        kills = matrix.kills(fault)
        told = f"{cases(len(kills))}, first `{kills[0].case}`" if kills else "**none**"
        if fault.equivalent and not kills:
            told = f"none can: {fault.equivalent}"
        clauses = ", ".join(fault.clauses)
        lines.append(f"| `{fault.id}` | {fault.sentence} | {clauses} | {told} |")
    return "\n".join([*lines, ""])
