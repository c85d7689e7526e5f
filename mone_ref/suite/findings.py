"""A page for the maintainers of one engine: its failures by cause, from a report and notes.

A report says what was expected and found, SPEC.md says what the clauses are; the notes
(``findings.schema.json``) add what no machine knows: which failures have one cause, why they
matter, how they might be mended, and what a short script about them prints.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jsonschema

from mone_ref import strict_yaml
from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import show
from mone_ref.strict_yaml import StrictYamlError
from mone_ref.suite import clause_table, text
from mone_ref.suite.cases import Case
from mone_ref.suite.merge import chosen_by
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.printable import printable
from mone_ref.suite.report import Report, Writer, start
from mone_ref.suite.spec import Clause, Level

SHARED = "common.py"
"""What the scripts of all findings import."""


class FindingsError(ValueError):
    """Notes that are none, or that do not fit the report; says which entry."""


@dataclass(frozen=True)
class Finding:
    """One cause, and everything that is said of it. ``results`` are lines of the report."""

    number: int
    id: str
    title: str
    why: str
    fix: str
    script: str
    prints: str
    clauses: tuple[Clause, ...]
    results: tuple[Mapping[str, Any], ...]
    statements: Mapping[str, str]


@dataclass(frozen=True)
class Section:
    """Findings of one weight."""

    title: str
    meaning: str
    none: str
    findings: tuple[Finding, ...]


SECTIONS = {
    "document": (
        "Against the document",
        "A MUST clause that restates a sentence of the source document is broken.",
        "None: wherever a case judges a sentence of the document, the engine does what it says.",
    ),
    "ruling": (
        "MUST by a ruling of SPEC.md",
        "The source document does not speak of these; SPEC.md decides them, with a rationale. "
        "They decide the verdict.",
        "None.",
    ),
    "advice": (
        "Advice",
        "SHOULD clauses: the source document is silent, or leaves room. None of them decides the "
        "verdict.",
        "None.",
    ),
    "base": (
        "Beside expert substitution",
        "The base model differs without any substitution. Nothing of this is held against it.",
        "None.",
    ),
}


# -- the notes


def read(path: Path) -> dict[str, Any]:
    """Notes that keep the schema. Raises ``FindingsError``, ``OSError`` where there is no file."""
    try:
        notes: Any = strict_yaml.parse(read_regular(path))
    except StrictYamlError as error:
        raise FindingsError(f"{path}: {error}") from error
    schema = json.loads(Path(__file__).with_suffix(".schema.json").read_text(encoding="utf-8"))
    broken = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(notes)
    )
    if broken is not None:
        raise FindingsError(f"{path}: {show(f'{broken.json_path}: {broken.message}', 300)}")
    checked: dict[str, Any] = notes
    return checked


def scripts(notes: Path) -> Path:
    """The folder of scripts of a file of notes: ``vllm-0.33`` of ``vllm-0.33.yaml``."""
    return notes.with_suffix("")


def misfits(notes: Mapping[str, Any], report: Report, cases: Sequence[Case]) -> list[str]:
    """Where notes and report do not speak of the same failures; empty is good."""
    return [*_entry_misfits(notes, report, cases), *_unexplained(notes, report)]


def _entry_misfits(
    notes: Mapping[str, Any], report: Report, cases: Sequence[Case]
) -> Iterator[str]:
    """Entries about another engine, unknown cases, cases of two findings, cases that are ok."""
    backend = report.header["backend"]
    judged = f"{backend['name']} {backend['version']}"
    if notes["engine"] != judged:
        yield f"the notes are about {notes['engine']}, the report is about {judged}"
    known, wrong = {case.id for case in cases}, {line["case"] for line in wrong_of(report)}
    seen: dict[str, str] = {}
    for entry in notes["findings"]:
        for case in entry["cases"]:
            if case in seen:
                yield f"{case}: stands in {seen[case]} and in {entry['id']}"
            elif case not in known:
                yield f"{case} of {entry['id']}: no such case"
            elif case not in wrong:
                yield f"{case} of {entry['id']}: the report finds nothing wrong with it"
            seen[case] = entry["id"]


def _unexplained(notes: Mapping[str, Any], report: Report) -> Iterator[str]:
    """Failures that no finding names."""
    named = {case for entry in notes["findings"] for case in entry["cases"]}
    for case in dict.fromkeys(line["case"] for line in wrong_of(report)):
        if case not in named:
            yield f"{case}: not ok, and no finding names it"


def wrong_of(report: Report) -> list[Mapping[str, Any]]:
    """Results that are not as they should be: failed, unjudged because the base model differs, or
    declared."""
    return [
        line
        for line in report.results
        if Outcome(line["outcome"]).failed
        or line["outcome"] == Outcome.NOT_JUDGED
        or line["status"] == "declared"
    ]


def not_run(report: Report) -> dict[str, list[str]]:
    """Cases that do not apply to this engine or run, by the reason that the report gives."""
    found: dict[str, list[str]] = {}
    for line in lines_not_run(report):
        cases = found.setdefault(line["found"], [])
        if line["case"] not in cases:
            cases.append(line["case"])
    return found


def lines_not_run(report: Report) -> list[Mapping[str, Any]]:
    """Results that say nothing: undecided ones, but those of ``wrong_of``."""
    wrong = wrong_of(report)
    return [
        line for line in report.results if not Outcome(line["outcome"]).judged and line not in wrong
    ]


# -- the page


def render(
    notes: Mapping[str, Any],
    folder: Path,
    report: Report,
    cases: Sequence[Case],
    clauses: Sequence[Clause],
) -> str:
    """The page as Markdown. Raises ``FindingsError`` when notes and report do not fit, or a script
    is no text, ``OSError`` when one is absent."""
    if flaws := misfits(notes, report, cases):
        raise FindingsError(flaws[0])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = text.cell
    return environment.get_template("findings.md").render(
        notes=notes,
        header=report.header,
        footer=report.footer,
        command=shlex.join(["mone-ref", "conform", *chosen_by(report.header["command"])]),
        coverage=str(clause_table.coverage(report.footer)),
        folder=folder.name,
        shared=source(folder / SHARED),
        sections=sections(notes, folder, report, cases, clauses),
        not_run=not_run(report),
    )


def source(script: Path) -> str:
    """The text of a script. Raises ``FindingsError``, ``OSError``."""
    try:
        return read_regular(script).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FindingsError(f"{script}: {error}") from error


def sections(
    notes: Mapping[str, Any],
    folder: Path,
    report: Report,
    cases: Sequence[Case],
    clauses: Sequence[Clause],
) -> list[Section]:
    """All findings under the heading of their weight, numbered in the order of the page."""
    placed: dict[str, list[Mapping[str, Any]]] = {name: [] for name in SECTIONS}
    for entry in notes["findings"]:
        placed[weight(lines_of(entry, report), clauses)].append(entry)
    found, number = [], 0
    for name, told in SECTIONS.items():
        made = [
            _finding(number + index, entry, folder, report, cases, clauses)
            for index, entry in enumerate(placed[name], 1)
        ]
        number += len(made)
        found.append(Section(*told, tuple(made)))
    return found


def weight(lines: Sequence[Mapping[str, Any]], clauses: Sequence[Clause]) -> str:
    """The section of a finding: by the gravest of its failures, and where its clause is from."""
    failed = [line for line in lines if Outcome(line["outcome"]).failed]
    decisive = [line for line in failed if line["level"] == Level.MUST]
    if not decisive:
        advises = any(line["level"] == Level.SHOULD for line in failed)
        return "advice" if advises else "base"
    cited = {name for line in decisive for name in line["clauses"]}
    stated = any(
        clause.id in cited and clause.level is Level.MUST and "source: " in clause.origin
        for clause in clauses
    )
    return "document" if stated else "ruling"


def lines_of(entry: Mapping[str, Any], report: Report) -> list[Mapping[str, Any]]:
    """What the report found wrong with the cases of a finding, in the order of the notes."""
    wrong = wrong_of(report)
    return [line for case in entry["cases"] for line in wrong if line["case"] == case]


def _finding(
    number: int,
    entry: Mapping[str, Any],
    folder: Path,
    report: Report,
    cases: Sequence[Case],
    clauses: Sequence[Clause],
) -> Finding:
    """One finding, with what the report and SPEC.md say of its cases."""
    lines = lines_of(entry, report)
    cited = {name for line in lines for name in line["clauses"]}
    return Finding(
        number=number,
        id=entry["id"],
        title=entry["title"],
        why=" ".join(entry["why"].split()),
        fix=" ".join(entry["fix"].split()),
        script=source(folder / f"{entry['id']}.py"),
        prints=entry["prints"].strip(),
        clauses=tuple(clause for clause in clauses if clause.id in cited),
        results=tuple(lines),
        statements={case.id: case.statement for case in cases if case.id in entry["cases"]},
    )


# -- what is kept of a report


def write_excerpt(report: Report, path: Path) -> None:
    """The lines that the page is made of, small enough to be kept; paths of the machine and
    evidence, which holds more of them, stay behind."""
    writer = Writer(path)
    command = list(chosen_by(report.header["command"]))
    writer.write({**report.header, "command": command})
    for line in [*wrong_of(report), *lines_not_run(report)]:
        writer.write(start(line["case"], line["dtype"]))
        writer.write({**line, "evidence": ""})
    writer.write(report.footer)
    writer.close()
