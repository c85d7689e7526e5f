"""The report as one HTML file: plain data for the templates, which only loop over it.

Everything that an engine wrote passes ``printable`` and Jinja's escaping on its way
into the page, whatever the template does with it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mone_ref.suite import clause_table, text
from mone_ref.suite.bars import Bar, bar, number, scale, worst
from mone_ref.suite.cases import Case
from mone_ref.suite.clause_table import Row, Status
from mone_ref.suite.merge import Engine, Merged
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.printable import printable, shortened
from mone_ref.suite.prose import Prose, prose
from mone_ref.suite.spec import Clause, Level
from mone_ref.suite.verdict import Word

TEMPLATES = Path(__file__).with_name("templates")
EVIDENCE = {"lines": 60, "width": 1000}
"""How much of one piece of evidence the page shows; the report has all of it."""
LINKS = ("https://", "http://")
"""What the page lets a reader follow; any other link of an expectation file is text."""
NAMED = {"alone": 6, "beside others": 3}
"""Broken clauses that the head of the page names for an engine, and cases for each of them."""


@dataclass(frozen=True)
class Look:
    """How a status or a verdict appears: never by its colour alone."""

    name: str
    symbol: str
    word: str


LOOKS = {
    Status.FAILED: Look("failed", "✗", "failed"),
    Status.ADVICE: Look("advice", "!", "advice"),
    Status.DIFFERS: Look("differs", "≠", "base differs"),
    Status.DECLARED: Look("declared", "◆", "declared"),
    Status.UNDECIDED: Look("undecided", "○", "not judged"),
    Status.OK: Look("ok", "✓", "ok"),
}
VERDICTS = {
    Word.CONFORMANT: Look("ok", "✓", "CONFORMANT"),
    Word.ADVICE: Look("ok", "✓", "CONFORMANT WITH ADVICE"),
    Word.INCOMPLETE: Look("advice", "○", "INCOMPLETE"),
    Word.NOT_CONFORMANT: Look("failed", "✗", "NOT CONFORMANT"),
    None: Look("undecided", "○", "PARTIAL RUN: no verdict"),
}


@dataclass(frozen=True)
class Group:
    """Cases of one weight, under one heading."""

    name: str
    title: str
    meaning: str
    cases: tuple[CaseEntry, ...]


GROUPS = {
    "must": ("Not ok: MUST", "These decide the verdict."),
    "advice": ("Not ok: SHOULD and MAY", "Reported apart; these never decide the verdict."),
    "stale": ("Better than declared", "The expectation file is out of date."),
    "open": ("Not judged", "Undecided on an engine, and not ok on none."),
    "ok": ("Ok", "Ok on every engine."),
}


# -- what the page is made of


@dataclass(frozen=True)
class Broken:
    """A clause that cases found broken, for the head of the page."""

    clause: Clause
    title: Prose
    cases: tuple[tuple[str, Look], ...]
    more: int


@dataclass(frozen=True)
class EngineEntry:
    """One engine's verdict, and what it rests on."""

    title: str
    setting: str
    look: Look
    reason: str
    coverage: str
    counts: tuple[tuple[Look, int], ...]
    results: int
    broken: tuple[Broken, ...]
    more_broken: int
    advice: int
    facts: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class ResultEntry:
    """One case at one dtype on one engine."""

    dtype: str
    look: Look
    outcome: str
    found: str
    bar: Bar | None
    problem: str
    diagnosis: tuple[str, ...]


@dataclass(frozen=True)
class Declaration:
    """Why a deviation is known. ``link`` is empty unless a browser may follow it."""

    dtypes: str
    reason: str
    link: str
    told: str


@dataclass(frozen=True)
class Part:
    """One case on one engine. What several dtypes share is told once."""

    engine: str
    look: Look
    results: tuple[ResultEntry, ...]
    declared: tuple[Declaration, ...]
    evidence: tuple[tuple[str, str], ...]
    reproduce: str


@dataclass(frozen=True)
class CaseEntry:
    """One case on every engine."""

    id: str
    group: str
    look: Look
    statement: Prose
    why: Prose
    clauses: tuple[tuple[Clause, Prose], ...]
    expected: str
    worst: Bar | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class CellEntry:
    """One clause on one engine: counts, and the cases behind them."""

    engine: str
    counts: tuple[tuple[Look, int], ...]
    cases: tuple[tuple[str, Look], ...]


@dataclass(frozen=True)
class RowEntry:
    """One clause on every engine."""

    clause: Clause
    title: Prose
    rest: tuple[Prose, ...]
    rationale: Prose
    not_judged: str
    wrong: bool
    cells: tuple[CellEntry, ...]


# -- rendering


def render(merged: Merged) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = case_groups(merged)
    return environment.get_template("page.html").render(
        title=title(merged),
        engines=[engine_entry(engine, merged) for engine in merged.engines],
        clause_groups=clause_groups(merged),
        groups=groups,
        outcomes=outcomes(merged),
        scale=scale(),
    )


def shown(value: object) -> object:
    """Applied to every value that enters the page; markup of our own templates stays."""
    return printable(value) if type(value) is str else value


def title(merged: Merged) -> str:
    """For the browser's tab: who, and the verdict of a single one."""
    names = ", ".join(engine.title for engine in merged.engines)
    if len(merged.engines) > 1:
        return f"{names}: expert substitution (MoNE)"
    return f"{verdict_look(merged.engines[0]).word}: {names}, expert substitution (MoNE)"


def outcomes(merged: Merged) -> list[tuple[str, str]]:
    """Outcomes that occur, each with its sentence."""
    seen = {result["outcome"] for engine in merged.engines for result in engine.report.results}
    return [(str(outcome), outcome.doc) for outcome in Outcome if outcome in seen]


# -- the head: one entry per engine


def engine_entry(engine: Engine, merged: Merged) -> EngineEntry:
    """Verdict, reason and identity of one engine."""
    failing = failing_cases(engine, merged)
    decisive = [case for case, level in failing.items() if level is Level.MUST]
    most = NAMED["beside others" if len(merged.engines) > 1 else "alone"]
    broken = broken_clauses(engine, decisive or list(failing), merged, most)
    counted = Counter(Status(result["status"]) for result in engine.report.results)
    coverage = str(clause_table.coverage(engine.report.footer))
    return EngineEntry(
        title=engine.title,
        setting=engine.setting,
        look=verdict_look(engine),
        reason=reason(engine, decisive, merged),
        coverage=f"{coverage[0].upper()}{coverage[1:]}.",
        counts=tuple((LOOKS[status], counted[status]) for status in Status if counted[status]),
        results=counted.total(),
        broken=tuple(broken[:most]),
        more_broken=len(broken[most:]),
        advice=len(failing) - len(decisive),
        facts=tuple(facts(engine)),
    )


def verdict_look(engine: Engine) -> Look:
    """The word, as it appears."""
    word = engine.report.footer["verdict"]
    return VERDICTS[word and Word(word)]


def reason(engine: Engine, decisive: Sequence[str], merged: Merged) -> str:
    """What the word rests on."""
    footer, total = engine.report.footer, len(merged.cases)
    if footer["verdict"] is None:
        return f"{len(decisive)} of the {total} cases that ran are not ok and cite MUST clauses."
    word = Word(footer["verdict"])
    if word is Word.NOT_CONFORMANT:
        statuses = {clause_table.status_of(engine, case) for case in decisive}
        known = " Each is declared, which does not change the verdict."
        told = f"{len(decisive)} of {total} cases break MUST clauses."
        return told + known * (statuses == {Status.DECLARED})
    return {
        Word.INCOMPLETE: f"Nothing was judged of {', '.join(footer['missing_groups']) or 'it'}.",
        Word.ADVICE: "Every MUST case that was judged is ok; SHOULD cases are not.",
        Word.CONFORMANT: "Every case that was judged is ok.",
    }[word]


def failing_cases(engine: Engine, merged: Merged) -> dict[str, Level]:
    """Cases that decided against the engine, declared or not, with their level: MUST first."""
    failed = [result for result in engine.report.results if Outcome(result["outcome"]).failed]
    levels = {result["case"]: Level(result["level"]) for result in failed}
    rank = list(Level)
    ran = [case.id for case in merged.cases if case.id in levels]
    return {case: levels[case] for case in sorted(ran, key=lambda case: rank.index(levels[case]))}


def broken_clauses(
    engine: Engine, failing: Sequence[str], merged: Merged, most: int
) -> list[Broken]:
    """Clauses that failing cases cite, those with most cases first; ``most`` cases of each."""
    cited = {case.id: case.clauses for case in merged.cases}
    count = Counter(name for case in failing for name in cited[case])
    found = []
    for clause in sorted(merged.clauses, key=lambda clause: -count[clause.id]):
        cases = [case for case in failing if clause.id in cited[case]]
        if cases:
            named = tuple(
                (case, LOOKS[clause_table.status_of(engine, case) or Status.FAILED])
                for case in cases[:most]
            )
            heading = prose(text.first_sentence(clause.text))
            found.append(Broken(clause, heading, named, len(cases[most:])))
    return found


def facts(engine: Engine) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Identity of the engine, the suite and the run."""
    header, footer = engine.report.header, engine.report.footer
    backend, suite = header["backend"], header["suite"]
    yield "device", (backend["device"],)
    yield "dtypes", tuple(computed(header))
    yield (
        "components",
        tuple(f"{name} {version}" for name, version in backend["components"].items()),
    )
    yield "knows the requests", tuple(backend["features"])
    yield "offers ranks", tuple(backend.get("parallel", ()))
    yield "work-arounds", tuple(backend["workarounds"])
    if not header["error_map_reliable"]:
        yield "error map", ("declares itself unreliable: codes of refusals may be wrong",)
    yield "outcomes", tuple(f"{count} {name}" for name, count in footer["counts"].items())
    yield "suite", (f"version {suite['version']}", f"sha256 {suite['sha256']}")
    yield "source document", (f"sha256 {suite['source_sha256']}",)
    yield "command", (shlex.join(["pytest", *header["command"]]),)
    yield "time", (f"{footer['seconds']:.0f} s",)


def computed(header: Mapping[str, Any]) -> Iterator[str]:
    """Each dtype that was asked for, with the type in which the engine computes it."""
    for dtype in header["dtypes"]:
        compute = header["backend"]["compute"].get(dtype, dtype)
        yield dtype if compute == dtype else f"{dtype}, computed in {compute}"


# -- clauses


def clause_groups(merged: Merged) -> list[tuple[str, list[RowEntry]]]:
    """Rows of the table by the letters of their ids."""
    found: dict[str, list[RowEntry]] = {}
    for row in clause_table.rows(merged):
        found.setdefault(row.clause.group, []).append(row_entry(row, merged))
    return list(found.items())


def row_entry(row: Row, merged: Merged) -> RowEntry:
    """One clause."""
    heading = text.first_sentence(row.clause.text)
    rest = row.clause.text.removeprefix(heading).strip()
    cells = tuple(
        CellEntry(
            engine=engine.title,
            counts=tuple((LOOKS[status], len(names)) for status, names in cell.cases.items()),
            cases=tuple((name, LOOKS[s]) for s, names in cell.cases.items() for name in names),
        )
        for engine, cell in zip(merged.engines, row.cells, strict=True)
    )
    return RowEntry(
        row.clause,
        prose(heading),
        tuple(prose(paragraph) for paragraph in rest.split("\n\n") if paragraph),
        prose(row.clause.rationale),
        row.not_judged,
        row.status not in (None, Status.OK, Status.UNDECIDED),
        cells,
    )


# -- cases


def case_groups(merged: Merged) -> list[Group]:
    """All cases, the gravest group first, the gravest case first in each."""
    clauses = {clause.id: clause for clause in merged.clauses}
    order = list(LOOKS.values())
    entries = [case_entry(case, merged, clauses) for case in merged.cases]
    entries.sort(key=lambda entry: order.index(entry.look))
    return [
        Group(name, *told, tuple(entry for entry in entries if entry.group == name))
        for name, told in GROUPS.items()
    ]


def case_entry(case: Case, merged: Merged, clauses: Mapping[str, Clause]) -> CaseEntry:
    """One case."""
    results = [result for engine in merged.engines for result in engine.results_of(case.id)]
    gravest = clause_table.gravest(Status(result["status"]) for result in results)
    return CaseEntry(
        id=case.id,
        group=group_of(results),
        look=LOOKS[gravest or Status.UNDECIDED],
        statement=prose(case.statement),
        why=prose(case.why),
        clauses=tuple(
            (clauses[name], prose(text.first_sentence(clauses[name].text))) for name in case.clauses
        ),
        expected="; ".join(dict.fromkeys(result["expected"] for result in results)),
        worst=worst(result["numbers"] for result in results),
        parts=tuple(part(engine, case.id) for engine in merged.engines),
    )


def group_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Under which heading a case stands: by the gravest thing that any engine did."""
    levels = {result["level"] for result in results if Outcome(result["outcome"]).failed}
    if levels:
        return "must" if Level.MUST in levels else "advice"
    if any(result["status"] == Status.FAILED for result in results):
        return "stale"
    return "ok" if all(result["outcome"] == Outcome.OK for result in results) else "open"


def part(engine: Engine, case: str) -> Part:
    """One case on one engine."""
    results = engine.results_of(case)
    wrong = [result for result in results if result["status"] not in (Status.OK, Status.UNDECIDED)]
    status = clause_table.status_of(engine, case) or Status.UNDECIDED
    return Part(
        engine=engine.title,
        look=LOOKS[status],
        results=tuple(result_entry(result, engine) for result in results),
        declared=tuple(declarations(results)),
        evidence=tuple(evidence(wrong)),
        reproduce=engine.reproduce(case, [result["dtype"] for result in wrong]) if wrong else "",
    )


def result_entry(result: Mapping[str, Any], engine: Engine) -> ResultEntry:
    """One case at one dtype."""
    outcome = Outcome(result["outcome"])
    problems = engine.report.footer["expectation_problems"]
    return ResultEntry(
        dtype=result["dtype"],
        look=LOOKS[Status(result["status"])],
        outcome=str(outcome),
        found=result["found"],
        bar=bar(result["numbers"]) if result["numbers"] else None,
        problem=problems.get(f"{result['case']} {result['dtype']}", ""),
        diagnosis=tuple(diagnosis(result.get("diagnosis") or {})),
    )


def declarations(results: Sequence[Mapping[str, Any]]) -> Iterator[Declaration]:
    """Each distinct reason of the expectation file, with the dtypes that it is of."""
    told: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if entry := result.get("declared"):
            told.setdefault((entry["reason"], entry["link"]), []).append(result["dtype"])
    for (reason, link), dtypes in told.items():
        followed = link if link.startswith(LINKS) else ""
        yield Declaration(", ".join(dtypes), reason, followed, link)


def evidence(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each distinct evidence, with the dtypes that it is of."""
    told: dict[str, list[str]] = {}
    for result in results:
        if result["evidence"].strip():
            told.setdefault(result["evidence"], []).append(result["dtype"])
    for whole, dtypes in told.items():
        yield ", ".join(dtypes), shortened(printable(whole).strip("\n"), **EVIDENCE)


def diagnosis(found: Mapping[str, Any]) -> Iterator[str]:
    """What may explain a failure, a sentence each."""
    if not found:
        return
    yield found["sentence"]
    if found["faults"]:
        yield f"known fault: {', '.join(found['faults'])}; breaks {', '.join(found['clauses'])}"
    if found["distance"] is not None:
        yield f"distance to the answer found: {number(found['distance'])} x the budget"
    if found["runner_up"]:
        other = found["runner_up"]
        told = f"next nearest: {', '.join(other['faults'])}"
        far = other["distance"]
        yield told if far is None else f"{told}, at {number(far)} x the budget"
    if found["place"]:
        place = {name: at for name, at in found["place"].items() if at is not None}
        yield "first seen at " + ", ".join(f"{name} {at}" for name, at in place.items())
