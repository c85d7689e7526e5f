"""Python engines in a process of their own: judged as in process, and what only that survives."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_engines as fakes
import pytest
from patience import HANG
from test_suite_conform import conform
from test_suite_fakes import BAD_UPDATE, CONTROL, MISSING, OUTPUT, ROWS, UPDATE, harness

from mone_ref.backend import Backend, LoadOptions, capable
from mone_ref.backends import process
from mone_ref.suite import cases, errormap, report
from mone_ref.suite.bench import Options
from mone_ref.suite.outcomes import Result
from mone_ref.suite.runner import Harness

ROOT = Path(__file__).resolve().parent.parent
WORDS = errormap.parse({"MISSING_CONSTANT": ["no novice for expert"]})
ROUTES, LAYER = "layer/routes", "layer/mixed"

ASKED: dict[type[Backend], tuple[str, ...]] = {
    fakes.Honest: (CONTROL, OUTPUT, ROWS, MISSING, UPDATE, BAD_UPDATE, ROUTES, LAYER),
    fakes.HasItsOwnWords: (MISSING,),
    fakes.LogsItsWords: (MISSING,),
    fakes.RunsOutOfMemory: (MISSING,),
    fakes.AnswersNothing: (CONTROL, OUTPUT),
    fakes.LosesARowOnUpdate: (UPDATE,),
    fakes.CannotLetGo: (CONTROL, ROUTES),
    fakes.ZeroesItsArgument: (ROUTES,),
}
"""Engines of many kinds, and cases that tell them apart."""


@pytest.fixture(scope="module")
def by_id() -> dict[str, cases.Case]:
    return {case.id: case for case in cases.load(ROOT)}


def isolated(kind: type[Backend]) -> Harness:
    engine = process.isolated(f"fake_engines:{kind.__name__}")
    return Harness(
        engine, engine.describe(), ROOT, Options(HANG, 2 * HANG, error_map=WORDS, watchdog=False)
    )


def without_time(result: Result) -> dict[str, Any]:
    return replace(result, seconds=0.0).as_dict()


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_an_isolated_engine_gets_the_same_results(kind, by_id):
    here, there = harness(kind), isolated(kind)
    assert there.bench.info == here.bench.info
    for name in ASKED[kind]:
        expected = without_time(here.run(by_id[name], "float32"))
        assert without_time(there.run(by_id[name], "float32")) == expected
    assert there.close() is None


@pytest.mark.parametrize(
    ("kind", "outcome", "found"),
    [
        (fakes.Dies, "crashed", "the engine's process exited with code 0 during load"),
        (fakes.InterruptsItself, "crashed", "the engine's process was killed by SIGINT"),
        (fakes.Sticks, "timeout", "no answer within 10 s"),
    ],
)
def test_what_ends_or_blocks_a_process_costs_one_case(kind, outcome, found, by_id):
    judge = isolated(kind)
    assert str(judge.run(by_id[OUTPUT], "float32").outcome) == "ok"  # it is the twin
    guard = judge.bench.engine.guard
    guard.limit = 10.0 if kind is fakes.Sticks else guard.limit
    struck = judge.run(by_id[MISSING], "float32")
    guard.limit = HANG
    assert str(struck.outcome) == outcome
    assert found in struck.found
    assert str(judge.run(by_id[ROUTES], "float32").outcome) == "ok"
    assert judge.close() is None


def test_a_session_tells_what_its_engine_can_do():
    engine = process.isolated("fake_engines:ScoresOnly")
    engine.describe()
    assert capable(engine, "build_layer")
    checkpoint = ROOT / "fixtures" / "olmoe-approx" / "checkpoint"
    session = engine.load(checkpoint, LoadOptions())
    assert not any(capable(session, name) for name in ("update", "trace", "expert_rows"))
    session.close()
    whole = process.isolated("reference")
    whole.describe()
    session = whole.load(checkpoint, LoadOptions())
    assert session.expert_rows() == {0: 6, 1: 5}
    [trace] = session.trace([[1, 2, 3]])
    assert trace["layers.1.router_ids"].shape[0] == 3
    session.close()
    for one in (engine, whole):
        one.close()


def test_a_whole_command_line(tmp_path):
    selection = ("--isolate", "--case=load/missing-constant", "--case=layer/routes")
    done = conform(
        tmp_path, "--backend=fake_engines:Dies", *selection, "--report=r.jsonl", "--dtype=float32"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    read = report.read(tmp_path / "r.jsonl")
    told = {line["case"]: line["outcome"] for line in read.results}
    assert told == {"load/missing-constant": "crashed", "layer/routes": "ok"}
    assert "--backend=fake_engines:Dies --isolate --case load/missing-constant" in done.stdout


def test_a_command_as_engine_from_the_command_line(tmp_path):
    command = shlex.join([sys.executable, str(ROOT / "docs" / "minimal_engine.py")])
    done = conform(
        tmp_path, f"--backend-cmd={command}", "--case=layer/routes", "--case=layer/mixed"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine       minimal 1 (cpu, float32)" in done.stdout
    assert "1 passed, 1 undecided" in done.stdout
    none = conform(tmp_path, "--backend=none", "--isolate", "--case=layer/routes")
    assert none.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no backend 'none': known are" in none.stderr
    assert "Traceback" not in none.stderr


def test_the_worker_of_a_suite_that_is_gone_ends_itself(tmp_path):
    """Also where nobody watches it: its requests end."""
    requests, answers = os.pipe(), os.pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "MONE_REF_READ_FD": str(requests[0]),
        "MONE_REF_WRITE_FD": str(answers[1]),
    }
    command = [sys.executable, "-m", "mone_ref.backends.worker", "reference"]
    with subprocess.Popen(command, env=environment, pass_fds=(requests[0], answers[1])) as worker:
        for descriptor in (*requests, *answers):
            os.close(descriptor)
        assert worker.wait(timeout=HANG) == 0
