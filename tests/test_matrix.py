"""The kill matrix tells faults that nothing sees, and sees through faults that are none."""

from __future__ import annotations

import inspect
import json
import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import typer
from typer.testing import CliRunner, Result

from mone_ref import precision, updates
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.cli import matrix as command
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.suite import cases as case_files
from mone_ref.suite import data, fault_coverage, matrix, spec, spread
from mone_ref.suite.cases import Kind
from mone_ref.suite.matrix import Kill, Matrix, MatrixError, Row
from mone_ref.suite.matrix_report import Report, document, summary
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.simulate import Simulator
from mone_ref.suite.spec import Clause, Level, Visibility

ROOT = data.root()
CASES = case_files.load(ROOT)
CLAUSES = spec.load(ROOT)
UPDATES = [case for case in CASES if case.kind in (Kind.UPDATE, Kind.UPDATE_REFUSAL)]
SCHEMA = json.loads((Path(matrix.__file__).parent / "matrix.schema.json").read_text())

WRITE = "mone_ref.updates", "write"


def raising(tensors, places):
    raise ZeroDivisionError


raising.__signature__ = inspect.signature(updates.write)


def planted(name: str, *patches: Patch, **fields: str) -> Fault:
    """A fault of updates: few cases reach it."""
    fault = Fault(name, "It is wrong.", ("UPD-1",), "update", patches, "update")
    return replace(fault, **fields)


UNSEEN = planted("unseen", Patch(*WRITE, updates.write))
LOST = FAULTS["update-lost"]
"""Killed by every case that looks behind an update."""
FALSE_REASON = replace(LOST, id="false-reason", equivalent="Nobody looks.")
UNREACHED = planted(
    "unreached",
    *LOST.patches,
    Patch("mone_ref.precision", "round_to_tf32", precision.round_to_tf32),
)
RAISES = planted("raises", Patch(*WRITE, raising))


@pytest.fixture(scope="module")
def simulator():
    known = [*FAULTS.values(), UNREACHED]
    simulator = Simulator(ROOT, ReferenceBackend(), known)
    yield simulator
    simulator.close()


@pytest.fixture(scope="module")
def made(simulator):
    """Makes the matrix of some faults against the cases of updates."""

    @cache
    def row(fault: Fault, first_kill: bool) -> Row:
        return matrix.run(simulator, fault, UPDATES, first_kill=first_kill)

    def make(*faults: Fault, first_kill: bool = False) -> Matrix:
        rows = {fault.id: row(fault, first_kill) for fault in faults}
        return Matrix(faults, rows, UPDATES, first_kill, whole=False)

    return make


# -- one fault


def test_a_fault_is_not_asked_of_cases_that_end_before_its_stage():
    kinds = {case.kind for case, _ in matrix.plan(LOST, CASES)}
    assert kinds == {Kind.UPDATE, Kind.UPDATE_REFUSAL, Kind.RELOAD_REFUSAL}
    run_stage = [case for case, _ in matrix.plan(FAULTS["dropped"], CASES)]
    refusals = [case for case in run_stage if case.kind is Kind.REFUSAL]
    assert all(case.expected.or_conforming for case in refusals)
    assert {Kind.OUTPUT, Kind.LAYER, Kind.UPDATE} <= {case.kind for case in run_stage}


def test_cases_that_claim_a_fault_come_first():
    names = [case.id for case, _ in matrix.plan(FAULTS["dropped"], CASES)]
    claiming = [case.id for case in CASES if "dropped" in case.kills]
    assert names[: len(claiming)] == claiming != []


def test_a_precision_fault_is_asked_at_its_own_dtypes():
    fault = replace(FAULTS["dropped"], dtypes=("bfloat16", "float16"))
    asked = {dtype for case, dtype in matrix.plan(fault, CASES) if case.kind is Kind.OUTPUT}
    assert asked == {"bfloat16", "float16"}


def test_a_row_tells_every_kill(simulator):
    row = matrix.run(simulator, LOST, UPDATES)
    assert {kill.case for kill in row.kills} >= {"update/single-constants"}
    assert {kill.outcome for kill in row.kills} == {Outcome.MISMATCH}
    assert set(row.asked) == {case.id for case in UPDATES}
    assert row.unreached == ()


def test_a_row_may_end_with_its_first_kill(simulator):
    row = matrix.run(simulator, LOST, UPDATES, first_kill=True)
    assert len(row.kills) == 1
    assert row.asked[-1] == row.kills[0].case


def test_a_case_that_the_honest_reference_fails_makes_no_matrix(simulator):
    case = next(case for case in CASES if case.id == "load/missing-constant")
    broken = replace(case, kind=Kind.OUTPUT)
    with pytest.raises(MatrixError, match="load/missing-constant at float32: without any fault"):
        matrix.run(simulator, FAULTS["dropped"], [broken])


# -- all faults


def test_a_fault_that_nothing_sees_is_a_survivor(made):
    found = made(UNSEEN, LOST)
    assert found.survivors == [UNSEEN]
    assert str(found.score()) == "1 of 2"
    assert not found.good


def test_an_equivalent_that_is_seen_is_an_error(made):
    found = made(FALSE_REASON)
    assert found.visible_equivalents == [FALSE_REASON]
    assert not found.good


def test_equivalents_are_not_in_the_score(made):
    found = made(replace(UNSEEN, equivalent="It is the same step."), LOST)
    assert str(found.score()) == "1 of 1"
    assert found.good


def test_a_step_that_no_case_calls_is_an_error(made):
    found = made(UNREACHED)
    assert found.rows["unreached"].unreached == ("mone_ref.precision.round_to_tf32",)
    assert found.unreached == [UNREACHED]
    assert not found.good


def test_a_fault_that_raises_is_killed_and_told(made):
    found = made(RAISES)
    assert {kill.outcome for kill in found.kills(RAISES)} == {Outcome.ERRORED}
    assert found.broken == [RAISES]
    assert found.good


def test_a_claim_that_is_false_is_an_error(simulator):
    claiming = replace(UPDATES[0], kills=("unseen",))
    rows = {"unseen": matrix.run(simulator, UNSEEN, [claiming])}
    equivalent = replace(UNSEEN, equivalent="It is the same step.")
    found = Matrix([equivalent], rows, [claiming], first_kill=False, whole=False)
    assert found.false_claims == [(claiming.id, "unseen")]
    assert not found.good


def test_faults_that_only_layers_show_count_in_one_score():
    layer = next(case for case in CASES if case.kind is Kind.LAYER)
    kill = Kill(layer.id, "float32", Outcome.MISMATCH)
    found = Matrix([LOST], {LOST.id: Row(LOST.id, (), (kill,), ())}, CASES, False, False)
    assert str(found.score()) == "1 of 1"
    assert str(found.score(layers=False)) == "0 of 1"


def test_idle_cases_are_no_controls_no_twins_and_kill_nothing():
    by_id = {case.id: case for case in CASES}
    control = next(case for case in CASES if case.kind is Kind.CONTROL)
    refusal = next(case for case in CASES if case.twin and case.twin[0] == "olmoe-approx")
    killer = next(case for case in CASES if case.kind is Kind.ROWS)
    cases = [control, refusal, by_id["outputs/olmoe-approx"], killer]
    kill = Kill(killer.id, "float32", Outcome.MISMATCH)
    found = Matrix([LOST], {LOST.id: Row(LOST.id, (), (kill,), ())}, cases, False, False)
    assert found.idle == [refusal]


# -- clauses


def clause(name: str, level: Level = Level.MUST) -> Clause:
    return Clause(name, level, "ruling", Visibility.OBSERVABLE, "Text.", "Why.", (), 1)


CITING = replace(UPDATES[0], clauses=("UPD-1",))


@pytest.mark.parametrize(
    ("clauses", "faults", "reasons", "violation"),
    [
        ([clause("UPD-1")], [LOST], {}, None),
        ([clause("UPD-1")], [], {"UPD-1": "It cannot."}, None),
        ([clause("UPD-1", Level.SHOULD)], [], {}, None),
        ([clause("UPD-1"), clause("UPD-4")], [LOST], {}, None),
        ([clause("UPD-1")], [], {}, "UPD-1: no fault breaks it"),
        ([clause("UPD-1")], [FALSE_REASON], {}, "UPD-1: no fault breaks it"),
        ([clause("UPD-1")], [LOST], {"UPD-1": "It cannot."}, "UPD-1: update-lost breaks it"),
        ([clause("UPD-1")], [LOST], {"UPD-9": "It cannot."}, "UPD-9 is no clause"),
        ([clause("UPD-1")], [], {"UPD-1": " "}, "UPD-1 has no reason"),
    ],
)
def test_a_judged_clause_has_a_fault_or_a_reason(clauses, faults, reasons, violation):
    found = fault_coverage.gate(clauses, [CITING], faults, reasons)
    assert (violation is None) == (found == [])
    assert violation is None or violation in found[0]


def test_every_judged_clause_has_a_fault_or_a_reason():
    reasons = fault_coverage.read_reasons(ROOT)
    assert fault_coverage.gate(CLAUSES, CASES, list(FAULTS.values()), reasons) == []


def test_a_clause_is_held_by_its_own_cases_only(made):
    report = Report(made(LOST), CLAUSES, {})
    assert "update/single-constants" in report.held_by("UPD-1")
    assert report.held_by("UPD-4") == []


# -- documents


def test_the_document_keeps_its_schema(made):
    for first_kill in (False, True):
        found = made(UNSEEN, LOST, RAISES, FALSE_REASON, first_kill=first_kill)
        for whole in (False, True):
            report = Report(replace(found, whole=whole), CLAUSES, {})
            jsonschema.validate(document(report), SCHEMA)


def test_the_summary_names_what_is_wrong(made):
    found = made(UNSEEN, LOST, RAISES, FALSE_REASON, UNREACHED)
    found = replace(found, whole=True, cases=CASES)
    told = "\n".join(summary(Report(found, CLAUSES, {"UPD-4": "A reason."})))
    for words in (
        "3 of 4 killed; 3 of 4 without layer access (all faults)",
        "SURVIVOR     unseen (update, UPD-1): It is wrong.",
        f"NOT EQUAL    false-reason: {found.kills(FALSE_REASON)[0].case}",
        "NOT REACHED  unreached: no case calls mone_ref.precision.round_to_tf32",
        "breaks down  raises: killed as errored only",
        "no fault     UPD-5: NO REASON GIVEN",
        "no fault     UPD-4: A reason.",
    ):
        assert words in told


# -- the command

APP = typer.Typer()
command.register(APP)


def called(*arguments: str) -> Result:
    return CliRunner().invoke(APP, list(arguments))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (replace(FAULTS["reload-refused-late"], id="unseen", equivalent=""), 1, "SURVIVOR"),
        (replace(FAULTS["reload-lost"], id="false-reason", equivalent="No."), 1, "NOT EQUAL"),
        (replace(FAULTS["reload-lost"], id="killed"), 0, "1 of 1 killed"),
    ],
)
def test_exit_codes(monkeypatch, fault, code, words):
    monkeypatch.setitem(FAULTS, fault.id, fault)
    result = called("--fault", fault.id, "--jobs=1")
    assert result.exit_code == code
    assert words in result.output


def test_a_stale_fault_is_told_without_a_traceback(monkeypatch):
    stale = planted("stale", Patch("mone_ref.updates", "gone", updates.write))
    monkeypatch.setitem(FAULTS, "stale", stale)
    result = called("--fault=stale", "--jobs=1")
    assert result.exit_code == 2
    assert result.stderr == "error: stale: mone_ref.updates has no step gone\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault=none-such"], "no fault 'none-such'"),
        (["--jobs=0"], "--jobs 0: expected a number from 1"),
        (["--json=no/such/place.json"], "no/such/place.json: no place for a file"),
        (["--markdown=."], ".: no place for a file"),
    ],
)
def test_usage_errors(arguments, words):
    result = called(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_fault_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(command, "FAULTS", {})
    result = called()
    assert result.exit_code == 2
    assert "the library holds no fault" in result.stderr


def test_the_list_runs_nothing(monkeypatch):
    monkeypatch.setattr(spread, "rows", None)
    result = called("--list", "--fault=dropped")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == "    Substituted routes add nothing."
    assert "    claimed by layer/mixed, outputs/olmoe-approx" in result.stdout


def test_processes_do_not_change_the_document(tmp_path):
    names = [f"--fault={name}" for name in ("reload-lost", "reload-refused-late", "update-lost")]
    one, two, table = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "table.md"
    assert called(*names, "--jobs=1", f"--json={one}").exit_code == 0
    assert called(*names, "--jobs=2", f"--json={two}", f"--markdown={table}").exit_code == 0
    assert one.read_text() == two.read_text()
    assert [fault["id"] for fault in json.loads(one.read_text())["faults"]] == [
        fault for fault in FAULTS if f"--fault={fault}" in names
    ]
    row = "| `reload-lost` | A reload is accepted and changes nothing. | UPD-4 | 1 case, first "
    assert row in table.read_text()


class TakesItsProcessDown(ReferenceBackend):
    def load(self, checkpoint, options):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_fault_that_takes_its_process_down_is_named():
    faults = [FAULTS["reload-lost"], FAULTS["update-lost"]]
    rows = spread.rows(ROOT, TakesItsProcessDown(), faults, first_kill=True, jobs=2)
    with pytest.raises(MatrixError, match="one of: reload-lost, update-lost"):
        list(rows)
