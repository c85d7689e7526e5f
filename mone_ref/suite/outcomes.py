"""What can come of one case at one dtype, and the record of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isfinite
from typing import Any

from mone_ref.suite.compare import Numbers


class Outcome(StrEnum):
    """Every outcome, with one sentence; the values stand in reports and expectation files."""

    doc: str

    def __new__(cls, value: str, doc: str = "") -> Outcome:
        """A member whose value is its first argument."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member

    OK = "ok", "The engine did what the case expects."

    MISMATCH = "mismatch", "The answer is outside the budget, or not an answer at all."
    WRONG_GROUP = "wrong-group", "Refused, but for another reason than the fault that was planted."
    LATE = "late", "Refused for the right reason, later than the clause allows."
    WRONGLY_REFUSED = "wrongly-refused", "Refused something that conforms."
    WRONGLY_ACCEPTED = "wrongly-accepted", "Accepted something that must be refused."
    ERRORED = "errored", "Failed with something that is no deliberate refusal."
    CRASHED = "crashed", "Ran out of memory, or its process ended or tried to."
    TIMEOUT = "timeout", "A call, or the whole case, took longer than its time limit."

    VOID = "void", "The near twin that must load did not, so a refusal proves nothing."
    NOT_JUDGED = "not-judged", "The base model differs without any substitution."
    NOT_EXERCISED = "not-exercised", "The engine did not take the path that the case is about."
    NOT_APPLICABLE = "not-applicable", "The engine does not offer what the case needs."

    @property
    def judged(self) -> bool:
        """Whether the case decided anything about its clauses."""
        return self not in UNDECIDED

    @property
    def failed(self) -> bool:
        """Whether the case decided against the engine."""
        return self.judged and self is not Outcome.OK


UNDECIDED = frozenset(
    {Outcome.VOID, Outcome.NOT_JUDGED, Outcome.NOT_EXERCISED, Outcome.NOT_APPLICABLE}
)
"""Outcomes that say nothing about a clause. None of them is ever a pass."""


@dataclass(frozen=True)
class Result:
    """One case at one dtype.

    ``codes`` and ``phase`` are those of a refusal, as far as they are known.
    ``seconds`` includes what this case was the first to load.
    """

    case: str
    dtype: str
    outcome: Outcome
    expected: str
    found: str
    codes: tuple[str, ...] = ()
    phase: str = ""
    numbers: Numbers | None = None
    evidence: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that JSON does not have becomes null."""
        numbers = asdict(self.numbers) if self.numbers else None
        if numbers:
            numbers = {key: value if isfinite(value) else None for key, value in numbers.items()}
        plain = {"outcome": str(self.outcome), "codes": list(self.codes), "numbers": numbers}
        return asdict(self) | plain
