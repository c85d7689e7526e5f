"""All results -> one word, and how much of the specification it rests on (ruling R18)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mone_ref.suite import spec
from mone_ref.suite.cases import Case, Kind
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.spec import Clause, Level, Visibility


class Word(StrEnum):
    """The verdict."""

    CONFORMANT = "CONFORMANT"
    ADVICE = "CONFORMANT WITH ADVICE"
    INCOMPLETE = "INCOMPLETE"
    NOT_CONFORMANT = "NOT CONFORMANT"

    @property
    def good(self) -> bool:
        """Whether an engine may be called conformant."""
        return self in (Word.CONFORMANT, Word.ADVICE)


@dataclass(frozen=True)
class Coverage:
    """MUST clauses by what became of them; the four others add up to ``total``.

    ``in_layers`` have cases for engines that show their layers only, ``without_case`` have
    no case in this suite, ``unreached`` have cases that this engine did not get far enough
    for. ``silent`` are clause groups without any case for a whole model.
    """

    total: int
    judged: int
    in_layers: int
    without_case: int
    unreached: int
    silent: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"judged {self.judged} of {self.total} MUST clauses",
            f"{self.in_layers} need layer access",
            f"{self.without_case} have no case in this release",
        ]
        if self.silent:
            parts.append(f"no whole-model case yet of {', '.join(self.silent)}")
        if self.unreached:
            parts.append(f"{self.unreached} were not reached on this engine")
        return "; ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """``word`` is None for a partial run. ``missing`` are clause groups without a judged case."""

    word: Word | None
    coverage: Coverage
    missing: tuple[str, ...]

    def __str__(self) -> str:
        if self.word is None:
            return "PARTIAL RUN: no verdict"
        reason = f" (nothing judged of {', '.join(self.missing)})" if self.missing else ""
        return f"{self.word}{reason}"


def levels(cases: Iterable[Case], clauses: Sequence[Clause]) -> dict[str, Level]:
    """Case id -> how much the case weighs."""
    known = {clause.id: clause for clause in clauses}
    return {case.id: spec.case_level([known[name] for name in case.clauses]) for case in cases}


def conclude(
    results: Sequence[Result],
    cases: Sequence[Case],
    clauses: Sequence[Clause],
    partial: bool,
    parallel: frozenset[str] = frozenset(),
) -> Verdict:
    """The verdict of a run. ``partial`` runs have none, only a coverage.

    ``parallel`` names the kinds of ranks that the engine offers (``BackendInfo.parallel``).
    """
    judged = judged_clauses(results, cases)
    offered = [case for case in cases if case.setting.ranks.keys() <= parallel]
    missing = unjudged_groups(judged, offered, clauses)
    word = None if partial else weigh(results, levels(cases, clauses), missing)
    return Verdict(word, coverage(judged, cases, clauses), missing)


def weigh(
    results: Sequence[Result], levels_of: Mapping[str, Level], missing: tuple[str, ...]
) -> Word:
    """The word: a broken MUST first, then what was not judged at all, then advice."""
    broken = {levels_of[result.case] for result in results if result.outcome.failed}
    if Level.MUST in broken:
        return Word.NOT_CONFORMANT
    if missing or not any(result.outcome.judged for result in results):
        return Word.INCOMPLETE
    return Word.ADVICE if Level.SHOULD in broken else Word.CONFORMANT


def judged_clauses(results: Sequence[Result], cases: Sequence[Case]) -> frozenset[str]:
    """Clauses that at least one case decided on, either way."""
    clauses_of = {case.id: case.clauses for case in cases}
    decided = {result.case for result in results if result.outcome.judged}
    return frozenset(name for case in decided for name in clauses_of[case])


def must(clauses: Sequence[Clause], visibility: Visibility) -> set[str]:
    """Ids of the MUST clauses of one visibility."""
    return {
        clause.id
        for clause in clauses
        if clause.level is Level.MUST and clause.visibility is visibility
    }


def unjudged_groups(
    judged: frozenset[str], cases: Sequence[Case], clauses: Sequence[Clause]
) -> tuple[str, ...]:
    """Groups whose observable MUST clauses have whole-model cases, with none of them judged.

    ``cases`` are without those of ranks that the engine does not offer: one of a single device
    can be judged in full, and the coverage tells which clauses were not reached.
    """
    observable = must(clauses, Visibility.OBSERVABLE)
    cited = whole_model(cases) & observable
    groups = dict.fromkeys(clause.group for clause in clauses if clause.id in cited)
    reached = {clause.group for clause in clauses if clause.id in judged & observable}
    return tuple(group for group in groups if group not in reached)


def whole_model(cases: Iterable[Case]) -> set[str]:
    """Clauses that are judged on every engine, not only on those that show their layers."""
    return {name for case in cases if case.kind is not Kind.LAYER for name in case.clauses}


def coverage(judged: frozenset[str], cases: Sequence[Case], clauses: Sequence[Clause]) -> Coverage:
    """Every MUST clause in exactly one of four heaps."""
    observable = must(clauses, Visibility.OBSERVABLE)
    every = observable | must(clauses, Visibility.INTERNAL)
    cited = {name for case in cases for name in case.clauses}
    reachable = whole_model(cases) & observable
    spoken = {clause.group for clause in clauses if clause.id in reachable}
    groups = dict.fromkeys(clause.group for clause in clauses if clause.id in observable)
    return Coverage(
        total=len(every),
        judged=len(every & judged),
        in_layers=len((every & cited) - reachable - judged),
        without_case=len(every - judged - cited),
        unreached=len(reachable - judged),
        silent=tuple(group for group in groups if group not in spoken),
    )


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How often each outcome occurred, in the order of ``Outcome``; zeros left out."""
    seen = [result.outcome for result in results]
    return {str(outcome): seen.count(outcome) for outcome in Outcome if outcome in seen}
