"""How often a diagnosis is right: every planted fault as the engine, told from its answers alone.

    python benchmarks/diagnosis.py [--every N] [DTYPE ...]

The engine is the reference with one fault and with its columns in an order that no budget
was made with, so that it rounds like another kernel. It is asked the cases that claim the
fault and some output cases; every failure is diagnosed against the whole library. Then the
class of the fault is taken out of the library, and the same failures should be ``unknown``.
Prints the table of docs/diagnosis.md. ``--every N`` plants every N-th fault only; the library
that answers are compared with stays whole.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mone_ref.backend import LoadOptions, Scores, Session
from mone_ref.backends.exact import ExactBackend
from mone_ref.backends.reference import ReferenceBackend, ReferenceSession
from mone_ref.faults import FAULTS, Fault
from mone_ref.fill.variants import permuted
from mone_ref.loading import Model
from mone_ref.suite import cases as case_files
from mone_ref.suite import data
from mone_ref.suite.cases import Case
from mone_ref.suite.diagnosis import NEAR, Diagnosis, Diagnostician, root_of
from mone_ref.suite.mistakes import Mistakes
from mone_ref.suite.planted import Planted
from mone_ref.suite.runner import Harness
from mone_ref.suite.simulate import Simulated, Simulator

ROOT = data.root()
CASES = {case.id: case for case in case_files.load(ROOT)}
OUTPUTS = ("outputs/olmoe-approx", "outputs/qwen3-normalised", "outputs/mixtral-explicit")
"""Asked of every fault, beside the cases that claim it."""
KILLERS = 2
"""Of the cases that claim a fault, so many are asked."""
DTYPES = ("float32", "bfloat16", "float16")
FRESH_SEED = 101
HEAD = (
    "dtype",
    "faults",
    "failures",
    "right",
    "wrong claim",
    "unknown",
    "right for the run",
    "class left out: unknown",
)


class OtherKernel(ReferenceBackend):
    """The reference with its sums in another order."""

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        session = super().load(checkpoint, options)
        assert isinstance(session, ReferenceSession)
        return OtherKernelSession(session.model)


class OtherKernelSession(ReferenceSession):
    def score(self, prompts: list[list[int]]) -> list[Scores]:
        weights = permuted(self.model, FRESH_SEED)
        model = Model(self.model.config, weights, self.model.precision)
        return [Scores(logprobs) for logprobs in model.score(prompts)]


@dataclass
class Tally:
    """Grades at one dtype: of single failures, of whole runs, and with the class left out."""

    cases: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def asked(fault: Fault, dtype: str) -> list[Case]:
    """The cases that a wrong engine is asked at one dtype."""
    killers = [case for case in CASES.values() if fault.id in case.kills][:KILLERS]
    chosen = {case.id: case for case in (*killers, *(CASES[name] for name in OUTPUTS))}
    return [case for case in chosen.values() if dtype in case.dtypes_of((dtype,))]


def planted(dtype: str) -> Iterator[Fault]:
    """The faults that can be seen at one dtype; structural ones at all of them."""
    for fault in FAULTS.values():
        if not fault.equivalent and {dtype, "float32"} & set(fault.dtypes):
            yield fault


def grade(diagnosis: Diagnosis | None, fault: Fault) -> str:
    """``right``, ``wrong``, ``unknown``, or ``broke down``: nothing was there to compare."""
    if diagnosis is None:
        return "broke down"
    if not diagnosis.claims:
        return "unknown"
    roots = {root_of(FAULTS[name]) for name in diagnosis.faults}
    return "right" if root_of(fault) in roots else "wrong"


def measure(doctor: Diagnostician, fault: Fault, dtype: str, tally: Tally) -> None:
    """Diagnose one wrong engine at one dtype."""
    engine = Planted(OtherKernel(), fault)
    harness = Harness(engine, engine.describe(), ROOT)
    mistakes = Mistakes(doctor.knowing(FAULTS), harness.bench)
    for case in asked(fault, dtype):
        result, judgement = harness.judge(case, dtype)
        failed = result.outcome.failed
        mistakes.see(case, result, judgement, failed)
        if not failed:
            continue
        diagnosis = mistakes.of(result)
        seen = Simulated(result, judgement.answers, judgement.parts)
        note(tally.cases, grade(diagnosis, fault), tally, fault, case.id, dtype, diagnosis)
        if diagnosis is not None:
            blind = without_class(doctor, fault, case, dtype)
            told = blind.diagnose(case, dtype, dtype, seen)
            claimed = told is not None and told.claims
            kept = "claimed" if claimed else "unknown"
            note(tally.left_out, kept, tally, fault, f"{case.id} (left out)", dtype, told)
    if mistakes.failed:
        first = next(mistakes.explained(), None)
        named = {root_of(FAULTS[name]) for name in first.faults} if first else set()
        told = "none" if first is None else "right" if root_of(fault) in named else "wrong"
        tally.runs[told] += 1
        if told != "right":
            tally.notes.append(f"{fault.id} {dtype}: run {told}: {first}")


def note(
    counter: Counter[str],
    told: str,
    tally: Tally,
    fault: Fault,
    what: str,
    dtype: str,
    diagnosis: Diagnosis | None,
) -> None:
    """Count a grade; keep a line about what is not as it should be."""
    counter[told] += 1
    good = "unknown" if counter is tally.left_out else "right"
    if told != good:
        tally.notes.append(f"{fault.id} {dtype} {what}: {told}: {diagnosis}")


def without_class(doctor: Diagnostician, fault: Fault, case: Case, dtype: str) -> Diagnostician:
    """A diagnostician whose library lacks everything that cannot be told from a fault there."""
    seen = doctor.simulated(case, dtype, fault)
    ranked = doctor.ranked(case, dtype, seen, doctor.yardstick(case, dtype, dtype))
    own = {fault.id} | {one.name for one in ranked if one.distance.ratio <= NEAR}
    rest: Mapping[str, Fault] = {
        name: other
        for name, other in doctor.faults.items()
        if name not in own and root_of(other) != root_of(fault)
    }
    return doctor.knowing(rest)


def share(counter: Counter[str], name: str) -> str:
    """``12 of 13 (92 %)``."""
    total = counter.total()
    return f"{counter[name]} of {total} ({counter[name] / total:.0%})" if total else "-"


def main(dtypes: Iterable[str], every: int) -> None:
    """Print the table, then what was not right."""
    torch.set_num_threads(1)
    simulator = Simulator(ROOT, ExactBackend())
    doctor = Diagnostician(simulator)
    notes: list[str] = []
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for dtype in dtypes:
        tally = Tally()
        for fault in list(planted(dtype))[::every]:
            measure(doctor, fault, dtype, tally)
        cells = [
            dtype,
            str(tally.runs.total()),
            str(tally.cases.total()),
            *(share(tally.cases, name) for name in ("right", "wrong", "unknown")),
            share(tally.runs, "right"),
            share(tally.left_out, "unknown"),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        notes += tally.notes
    print()
    print("\n".join(notes))
    simulator.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How often a diagnosis is right.")
    parser.add_argument("dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--every", type=int, default=1)
    chosen = parser.parse_args()
    main(chosen.dtypes, chosen.every)
