"""SPEC.md as data: its clauses, and the gate that ties every clause to a case.

SPEC.md is the only place where clauses are written. This file reads it strictly,
so that a slip in the text (an id used twice, a level that is not one) fails the
tests instead of dropping a clause from the coverage.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from mone_ref.checkpoint.opening import read_regular
from mone_ref.suite import data

SOURCE_SECTIONS = frozenset(
    ("Checkpoint format", "Semantics", "Execution", "Weight loading", "Supported configurations")
)
"""Sections of the source document that a clause may name as its origin."""

NOT_JUDGED_SECTIONS = ("not-yet", "not-testable")
"""Why a clause may have no case: none is written yet, or none can decide it."""

_HEADING = re.compile(r"### ([A-Z]+-[1-9][0-9]*)")
_ATTRIBUTES = re.compile(r"(\S+) · (.+) · (\S+)")
_ORIGIN = re.compile(r"source: (?P<section>.+)|ruling(?: R[1-9][0-9]*)?")
_RATIONALE = "Rationale: "
_FENCE = "```"
_BLOCK = re.compile(rf"^{_FENCE}.*?^{_FENCE}$|^\S.*?(?=\n\s*\n|\n{_FENCE}|\Z)", re.M | re.S)
_SOURCE_HASH = re.compile(r"^Source sha256: ([0-9a-f]{64})$", re.MULTILINE)


class Level(StrEnum):
    """How much a clause weighs in the verdict."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Visibility(StrEnum):
    """Whether a clause shows in an engine's answers, or only in its inner steps (GEN-2)."""

    OBSERVABLE = "observable"
    INTERNAL = "internal"


@dataclass(frozen=True)
class Example:
    """A config fragment of a clause, and the caption that says what becomes of it."""

    caption: str
    json: str
    line: int


@dataclass(frozen=True)
class Clause:
    """One rule of SPEC.md; ``line`` is where its heading stands, from 1."""

    id: str
    level: Level
    origin: str
    visibility: Visibility
    text: str
    rationale: str
    examples: tuple[Example, ...]
    line: int

    @property
    def group(self) -> str:
        """``LOAD`` of ``LOAD-7``."""
        return self.id.partition("-")[0]

    @property
    def number(self) -> int:
        """``7`` of ``LOAD-7``."""
        return int(self.id.partition("-")[2])

    @property
    def rulings(self) -> tuple[str, ...]:
        """Numbered rulings among its origins: ``("R7",)``."""
        return tuple(re.findall(r"ruling (R\d+)", self.origin))


class SpecError(Exception):
    """SPEC.md breaks its own format."""

    def __init__(self, line: int, message: str) -> None:
        """Prefix ``message`` with its place."""
        super().__init__(f"SPEC.md:{line}: {message}")


class CitesClauses(Protocol):
    """What the gate needs of a case."""

    @property
    def id(self) -> str:
        """``group/name``."""

    @property
    def clauses(self) -> Sequence[str]:
        """Ids of the clauses the case judges."""


# -- reading


def read_text(root: Path | None = None) -> str:
    """SPEC.md of this checkout or installation."""
    return ((root or data.root()) / "SPEC.md").read_text(encoding="utf-8")


def load(root: Path | None = None) -> tuple[Clause, ...]:
    """All clauses, in the order of SPEC.md. Raises ``SpecError``."""
    return parse(read_text(root))


def parse(text: str) -> tuple[Clause, ...]:
    """Clauses of a specification text, in its order. Raises ``SpecError``.

    Refused: a level-three heading that is no clause id, an id used twice or out of
    numeric order in its group, an unknown level, origin or visibility, a clause
    without text or without a rationale, and a JSON block without a caption.
    """
    clauses = tuple(_clause(line, section) for line, section in _sections(text))
    _check_ids(clauses)
    return clauses


def groups(clauses: Sequence[Clause]) -> dict[str, tuple[Clause, ...]]:
    """Clauses by the letters of their ids, both in the order of the text."""
    names = dict.fromkeys(clause.group for clause in clauses)
    return {name: tuple(clause for clause in clauses if clause.group == name) for name in names}


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """Each level-three heading's line number, and its text up to the next heading."""
    starts = [heading.start() for heading in re.finditer(r"^#{1,6} ", text, re.MULTILINE)]
    for start, stop in pairwise([*starts, len(text)]):
        if text.startswith("### ", start):
            yield text.count("\n", 0, start) + 1, text[start:stop]


def _clause(line: int, section: str) -> Clause:
    """One clause from its section; ``line`` is that of its heading."""
    title, _, rest = section.partition("\n")
    heading = _HEADING.fullmatch(title)
    if heading is None:
        raise SpecError(line, f"not a clause id: {title}")
    attributes, *body = _blocks(line + 1, rest) or [(line, "")]
    level, origin, visibility = _attributes(*attributes)
    at = next((n for n, (_, block) in enumerate(body) if block.startswith(_RATIONALE)), None)
    if not at:
        raise SpecError(line, "a clause needs a text, then a paragraph 'Rationale: ...'")
    return Clause(
        id=heading[1],
        level=level,
        origin=origin,
        visibility=visibility,
        text="\n\n".join(block for _, block in body[:at]),
        rationale=body[at][1].removeprefix(_RATIONALE),
        examples=tuple(_examples(body[at + 1 :])),
        line=line,
    )


def _blocks(line: int, section: str) -> list[tuple[int, str]]:
    """Paragraphs on one line each, and fenced blocks as they stand, with line numbers."""
    return [
        (
            line + section.count("\n", 0, found.start()),
            found[0] if found[0].startswith(_FENCE) else " ".join(found[0].split()),
        )
        for found in _BLOCK.finditer(section)
    ]


def _attributes(line: int, block: str) -> tuple[Level, str, Visibility]:
    """Level, origin and visibility, each one of the known words."""
    match = _ATTRIBUTES.fullmatch(block)
    if match is None:
        raise SpecError(line, "expected a line 'LEVEL · ORIGIN · VISIBILITY'")
    level, origin, visibility = match.groups()
    if level not in set(Level):
        raise SpecError(line, f"unknown level {level}")
    if visibility not in set(Visibility):
        raise SpecError(line, f"unknown visibility {visibility}")
    for part in origin.split(" + "):
        named = _ORIGIN.fullmatch(part)
        if named is None or named["section"] not in {None, *SOURCE_SECTIONS}:
            raise SpecError(line, f"unknown origin {part}")
    return Level(level), origin, Visibility(visibility)


def _examples(blocks: list[tuple[int, str]]) -> Iterator[Example]:
    """Pairs of a caption and a JSON block; nothing else may follow the rationale."""
    for n, (line, block) in enumerate(blocks):
        fenced = block.startswith(_FENCE)
        if fenced != bool(n % 2):
            raise SpecError(line, "after the rationale: captions, each with one JSON block")
        if fenced:
            if not block.startswith(f"{_FENCE}json\n") or not block.endswith(f"\n{_FENCE}"):
                raise SpecError(line, "an example is a block fenced as json")
            json = block.removeprefix(f"{_FENCE}json\n").removesuffix(f"\n{_FENCE}")
            yield Example(blocks[n - 1][1], json, line)
    if len(blocks) % 2:
        raise SpecError(blocks[-1][0], "a caption without a JSON block")


def _check_ids(clauses: Sequence[Clause]) -> None:
    """Ids are unique and ascend within their group."""
    seen: set[str] = set()
    last: dict[str, int] = {}
    for clause in clauses:
        if clause.id in seen:
            raise SpecError(clause.line, f"{clause.id} is used twice")
        if clause.number < last.get(clause.group, 0):
            raise SpecError(
                clause.line, f"{clause.id} stands after {clause.group}-{last[clause.group]}"
            )
        seen.add(clause.id)
        last[clause.group] = clause.number


# -- the source document


def source_hash(text: str) -> str:
    """The sha256 of the source document that SPEC.md restates. Raises ``SpecError``."""
    found = _SOURCE_HASH.findall(text)
    if len(found) != 1:
        raise SpecError(1, "expected one line 'Source sha256: <64 hex digits>'")
    return str(found[0])


def file_hash(path: Path) -> str:
    """The sha256 of a copy of the source document, byte for byte."""
    return hashlib.sha256(read_regular(path)).hexdigest()


# -- clauses against cases


def read_not_judged(root: Path | None = None) -> dict[str, dict[str, str]]:
    """``conformance/not_judged.toml``: section -> clause id -> reason."""
    path = (root or data.root()) / "conformance" / "not_judged.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def case_level(clauses: Sequence[Clause]) -> Level:
    """Level of a case that judges ``clauses``: the strictest observable one's.

    Internal clauses count only where there is no observable one: they must not
    decide against an engine that does not show the step (GEN-2).
    """
    observable = [clause for clause in clauses if clause.visibility is Visibility.OBSERVABLE]
    order = list(Level)
    return min((clause.level for clause in observable or clauses), key=order.index)


def gate(
    clauses: Sequence[Clause],
    cases: Sequence[CitesClauses],
    not_judged: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Everything that is loose between clauses, cases and ``not_judged.toml``; empty is good."""
    return [
        *_loose_cases(clauses, cases),
        *_loose_reasons(clauses, not_judged),
        *_loose_clauses(clauses, cases, not_judged),
    ]


def _loose_cases(clauses: Sequence[Clause], cases: Sequence[CitesClauses]) -> Iterator[str]:
    """Cases that share an id, or cite nothing, an unknown clause, or clauses of two levels."""
    known = {clause.id: clause for clause in clauses}
    for name, count in Counter(case.id for case in cases).items():
        if count > 1:
            yield f"{name}: two cases have this id"
    for case in cases:
        if not case.clauses:
            yield f"{case.id}: cites no clause"
        for name in case.clauses:
            if name not in known:
                yield f"{case.id}: cites {name}, which SPEC.md does not have"
        cited = [known[name] for name in case.clauses if name in known]
        levels = {c.level for c in cited if c.visibility is Visibility.OBSERVABLE}
        if len(levels) > 1:
            yield f"{case.id}: its observable clauses are {' and '.join(sorted(levels))}"


def _loose_reasons(
    clauses: Sequence[Clause], not_judged: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Entries of ``not_judged.toml`` that are unknown, double or without a reason."""
    known = {clause.id for clause in clauses}
    seen: set[str] = set()
    for section, reasons in not_judged.items():
        if section not in NOT_JUDGED_SECTIONS:
            yield f"not_judged.toml: unknown section {section}"
        for name, reason in reasons.items():
            if name not in known:
                yield f"not_judged.toml: {name} is no clause of SPEC.md"
            if name in seen:
                yield f"not_judged.toml: {name} stands in two sections"
            if not reason.strip():
                yield f"not_judged.toml: {name} has no reason"
            seen.add(name)


def _loose_clauses(
    clauses: Sequence[Clause],
    cases: Sequence[CitesClauses],
    not_judged: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """Clauses with neither a case nor a reason, and clauses with both."""
    cited = {name for case in cases for name in case.clauses}
    excused = {name for reasons in not_judged.values() for name in reasons}
    for clause in clauses:
        if clause.id not in cited | excused:
            yield f"{clause.id}: no case cites it and not_judged.toml gives no reason"
        if clause.id in cited & excused:
            yield f"{clause.id}: a case cites it, but not_judged.toml excuses it"
