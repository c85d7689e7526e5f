"""The command itself: options, exit codes, a process that dies, a user's own configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_engines as fakes
import pytest
from patience import HANG

from mone_ref import backends
from mone_ref.backends import BackendError
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.suite import options, report, run
from mone_ref.suite.options import OptionError
from mone_ref.suite.report import ReportError
from mone_ref.suite.run import Run, Settings

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def conform(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``mone-ref conform`` in a directory that has the fakes in its path."""
    command = [sys.executable, "-c", "from mone_ref.cli import main; main()", "conform"]
    command.append("--no-diagnosis")  # test_diagnosis.py has it; here it would only take time
    paths = os.pathsep.join((str(ROOT), str(TESTS)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


def fake(name: str) -> str:
    return f"--backend=fake_engines:{name}"


# -- whole runs


def test_advice_leaves_exit_code_0_and_is_told(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = conform(
        tmp_path,
        fake("AcceptsDuplicates"),
        "--report=r.jsonl",
        "--markdown=r.md",
        "--write-expectations=e.toml",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict      CONFORMANT WITH ADVICE" in done.stdout
    assert "advice: format/id-duplicate at float32: wrongly-accepted" in done.stdout
    assert "FMT-20 (SHOULD)" in done.stdout
    assert "--case format/id-duplicate --dtype float32" in done.stdout
    read = report.read(tmp_path / "r.jsonl")
    assert read.footer["verdict"] == "CONFORMANT WITH ADVICE"
    failed = [line["case"] for line in read.results if line["status"] == "advice"]
    assert failed == ["format/id-duplicate"]
    assert "format/id-duplicate" in (tmp_path / "r.md").read_text()
    # What it wrote is refused until someone gives a reason, and then agrees.
    again = conform(tmp_path, fake("AcceptsDuplicates"), "--expectations=e.toml")
    assert again.returncode == 4
    assert "format/id-duplicate: a deviation needs a reason" in again.stderr
    declared = (tmp_path / "e.toml").read_text().replace('reason = ""', 'reason = "known"')
    (tmp_path / "e.toml").write_text(declared)
    done = conform(tmp_path, fake("AcceptsDuplicates"), "--expectations=e.toml", "--report=r.jsonl")
    assert done.returncode == 0
    lines = {line["case"]: line for line in report.read(tmp_path / "r.jsonl").results}
    assert lines["format/id-duplicate"]["declared"] == {"reason": "known", "link": ""}
    assert lines["load/constant-nan"]["declared"] is None
    assert "declared     format/id-duplicate float32: wrongly-accepted: known" in done.stdout
    assert "verdict      CONFORMANT WITH ADVICE" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"pytest.ini", "r.jsonl", "r.md", "e.toml"}


def test_a_declared_broken_must_is_still_not_conformant(tmp_path):
    text = '[[deviation]]\nid = "rows/{}"\noutcome = "mismatch"\nreason = "known"\n'
    rows = (ROOT / "conformance" / "cases" / "rows").glob("*.yaml")
    (tmp_path / "e.toml").write_text("".join(text.format(path.stem) for path in rows))
    done = conform(tmp_path, fake("CountsWrong"), "--expectations=e.toml")
    assert done.returncode == 0, done.stdout
    assert "verdict      NOT CONFORMANT" in done.stdout
    done = conform(tmp_path, fake("CountsWrong"))
    assert done.returncode == 1
    assert "verdict      NOT CONFORMANT" in done.stdout
    done = conform(tmp_path, fake("Honest"), "--expectations=e.toml")
    assert done.returncode == 1
    assert "rows/olmoe-approx float32: declared mismatch, found ok" in done.stdout
    assert "verdict      CONFORMANT" in done.stdout


# -- partial runs


def test_a_partial_run_has_no_verdict(tmp_path):
    for selection in (["--case=outputs/olmoe-approx"], ["-k", "outputs/olmoe-approx"]):
        done = conform(tmp_path, fake("Honest"), *selection, "--write-expectations=e.toml")
        assert done.returncode == 0
        assert "PARTIAL RUN: no verdict" in done.stdout
        assert "1 passed" in done.stdout
        assert "e.toml needs a whole run" in done.stdout
    done = conform(tmp_path, fake("SwapsTokens"), "--case=controls/*")
    assert done.returncode == 1


def test_nothing_to_judge_is_a_failure(tmp_path):
    done = conform(tmp_path, fake("Honest"), "-k", "no-such-name")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "nothing was judged" in done.stdout


# -- an engine that takes the process with it


def test_a_process_that_dies_leaves_a_report_that_names_the_case_and_never_exit_code_0(tmp_path):
    done = conform(tmp_path, fake("Dies"), "--case=load/missing-constant", "--report=r.jsonl")
    assert done.returncode == 1
    assert "verdict" not in done.stdout
    assert "the process ended during load/missing-constant at float32 (exit code 0)" in done.stderr
    with pytest.raises(ReportError, match=r"process died during load/missing-constant at float32"):
        report.read(tmp_path / "r.jsonl")


def test_a_call_of_os_exit_is_a_crash_and_the_run_goes_on(tmp_path):
    selection = ("--case=load/missing-constant", "--case=outputs/olmoe-approx", "--dtype=float32")
    done = conform(tmp_path, fake("Exits"), *selection, "--report=r.jsonl")
    assert done.returncode == 1
    told = {line["case"]: line["outcome"] for line in report.read(tmp_path / "r.jsonl").results}
    assert told == {"load/missing-constant": "crashed", "outputs/olmoe-approx": "ok"}


def test_a_call_stuck_outside_python_ends_with_its_stacks(tmp_path):
    selection = ("--case=load/missing-constant", "--report=r.jsonl", "--call-limit=10")
    done = conform(tmp_path, fake("Sticks"), *selection)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "fake_engines.py" in done.stderr
    with pytest.raises(ReportError, match="load/missing-constant"):
        report.read(tmp_path / "r.jsonl")


# -- usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend=none"], "no backend 'none': known are grouped, reference"),
        ([fake("Honest"), "--case=load/none"], "--case load/none: no such case"),
        ([fake("Honest"), "--error-map=none.toml"], "none.toml"),
        (["--backend-cmd="], "--backend-cmd: found an empty value, expected COMMAND"),
    ],
)
def test_bad_options_are_usage_errors_without_a_traceback(arguments, message, tmp_path):
    done = conform(tmp_path, *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_option(tmp_path):
    done = conform(tmp_path, "--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in options.OPTIONS)


def test_pytest_itself_runs_the_same(tmp_path):
    command = [sys.executable, "-m", "pytest", "conformance", fake("Honest"), "--collect-only"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS)))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_refusals.py::test_refusal[load/missing-constant-float32]" in done.stdout


# -- in process


def test_an_empty_value_is_not_the_default():
    with pytest.raises(OptionError, match="--case: found an empty value, expected ID"):
        options.check_value("--case", ["load/*", ""])
    for unset in (None, [], ["load/*"], 120.0):
        options.check_value("--case", unset)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("no driver\nfor \x1b[31mthis"), r"RuntimeError: no driver \| for this$"),
        (SystemExit(0), "SystemExit: 0$"),
    ],
)
def test_an_engine_that_does_not_describe_itself_is_told_on_one_line(error, told):
    class Mute(fakes.Honest):
        def describe(self):
            raise error

    with pytest.raises(OptionError, match=f"^the engine cannot describe itself: .*{told}"):
        Run(Settings("mute"), Mute(), ROOT)


def test_a_description_is_not_waited_for_without_end():
    class Slow(fakes.Honest):
        def describe(self):
            fakes.hang()

    with pytest.raises(OptionError, match=r"cannot describe itself: no answer within 600 s$"):
        Run(Settings("slow", call_limit=600.0), Slow(), ROOT)


def test_engine_arguments_are_json_where_they_can_be():
    given = ["a=1", "b=true", "c=text", 'd={"x": [1]}', "e=", "f=x=y"]
    assert options.engine_args(given) == {
        "a": 1,
        "b": True,
        "c": "text",
        "d": {"x": [1]},
        "e": "",
        "f": "x=y",
    }
    with pytest.raises(OptionError, match="a stands twice"):
        options.engine_args(["a=1", "a=2"])
    with pytest.raises(OptionError, match="KEY=VALUE"):
        options.engine_args(["=1"])


def test_backends_are_found_by_name_and_by_class():
    assert isinstance(backends.find("reference"), ReferenceBackend)
    assert isinstance(backends.find("fake_engines:Honest"), fakes.Honest)


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        ("reference2", "no backend 'reference2': known are grouped, reference"),
        ("", "no backend ''"),
        ("fake_engines:", "no backend"),
        ("fake_engines:Nobody", "cannot be made: AttributeError"),
        ("no_such_module:X", "cannot be made: ModuleNotFoundError"),
        ("fake_engines:Uniform", "makes no mone_ref.backend.Backend but Uniform"),
        ("fake_engines:Wrapped", "cannot be made: TypeError"),
    ],
)
def test_a_backend_that_cannot_be_had_is_one_error(name, flaw):
    with pytest.raises(BackendError, match=flaw):
        backends.find(name)


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({"patterns": ("load/none",)}, "--case load/none: no such case"),
        ({"dtypes": ("float16",)}, "--dtype float16: fake runs float32"),
        ({"engine_args": ("x",)}, "--engine-arg x: expected KEY=VALUE"),
        ({"error_map": Path("none.toml")}, "none.toml"),
        ({"expectations": Path("none.toml")}, "none.toml"),
        ({"report": Path("none/r.jsonl")}, "no such directory"),
        ({"report": Path("r"), "markdown": Path("tests/../r")}, "two options write this file"),
    ],
)
def test_settings_that_cannot_be_used_are_told_before_the_first_case(change, flaw):
    with pytest.raises(ValueError, match=flaw):
        Run(Settings("fake", **change), fakes.Honest(), ROOT)


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({"compute": {"fp32": "float32"}}, "'fp32' is no dtype"),
        ({"compute": {"float32": "fp32"}}, "'fp32' is no compute type"),
        ({"compute": {}}, "declares no dtype"),
        ({"features": frozenset({"magic"})}, "'magic' is no feature"),
    ],
)
def test_an_engine_that_describes_itself_wrongly_is_refused(change, flaw):
    class Odd(fakes.Honest):
        def describe(self):
            return replace(super().describe(), **change)

    with pytest.raises(OptionError, match=flaw):
        Run(Settings("odd"), Odd(), ROOT)


def test_a_run_repeats_the_engines_options_in_its_advice():
    settings = Settings("x:Y", engine_args=("a=1",), error_map=Path("m.toml"))
    assert settings.chosen_by() == ["--backend=x:Y", "--engine-arg=a=1", "--error-map=m.toml"]
    assert run.existing(Path("no such file")) is None


def test_a_declaration_for_a_dtype_that_was_not_chosen_is_no_problem(tmp_path):
    entry = '[[deviation]]\nid = "{}"\noutcome = "mismatch"\nreason = "known"\n'
    (tmp_path / "e.toml").write_text(entry.format("load/constant-overflows-float16"))
    settings = Settings(
        "reference",
        dtypes=("float32",),
        patterns=("load/constant-overflows-float16", "outputs/olmoe-top20"),
        expectations=tmp_path / "e.toml",
    )
    run = Run(settings, ReferenceBackend(), ROOT)
    for case, dtype in run.planned:
        run.judge(case, dtype)
    statuses = {(r.case, r.dtype): run.status(r) for r in run.results}
    assert statuses == {
        ("load/constant-overflows-float16", "float16"): "undecided",
        ("outputs/olmoe-top20", "float32"): "ok",
    }
    assert run.passes()
