"""``mone-ref spec``: the clauses of SPEC.md, and the cases that judge each of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.cli.failure import fail
from mone_ref.errors import show
from mone_ref.faults import FAULTS, Fault
from mone_ref.suite import cases, data, spec
from mone_ref.suite.spec import Clause

WIDTH = 100


@dataclass(frozen=True)
class Entry:
    """A clause, the cases that cite it, or why there is none, and the faults that break it."""

    clause: Clause
    cited_by: tuple[cases.Case, ...]
    not_judged: str | None
    broken_by: tuple[Fault, ...]


def register(parent: typer.Typer) -> None:
    """Add the ``spec`` command."""
    parent.command("spec")(show_spec)


def show_spec(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="CLAUSE", help="Ids such as LOAD-7.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    check_source: Annotated[
        Path | None,
        typer.Option(
            "--check-source",
            metavar="FILE",
            help="Compare a copy of the source document with the one that SPEC.md restates.",
        ),
    ] = None,
) -> None:
    """List the clauses with their cases, or print the named ones in full."""
    if check_source is not None:
        if names or as_json:
            fail("--check-source takes no clause and no --json")
        raise typer.Exit(0 if _is_the_source(check_source) else 1)
    try:
        entries = _entries(data.root())
    except (cases.CaseError, spec.SpecError, OSError) as error:
        fail(str(error))
    chosen = _choose(entries, names or [])
    if as_json:
        typer.echo(json.dumps([_as_dict(entry) for entry in chosen], indent=2))
    elif names:
        typer.echo("\n\n".join("\n".join(_full(entry)) for entry in chosen))
    else:
        for line in _table(chosen):
            typer.echo(line)


def _is_the_source(copy: Path) -> bool:
    """Print whether a copy of the source document is the one SPEC.md restates."""
    try:
        pinned, found = spec.source_hash(spec.read_text()), spec.file_hash(copy)
    except (spec.SpecError, OSError) as error:
        fail(str(error))
    if found == pinned:
        typer.echo(f"{copy} is the source document of SPEC.md, sha256 {pinned}")
    else:
        typer.echo(f"{copy} is another text: sha256 {found}, SPEC.md restates {pinned}", err=True)
    return found == pinned


def _entries(root: Path) -> list[Entry]:
    """Every clause, in the order of SPEC.md."""
    loaded = cases.load(root)
    reasons = {
        name: f"{section}: {reason}"
        for section, clauses in spec.read_not_judged(root).items()
        for name, reason in clauses.items()
    }
    return [
        Entry(
            clause,
            tuple(case for case in loaded if clause.id in case.clauses),
            reasons.get(clause.id),
            tuple(fault for fault in FAULTS.values() if clause.id in fault.clauses),
        )
        for clause in spec.load(root)
    ]


def _choose(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """The named entries in the order named, or all."""
    known = {entry.clause.id: entry for entry in entries}
    unknown = [name for name in names if name.upper() not in known]
    if unknown:
        fail(f"no clause {', '.join(map(show, unknown))}; `mone-ref spec` lists them")
    return [known[name.upper()] for name in names] or list(entries)


def _table(entries: Sequence[Entry]) -> Iterator[str]:
    """One line per clause."""
    width = 2 + max(len(entry.clause.origin) for entry in entries)
    for entry in entries:
        clause = entry.clause
        attributes = f"{clause.level:8}{clause.origin:{width}}{clause.visibility:12}"
        judged = ", ".join(case.id for case in entry.cited_by) or f"({entry.not_judged})"
        yield f"{clause.id:8}{attributes}{judged}"


def _full(entry: Entry) -> Iterator[str]:
    """A clause with everything that SPEC.md says, then its cases."""
    clause = entry.clause
    yield f"{clause.id}  {clause.level} · {clause.origin} · {clause.visibility}"
    for paragraph in (*clause.text.split("\n\n"), f"Rationale: {clause.rationale}"):
        yield ""
        yield textwrap.fill(paragraph, WIDTH)
    for example in clause.examples:
        yield f"\n{example.caption}\n{textwrap.indent(example.json, '    ')}"
    yield ""
    if not entry.cited_by:
        yield f"No case ({entry.not_judged})"
    for case in entry.cited_by:
        yield f"{case.id}: {case.statement}"
    yield ""
    if not entry.broken_by:
        yield "No planted fault breaks it"
    for fault in entry.broken_by:
        yield f"fault {fault.id}: {fault.sentence}"


def _as_dict(entry: Entry) -> dict[str, object]:
    """An entry as JSON-ready data."""
    clause = entry.clause
    return {
        "id": clause.id,
        "level": clause.level,
        "origin": clause.origin,
        "visibility": clause.visibility,
        "text": clause.text,
        "rationale": clause.rationale,
        "line": clause.line,
        "cases": [case.id for case in entry.cited_by],
        "not_judged": entry.not_judged,
        "faults": [fault.id for fault in entry.broken_by],
    }
