"""Which mistakes a whole run shows: the fault that explains most failures, then the next.

A fault that explains a failure may be ruled out by a case that passed, although the fault
must fail it. That is what makes the conclusion of a run sharper than any single diagnosis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mone_ref.suite.bench import Bench
from mone_ref.suite.cases import Case, Kind
from mone_ref.suite.diagnosis import FAR, HONEST, NEAR, Diagnosis, Diagnostician
from mone_ref.suite.judge import Judgement
from mone_ref.suite.outcomes import Result
from mone_ref.suite.simulate import Simulated

MOST_DIAGNOSED = 12
"""Failures of one kind of case that are diagnosed: an engine that fails all has said enough."""
WITNESSES = 6
"""Passing cases that are simulated with one fault, to see whether they rule it out."""
MOST_RULED = 16
"""Faults of one run that are held against passing cases."""

IRRELEVANT = 2
"""The relevance of cases that say nothing about a fault."""

Key = tuple[str, str]
"""Case id and dtype."""


@dataclass(frozen=True)
class Explained:
    """Faults that no case of a run tells apart, and the failures they explain."""

    faults: tuple[str, ...]
    failures: frozenset[Key]


class Mistakes:
    """The diagnoses of one run. ``bench`` is the engine's own, for traces."""

    def __init__(self, diagnostician: Diagnostician, bench: Bench) -> None:
        self.diagnostician = diagnostician
        self.bench = bench
        self.failed: dict[Key, Diagnosis | None] = {}
        self.diagnosed: Counter[Kind] = Counter()
        self.passed: list[tuple[Case, str]] = []

    def see(self, case: Case, result: Result, judgement: Judgement, failed: bool) -> None:
        """Take note of a case; diagnose it when it failed and few of its kind have before."""
        if not failed:
            if result.outcome.judged and not result.outcome.failed:
                self.passed.append((case, result.dtype))
            return
        key, diagnosis = (case.id, result.dtype), None
        if self.diagnosed[case.kind] < MOST_DIAGNOSED:
            self.diagnosed[case.kind] += 1
            seen = Simulated(result, judgement.answers, judgement.parts)
            compute = self.bench.budget(result.dtype, case.setting)
            traces = self.traces(case, result.dtype) if judgement.answers else ()
            diagnosis = self.diagnostician.diagnose(case, result.dtype, compute, seen, traces)
        self.failed[key] = diagnosis

    def of(self, result: Result) -> Diagnosis | None:
        """The diagnosis of one failure."""
        return self.failed.get((result.case, result.dtype))

    def traces(self, case: Case, dtype: str) -> Sequence[Mapping[str, Tensor]]:
        """What the engine records of a case, where it can and the right answer is one."""
        if case.kind not in (Kind.OUTPUT, Kind.CONTROL):
            return ()
        return self.bench.traces(case.fixture, dtype, case.edits, case.setting)

    # -- the end of a run

    def close(self) -> None:
        """Remove what was kept for simulations."""
        self.diagnostician.simulator.close()

    def lines(self) -> Iterator[str]:
        """What is told of all failures together."""
        count = len(self.failed)
        left = self.diagnosed.total()
        for explained in self.explained():
            first = self.diagnostician.faults[explained.faults[0]]
            clauses = ", ".join(first.clauses)
            left -= len(explained.failures)
            yield (
                f"explained    {len(explained.failures)} of {plural(count)}: "
                f"{either(explained.faults)} ({clauses}): {first.sentence}"
            )
        if left:
            yield f"unexplained  {left} of {plural(count)}"
        if rest := count - self.diagnosed.total():
            yield f"undiagnosed  {rest} of {plural(count)}: {MOST_DIAGNOSED} of a kind are compared"

    def explained(self) -> Iterator[Explained]:
        """The fewest faults that explain the most failures, the strongest first."""
        left = {key: near(ratios) for key, ratios in self.diagnostician.ratios.items()}
        ruled_out: set[str] = set()
        checks = MOST_RULED
        while True:
            votes = Counter(name for names in left.values() for name in names - ruled_out)
            if not votes:
                return
            most = max(votes.values())
            tied = [name for name in sorted(votes) if votes[name] == most]
            contradicted = {name for name in tied[:checks] if self.contradicted(name)}
            checks -= len(tied[:checks])
            ruled_out |= contradicted
            standing = frozenset(tied) - contradicted
            if not standing:
                continue
            explained = {key for key, names in left.items() if names & standing}
            yield Explained(self.ordered(standing), frozenset(explained))
            left = {key: names for key, names in left.items() if key not in explained}

    def contradicted(self, name: str) -> bool:
        """Whether a case passed that the fault fails clearly."""
        fault = self.diagnostician.faults[name]
        apt = sorted(self.passed, key=lambda pair: relevance(pair[0], name))[:WITNESSES]
        return any(
            clearly_fails(self.diagnostician.simulator.run(case, dtype, fault).result)
            for case, dtype in apt
            if relevance(case, name) < IRRELEVANT
        )

    def ordered(self, names: frozenset[str]) -> tuple[str, ...]:
        """In the order of the library."""
        return tuple(name for name in self.diagnostician.faults if name in names)


def relevance(case: Case, fault: str) -> int:
    """How likely a case is to see a fault, the likeliest first: it claims to, or it has answers."""
    if fault in case.kills:
        return 0
    return 1 if case.kind is Kind.OUTPUT else IRRELEVANT


def near(ratios: Mapping[str, float]) -> frozenset[str]:
    """The faults that explain a failure."""
    return frozenset(name for name, ratio in ratios.items() if ratio <= NEAR) - {HONEST}


def clearly_fails(result: Result) -> bool:
    """Whether a simulated case fails by more than rounding could take back."""
    if not result.outcome.failed:
        return False
    numbers = result.numbers
    return numbers is None or max(numbers.token_ratio, numbers.max_ratio) > FAR


def plural(count: int) -> str:
    """A number of failures."""
    return f"{count} failure{'s' if count != 1 else ''}"


def either(names: Sequence[str]) -> str:
    """Faults that cannot be told apart."""
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
