"""Every planted fault turns the verdict red, through the same run that judges engines."""

from __future__ import annotations

import pytest

from mone_ref import faults, substitution
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.faults.plant import StaleFault
from mone_ref.suite import data, spec
from mone_ref.suite.run import Run, Settings
from mone_ref.suite.verdict import Word

STAGES = {"parse", "load", "run", "update", "reload"}


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


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_turns_the_verdict_red(fault):
    with faults.planted(fault) as witness:
        run = judged()
    assert all(count > 0 for count in witness.calls.values()), witness.calls
    assert run.verdict().word is Word.NOT_CONFORMANT


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_killed_by_the_cases_that_claim_it(fault):
    cases = [case for case in judged("controls/*").cases if fault.id in case.kills]
    assert cases, "no case claims this fault"
    with faults.planted(fault):
        run = judged(*(case.id for case in cases))
    for result in run.results:
        assert result.outcome.failed, f"{result.case} does not see {fault.id}: {result.found}"


def test_controls_do_not_see_faults_of_substitution():
    with faults.planted(FAULTS["dropped"]):
        run = judged("controls/*")
    assert not any(result.outcome.failed for result in run.results)


def test_faults_are_well_formed():
    clauses = {clause.id for clause in spec.load(data.root())}
    for fault in FAULTS.values():
        assert set(fault.clauses) <= clauses
        assert fault.stage in STAGES
        assert fault.sentence.endswith(".")


def test_claims_name_real_faults():
    claimed = {name for case in judged("controls/*").cases for name in case.kills}
    assert claimed == set(FAULTS)


@pytest.mark.parametrize(
    "patch",
    [
        Patch("mone_ref.substitution", "gone", lambda weights: weights),
        Patch("mone_ref.substitution", "constant_sum", lambda weights: weights),
    ],
    ids=["no such step", "another signature"],
)
def test_a_stale_fault_is_an_error(patch):
    stale = Fault("stale", "Nothing.", ("SEM-1",), "run", (patch,))
    with pytest.raises(StaleFault, match="stale"), faults.planted(stale):
        pass


def test_a_fault_ends_with_its_block():
    before = substitution.constant_sum
    with faults.planted(FAULTS["dropped"]):
        assert substitution.constant_sum is not before
    assert substitution.constant_sum is before
