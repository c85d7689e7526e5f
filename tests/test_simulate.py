"""A simulated wrong engine answers as one that is asked everything anew."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mone_ref import faults, substitution
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.faults.plant import StaleFault
from mone_ref.suite import cases as case_files
from mone_ref.suite import data
from mone_ref.suite.cases import Kind
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.planted import digest
from mone_ref.suite.runner import Harness
from mone_ref.suite.simulate import Simulator

ROOT = data.root()
CASES = {case.id: case for case in case_files.load(ROOT)}
SAMPLE = [case for case in list(CASES.values())[::5] if "float32" in case.dtypes_of(("float32",))]


@pytest.fixture(scope="module")
def simulator():
    simulator = Simulator(ROOT, ReferenceBackend())
    yield simulator
    simulator.close()


CONSTANT_SUM = substitution.constant_sum


def step_replaced(step: str, replacement: Callable[..., object]) -> Fault:
    """A fault of one step of mone_ref."""
    module, _, name = f"mone_ref.{step}".rpartition(".")
    honest = getattr(importlib.import_module(module), name)
    replacement.__signature__ = inspect.signature(honest)
    patch = Patch(module, name, replacement)
    return Fault(step, "It is wrong.", ("SEM-1",), "run", (patch,), "substitution")


def told(result: Result) -> tuple[object, ...]:
    """A result without its last digits, which move with the place of a tensor in memory."""
    return result.case, result.outcome, result.codes, result.phase


SKIPPED = [
    "renormalised",
    "routes-rewritten-in-place",
    "neighbour",
    "missing-constant-is-zero",
    "declared-names-unread",
    "update-adds",
]
"""Faults of every stage: a step of a forward pass, one that changes what it is given, of a load,
of its checks, of the config, of an update."""


@pytest.mark.parametrize("name", SKIPPED)
def test_shortcuts_change_no_result(simulator, name):
    backend = ReferenceBackend()
    # Planted for the whole run, the fault would be in the oracle that follows a decoder as well.
    asked = [case for case in SAMPLE if case.kind is not Kind.DECODE]
    for case in asked:
        simulator.run(case, "float32")
    with faults.planted(FAULTS[name]):
        harness = Harness(backend, backend.describe(), ROOT)
        plain = [told(harness.run(case, "float32")) for case in asked]
    quick = [told(simulator.run(case, "float32", FAULTS[name]).result) for case in asked]
    assert quick == plain
    assert {outcome.failed for _, outcome, *_ in quick} == {True, False}


def test_an_answer_that_is_known_took_its_steps_all_the_same():
    """Two cases with equal models: the second is not asked again, and still shows the fault."""
    simulator = Simulator(ROOT, ReferenceBackend())
    assert simulator.run(CASES["load/leftover-fused"], "float32").result.outcome is Outcome.OK
    wrong = simulator.run(CASES["outputs/olmoe-approx"], "float32", FAULTS["dropped"])
    simulator.close()
    assert wrong.result.outcome is Outcome.MISMATCH


def test_a_control_that_was_judged_for_another_case_shows_a_fault_all_the_same():
    def off_without_substitution(weights, ids, values, substituted):
        total = CONSTANT_SUM(weights, ids, values, substituted)
        return total if substituted else total + 1

    fault = step_replaced("substitution.constant_sum", off_without_substitution)
    simulator = Simulator(ROOT, ReferenceBackend())
    first, second = CASES["outputs/olmoe-explicit"], CASES["outputs/olmoe-approx"]
    assert first.control == second.control
    for case in (first, second):
        assert simulator.run(case, "float32").result.outcome is Outcome.OK
    wrong = simulator.run(second, "float32", fault)
    simulator.close()
    assert wrong.result.outcome is Outcome.NOT_JUDGED


def test_a_case_of_a_layer_that_was_right_shows_a_fault_all_the_same(simulator):
    outcomes = [
        simulator.run(CASES["layer/mixed"], "float32", fault).result.outcome
        for fault in (None, FAULTS["dropped"])
    ]
    assert outcomes == [Outcome.OK, Outcome.MISMATCH]


def test_a_wrong_engine_that_is_lent_an_honest_model_cannot_change_it():
    """An update works in place, and the next wrong engine must find the values of the disk."""
    simulator, case = Simulator(ROOT, ReferenceBackend()), CASES["update/single-constants"]
    outcomes = [
        simulator.run(case, "float32", fault).result.outcome
        for fault in (None, FAULTS["update-adds"])
    ]
    loads = simulator.honest.loads.values()
    simulator.close()
    assert outcomes == [Outcome.OK, Outcome.MISMATCH]
    assert loads
    assert all(digest(vars(made.session)) == made.digest for made in loads)


def test_without_a_fault_every_case_is_ok(simulator):
    found = {simulator.run(case, "float32").result.outcome for case in SAMPLE}
    assert found == {Outcome.OK}


def test_a_fault_is_gone_after_the_run(simulator):
    before = substitution.constant_sum
    simulator.run(CASES["outputs/olmoe-approx"], "float32", FAULTS["dropped"])
    assert substitution.constant_sum is before


def test_raw_answers_of_a_model_are_there_in_every_order(simulator):
    run = simulator.run(CASES["outputs/olmoe-approx"], "float32", FAULTS["dropped"])
    assert set(run.answers) == {"alone", "together", "reversed"}
    assert run.result.outcome is Outcome.MISMATCH


def test_raw_answers_of_a_layer_are_there_for_every_number_of_ranks(simulator):
    case = CASES["layer/ranks-mixed"]
    assert case.layer is not None
    run = simulator.run(case, "float32")
    assert tuple(run.parts) == case.layer.sizes


def test_steps_that_were_not_reached_are_told(simulator):
    fault = replace(FAULTS["constant-on-every-rank"], id="same")
    simulator.run(CASES["outputs/olmoe-approx"], "float32", fault)
    assert simulator.calls(fault) == {"mone_ref.layer.adds_constants": 0}
    simulator.forget(fault)


def test_a_fault_that_the_simulator_was_not_told_of_runs_all_the_same():
    simulator = Simulator(ROOT, ReferenceBackend(), [FAULTS["constant-on-every-rank"]])
    run = simulator.run(CASES["outputs/olmoe-approx"], "float32", FAULTS["dropped"])
    simulator.close()
    assert run.result.outcome is Outcome.MISMATCH


def test_an_update_is_seen_by_the_next_answer(simulator):
    case = CASES["update/single-constants"]
    run = simulator.run(case, "float32", FAULTS["constant-on-every-rank"])
    assert run.result.outcome is Outcome.OK


def test_a_fault_that_raises_is_an_error_of_the_engine(simulator):
    def broken(weights, ids, values, substituted):
        raise ZeroDivisionError

    raising = Fault(
        "raising",
        "It divides by zero.",
        ("SEM-1",),
        "run",
        (Patch("mone_ref.substitution", "constant_sum", broken),),
        "substitution",
    )
    broken.__signature__ = inspect.signature(substitution.constant_sum)
    run = simulator.run(CASES["outputs/olmoe-approx"], "float32", raising)
    assert run.result.outcome is Outcome.ERRORED
    assert "ZeroDivisionError" in run.result.evidence


def test_a_stale_fault_is_an_error():
    patch = Patch("mone_ref.substitution", "gone", torch.zeros)
    stale = Fault("stale", "Nothing.", ("SEM-1",), "run", (patch,), "substitution")
    with pytest.raises(StaleFault, match="stale"):
        Simulator(ROOT, ReferenceBackend(), [stale])
