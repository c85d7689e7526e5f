"""The kill matrix: which planted fault does which case see?

A case kills a fault when the honest reference is ok on it and the reference with the fault
is not. A fault that no case kills is a hole in the suite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mone_ref.errors import Phase
from mone_ref.faults import Fault, decode
from mone_ref.suite.cases import Case, Kind
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.simulate import Simulator

ORDER = list(Phase)
STAGES = {
    Kind.UPDATE: Phase.UPDATE,
    Kind.UPDATE_REFUSAL: Phase.UPDATE,
    Kind.RELOAD_REFUSAL: Phase.RELOAD,
}
"""The last phase that a case reaches; refusals say theirs, all others run."""

BROKEN = frozenset({Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMEOUT})
"""Outcomes of an engine that broke down instead of being wrong."""


class MatrixError(ValueError):
    """The matrix would mean nothing."""


@dataclass(frozen=True)
class Kill:
    """One case that saw a fault, the first dtype at which it did, and how."""

    case: str
    dtype: str
    outcome: Outcome


@dataclass(frozen=True)
class Row:
    """What the cases made of one fault.

    ``asked`` are the cases that ran, ``unreached`` the replaced steps that none of them called.
    """

    fault: str
    asked: tuple[str, ...]
    kills: tuple[Kill, ...]
    unreached: tuple[str, ...]


# -- one fault


def stage(case: Case) -> Phase:
    """The last phase that a case reaches on an engine that conforms."""
    if case.kind is Kind.REFUSAL and not case.expected.or_conforming:
        return case.expected.phase
    return STAGES.get(case.kind, Phase.RUN)


def plan(fault: Fault, cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """The cases that can reach a fault, each at the fault's dtypes; designated ones first."""
    first = ORDER.index(Phase(fault.stage))
    reaching = [c for c in cases if ORDER.index(stage(c)) >= first and is_about(c, fault)]
    for case in sorted(reaching, key=lambda case: fault.id not in case.kills):
        for dtype in case.dtypes_of(fault.dtypes):
            if dtype in fault.dtypes:
                yield case, dtype


def is_about(case: Case, fault: Fault) -> bool:
    """Whether a case decodes where a fault is one of decoding. What is wrong in every forward
    pass shows in prompts as well, at a fraction of the cost."""
    return (case.kind is Kind.DECODE) == (fault.group == decode.GROUP) or fault.id in case.kills


def run(
    simulator: Simulator, fault: Fault, cases: Sequence[Case], *, first_kill: bool = False
) -> Row:
    """Ask every case, or ask until one kills. Raises ``MatrixError``, ``StaleFault``."""
    asked: dict[str, None] = {}
    kills: dict[str, Kill] = {}
    for case, dtype in plan(fault, cases):
        if case.id in kills or not is_ok(simulator, case, dtype):
            continue
        asked[case.id] = None
        outcome = simulator.run(case, dtype, fault).result.outcome
        if outcome.failed:
            kills[case.id] = Kill(case.id, dtype, outcome)
            if first_kill:
                break
    unreached = tuple(step for step, count in simulator.calls(fault).items() if count == 0)
    simulator.forget(fault)
    return Row(fault.id, tuple(asked), tuple(kills.values()), unreached)


def is_ok(simulator: Simulator, case: Case, dtype: str) -> bool:
    """Whether the honest reference is ok on a case; else it is not about this dtype."""
    honest = simulator.run(case, dtype).result
    if honest.outcome.failed:
        raise MatrixError(f"{case.id} at {dtype}: without any fault: {honest.found}")
    return honest.outcome is Outcome.OK


# -- all faults


@dataclass(frozen=True)
class Score:
    """Killed faults among those that are not equivalent."""

    killed: int
    of: int

    def __str__(self) -> str:
        return f"{self.killed} of {self.of}"


@dataclass(frozen=True)
class Matrix:
    """The rows of some faults, in the order of ``faults``.

    ``first_kill`` tells that a row ends with its first kill; ``whole`` that no fault of the
    library was left out.
    """

    faults: Sequence[Fault]
    rows: Mapping[str, Row]
    cases: Sequence[Case]
    first_kill: bool
    whole: bool

    @cached_property
    def layers(self) -> frozenset[str]:
        """Cases that need an engine which shows its layers."""
        return frozenset(case.id for case in self.cases if case.kind is Kind.LAYER)

    def kills(self, fault: Fault, *, layers: bool = True) -> list[Kill]:
        """Who killed a fault, with or without the cases about single layers."""
        kills = self.rows[fault.id].kills
        return [kill for kill in kills if layers or kill.case not in self.layers]

    def score(self, *, layers: bool = True, group: str = "") -> Score:
        """The score of all faults, or of one group."""
        counted = [
            fault
            for fault in self.faults
            if not fault.equivalent and (not group or fault.group == group)
        ]
        return Score(sum(bool(self.kills(fault, layers=layers)) for fault in counted), len(counted))

    @property
    def groups(self) -> list[str]:
        """The groups of faults, in their order."""
        return list(dict.fromkeys(fault.group for fault in self.faults))

    @property
    def survivors(self) -> list[Fault]:
        """Faults that should show and did not."""
        return [f for f in self.faults if not f.equivalent and not self.kills(f)]

    @property
    def visible_equivalents(self) -> list[Fault]:
        """Faults that should not show and did: the reason they give is false."""
        return [f for f in self.faults if f.equivalent and self.kills(f)]

    @property
    def unreached(self) -> list[Fault]:
        """Faults with a step that no case called; a row that ended early tells nothing."""
        return [] if self.first_kill else [f for f in self.faults if self.rows[f.id].unreached]

    @property
    def false_claims(self) -> list[tuple[str, str]]:
        """Cases and the faults that they claim to kill and do not."""
        claims = [
            (case.id, fault)
            for case in self.cases
            for fault in self.faults
            if fault.id in case.kills
        ]
        return [(case, fault.id) for case, fault in claims if self._missed(case, fault)]

    def _missed(self, case: str, fault: Fault) -> bool:
        if any(kill.case == case for kill in self.kills(fault)):
            return False
        return not self.first_kill or case in self.rows[fault.id].asked

    @property
    def broken(self) -> list[Fault]:
        """Faults that show only as a breakdown: perhaps the fault is ill made."""
        killed = [(fault, self.kills(fault)) for fault in self.faults]
        return [f for f, kills in killed if kills and {kill.outcome for kill in kills} <= BROKEN]

    @property
    def idle(self) -> list[Case]:
        """Cases that kill nothing, and are neither a control nor the twin of another case."""
        killers = {kill.case for row in self.rows.values() for kill in row.kills}
        return [
            case
            for case in self.cases
            if case.id not in killers and case.kind is not Kind.CONTROL and not self._is_twin(case)
        ]

    def _is_twin(self, case: Case) -> bool:
        return case.kind is Kind.OUTPUT and (case.fixture, case.edits) in self._twins

    @cached_property
    def _twins(self) -> Collection[tuple[str, tuple[object, ...]]]:
        return [case.twin for case in self.cases if case.twin]

    @property
    def good(self) -> bool:
        """Whether every fault was killed that should be, and everything said of them is true."""
        return not (
            self.survivors or self.visible_equivalents or self.unreached or self.false_claims
        )
