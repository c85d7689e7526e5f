"""Every planted fault turns the verdict red, through the same run that judges engines."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mone_ref import faults, substitution
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.faults.plant import StaleFault
from mone_ref.suite import cases as case_files
from mone_ref.suite import data, spec, verdict
from mone_ref.suite.cases import Case, Kind
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.run import Run, Settings
from mone_ref.suite.simulate import Simulator
from mone_ref.suite.spec import Level
from mone_ref.suite.verdict import Word

CASES = case_files.load(data.root())
CLAUSES = spec.load(data.root())
LEVELS = verdict.levels(CASES, CLAUSES)
UPDATES = {Kind.UPDATE, Kind.UPDATE_REFUSAL}
ACCIDENTS = {Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMEOUT}
FAILS = {"no-token-is-an-error"}
"""Faults whose sentence says that the engine fails; of all others a failure proves nothing."""
STAGES = {"parse", "load", "run", "update", "reload"}
GROUPS = {
    "config",
    "decode",
    "routing",
    "substitution",
    "experts",
    "loading",
    "parallel",
    "update",
    "reload",
}


def judged(*patterns: str) -> Run:
    """The reference in float32, on some cases or on all."""
    settings = Settings("reference", dtypes=("float32",), patterns=patterns)
    run = Run(settings, ReferenceBackend(), data.root())
    for case, dtype in run.planned:
        run.judge(case, dtype)
    run.harness.close()
    return run


def test_the_honest_reference_is_conformant():
    assert judged().verdict().word is Word.CONFORMANT


def test_a_whole_run_with_a_fault_is_not_conformant():
    with faults.planted(FAULTS["dropped"]):
        run = judged()
    assert run.verdict().word is Word.NOT_CONFORMANT


def red(fault: Fault) -> Word:
    """The verdict on an engine with a fault: only MUST clauses decide against it."""
    levels = {clause.id: clause.level for clause in CLAUSES}
    must = any(levels[name] is Level.MUST for name in fault.clauses)
    return Word.NOT_CONFORMANT if must else Word.ADVICE


VISIBLE = [fault for fault in FAULTS.values() if not fault.equivalent]
EQUIVALENT = [fault for fault in FAULTS.values() if fault.equivalent]


@pytest.fixture(scope="module")
def simulator():
    simulator = Simulator(data.root(), ReferenceBackend())
    yield simulator
    simulator.close()


def results(simulator: Simulator, fault: Fault, cases: Iterable[Case]) -> list[Result]:
    """Cases at every dtype at which a fault may show; every replaced step is called."""
    found = [
        simulator.run(case, dtype, fault).result
        for case in cases
        for dtype in case.dtypes_of(fault.dtypes)
        if dtype in fault.dtypes
    ]
    calls = simulator.calls(fault)
    simulator.forget(fault)
    assert all(count > 0 for count in calls.values()), calls
    return found


@pytest.mark.parametrize("fault", VISIBLE, ids=lambda fault: fault.id)
def test_a_fault_is_killed_by_the_cases_that_claim_it(fault, simulator):
    claiming = [case for case in CASES if fault.id in case.kills]
    found = results(simulator, fault, claiming)
    assert {result.case for result in found} == {case.id for case in claiming} != set()
    for result in found:
        assert result.outcome.failed, f"{result.case} does not see {fault.id}: {result.found}"
        assert (result.outcome in ACCIDENTS) == (fault.id in FAILS), result.found
    assert verdict.weigh(found, LEVELS, ()) is red(fault)


@pytest.mark.parametrize("fault", EQUIVALENT, ids=lambda fault: fault.id)
def test_an_equivalent_fault_survives_every_case_that_could_see_it(fault, simulator):
    kinds = {"update": UPDATES, "reload": {Kind.RELOAD_REFUSAL}}.get(fault.stage, set(Kind))
    found = results(simulator, fault, [case for case in CASES if case.kind in kinds])
    assert {result.outcome for result in found} <= {Outcome.OK, Outcome.NOT_APPLICABLE}
    assert Outcome.OK in {result.outcome for result in found}


def test_controls_do_not_see_faults_of_substitution():
    with faults.planted(FAULTS["dropped"]):
        run = judged("controls/*")
    assert not any(result.outcome.failed for result in run.results)


def test_faults_are_well_formed():
    clauses = {clause.id for clause in CLAUSES}
    for fault in FAULTS.values():
        assert set(fault.clauses) <= clauses
        assert fault.stage in STAGES
        assert fault.group in GROUPS
        assert fault.dtypes
        assert fault.looks_like in {"", *FAULTS} - {fault.id}
        assert fault.sentence.endswith(".")


def test_claims_name_real_faults():
    claimed = {name for case in CASES for name in case.kills}
    assert claimed == {fault.id for fault in VISIBLE}


@pytest.mark.parametrize(
    "patch",
    [
        Patch("mone_ref.substitution", "gone", lambda weights: weights),
        Patch("mone_ref.substitution", "constant_sum", lambda weights: weights),
    ],
    ids=["no such step", "another signature"],
)
def test_a_stale_fault_is_an_error(patch):
    stale = Fault("stale", "Nothing.", ("SEM-1",), "run", (patch,), "substitution")
    with pytest.raises(StaleFault, match="stale"), faults.planted(stale):
        pass


def test_a_fault_ends_with_its_block():
    before = substitution.constant_sum
    with faults.planted(FAULTS["dropped"]):
        assert substitution.constant_sum is not before
    assert substitution.constant_sum is before
