"""``mone-ref validate``: exit codes, text and JSON, and what the command imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import handmade
import pytest
from handmade import bf16, safetensors, write

import mone_ref
from mone_ref.checkpoint.text import plain
from mone_ref.cli import COMMANDS, main
from mone_ref.errors import Code, Rejected

ROOT = Path(__file__).parent.parent
FILE = "model.safetensors"
CONSTANT = "model.layers.0.mlp.experts.1.approx_value"


def checkpoint(directory: Path, *dropped: str, **added: Any) -> Path:
    stored = handmade.tensors() | added
    for name in dropped:
        del stored[name]
    return write(directory, {"config.json": handmade.config(), FILE: safetensors(stored)})


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Exit code and standard output."""
    with pytest.raises(SystemExit) as stop:
        main(["validate", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code, capsys.readouterr().out


def shown(path: Path) -> str:
    """A path as messages have it, which cut a long one."""
    return plain(str(path))


def test_a_clean_checkpoint_prints_a_summary_and_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, checkpoint(tmp_path))
    assert status == 0
    assert text == (
        f"{shown(tmp_path)}: 0 errors, 0 warnings, 0 notes, 41 tensors in 1 file, "
        "2 substituted experts in 1 layer\n"
    )


def test_an_error_is_one_line_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, checkpoint(tmp_path, CONSTANT))
    first, summary = text.splitlines()
    assert status == 1
    assert first == (
        f"error MISSING_CONSTANT/absent {FILE}: {CONSTANT}: found nothing, "
        "expected the constant of substituted expert 1 of layer 0 [LOAD-7]"
    )
    assert summary.startswith(f"{shown(tmp_path)}: 1 error, 0 warnings, 0 notes, 40 tensors")


@pytest.mark.parametrize(
    ("extra", "plain", "strict"),
    [
        ("mtp.layers.0.mlp.experts.1.approx_value", (0, "warning"), (1, "error")),
        ("rotary.inv_freq", (0, "note"), (0, "note")),
    ],
)
def test_strict_makes_errors_of_warnings_and_leaves_notes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: str,
    plain: tuple[int, str],
    strict: tuple[int, str],
) -> None:
    directory = checkpoint(tmp_path, **{extra: bf16([4])})
    for options, (status, severity) in (([], plain), (["--strict"], strict)):
        code, text = run(capsys, directory, *options)
        assert code == status
        assert text.startswith(f"{severity} MODEL_WEIGHTS/unknown {FILE}: {extra}: ")


def test_dtype_asks_whether_constants_stay_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = bf16([4], b"\xc3\x47")  # 99840
    directory = checkpoint(tmp_path, **{CONSTANT: loud})
    assert run(capsys, directory)[0] == 0
    assert run(capsys, directory, "--dtype", "bfloat16")[0] == 0
    status, text = run(capsys, directory, "--dtype", "float16")
    assert status == 1
    assert text.startswith("error NON_FINITE_CONSTANT/overflow ")


def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, checkpoint(tmp_path, CONSTANT), "--json")
    document = json.loads(text)
    findings = document.pop("findings")
    assert document == {
        "path": str(tmp_path),
        "exit_code": status,
        "counts": {"error": 1, "warning": 0, "note": 0},
        "files": [FILE],
        "tensors": 40,
        "tensor_bytes": sum(len(data) for _, _, data in handmade.tensors().values()) - 8,
        "form": "approx",
        "substituted": {"0": [1, 3]},
        "not_modelled": [],
    }
    assert findings == [
        {
            "group": "MISSING_CONSTANT",
            "detail": "absent",
            "code": "MISSING_CONSTANT/absent",
            "phase": "load",
            "severity": "error",
            "file": FILE,
            "where": CONSTANT,
            "found": "nothing",
            "expected": "the constant of substituted expert 1 of layer 0",
            "clause": "LOAD-7",
        }
    ]


def test_an_unknown_architecture_is_no_finding_and_the_summary_says_what_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    directory = write(tmp_path, {"config.json": config, FILE: safetensors({"a": bf16([2])})})
    status, text = run(capsys, directory)
    summary, limit = text.splitlines()
    assert status == 0
    assert summary == f"{shown(directory)}: 0 errors, 0 warnings, 0 notes, 1 tensor in 1 file"
    assert limit.startswith("not checked: names, shapes and types of the model's tensors")
    assert "found architectures ['NovelForCausalLM']" in limit
    (reason,) = json.loads(run(capsys, directory, "--json")[1])["not_modelled"]
    assert (reason["code"], reason["where"]) == ("CONFIG_MODEL/unknown-family", "$.architectures")


def test_a_feature_that_is_not_computed_is_no_finding_and_the_list_is_still_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = handmade.tensors()
    config = handmade.config() | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    directory = write(tmp_path, {"config.json": config, FILE: safetensors(stored)})
    status, text = run(capsys, directory)
    summary, limit = text.splitlines()
    assert status == 0
    assert summary.endswith("41 tensors in 1 file, 2 substituted experts in 1 layer")
    assert limit.startswith("not computed by the reference: $.rope_scaling.rope_type: found 'yarn'")
    with pytest.raises(Rejected) as refusal:
        mone_ref.load(directory)
    assert refusal.value.codes == (Code.MODEL_FEATURE,)
    del stored[CONSTANT]
    write(tmp_path, {FILE: safetensors(stored)})
    status, text = run(capsys, directory)
    assert status == 1
    assert text.startswith("error MISSING_CONSTANT/absent")


def test_scan_reads_every_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    directory = checkpoint(tmp_path, **{name: bf16([3, 4], b"\xc0\x7f")})
    assert run(capsys, directory)[0] == 0
    status, text = run(capsys, directory, "--scan")
    assert status == 0
    assert text.startswith(f"warning MODEL_WEIGHTS/non-finite-weight {FILE}: {name}: found 12 ")
    assert run(capsys, directory, "--scan", "--strict")[0] == 1


def test_json_of_an_unreadable_config_has_no_sizes_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint(tmp_path)
    (directory / "config.json").write_bytes(b"{")
    status, text = run(capsys, directory, "--json")
    document = json.loads(text)
    assert (status, document["tensors"]) == (1, 41)
    assert (document["form"], document["substituted"]) == (None, None)


def test_long_runs_of_one_code_are_cut_in_text_and_whole_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = handmade.config() | {"num_experts": 64, "approximate_experts": {"0": [*range(1, 64)]}}
    files = {"config.json": config, FILE: safetensors(handmade.tensors())}
    directory = write(tmp_path, files)
    text = run(capsys, directory)[1].splitlines()
    # Experts 1 and 3 have constants; the other 61 of the list do not.
    assert sum("MISSING_CONSTANT" in line and "found" in line for line in text) == 20
    assert "... and 41 more MISSING_CONSTANT/absent (--json lists all)" in text
    codes = [item["code"] for item in json.loads(run(capsys, directory, "--json")[1])["findings"]]
    assert codes.count("MISSING_CONSTANT/absent") == 61


@pytest.mark.parametrize("place", ["absent", FILE])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_is_no_directory_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, options: list[str]
) -> None:
    status, text = run(capsys, checkpoint(tmp_path) / place, *options)
    assert status == 2
    assert "CHECKPOINT/not-a-directory" in text


def test_a_bad_file_in_a_directory_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint(tmp_path)
    (directory / FILE).write_bytes(b"")
    assert run(capsys, directory)[0] == 1


@pytest.mark.parametrize(
    "words",
    [["validate"], ["validate", ".", "--dtype", "int8"], ["validate", ".", "--nope"], ["nope"]],
)
def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "Usage: mone-ref" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    files = (ROOT / "mone_ref" / "cli").glob("[a-z]*.py")
    commands = {path.stem for path in files if "def register(" in path.read_text(encoding="utf-8")}
    assert commands == set(COMMANDS)
    assert all(f" {name} " in listed for name in commands)


def python(
    script: str, *words: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_validate_starts_without_torch(tmp_path: Path) -> None:
    script = """
import atexit, sys
from mone_ref.cli import main
atexit.register(lambda: print([name for name in ("torch", "jsonschema") if name in sys.modules]))
main()
"""
    done = python(script, "validate", checkpoint(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("absent", "words", "extra"),
    [
        ("typer", ["validate", "."], "cli"),
        ("typer", ["--help"], "cli"),
        ("jsonschema", ["fixtures", "list"], "cli"),
        ("pytest", ["conform"], "conformance"),
        ("packaging", ["conform"], "conformance"),
        ("jinja2", ["report", "a.jsonl"], "conformance"),
    ],
)
def test_without_an_extra_one_line_says_what_to_install(
    absent: str, words: list[str], extra: str
) -> None:
    # None in sys.modules makes Python report the module as not installed.
    script = f"import sys; sys.modules[{absent!r}] = None; from mone_ref.cli import main; main()"
    done = python(script, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    told = rf'error: {absent}(\.\w+)? is not installed: pip install "mone-ref\[{extra}\]"\n'
    assert re.fullmatch(told, done.stderr)


def test_help_lists_what_can_run_and_how_to_install_the_rest() -> None:
    script = "import sys; sys.modules['jsonschema'] = None; from mone_ref.cli import main; main()"
    done = python(script, "--help")
    assert done.returncode == 0, done.stderr
    assert " validate " in done.stdout
    assert 'fixtures: pip install "mone-ref[cli]"' in done.stdout


def test_a_path_that_is_not_text_is_printed_escaped(tmp_path: Path) -> None:
    directory = checkpoint(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n")))
    for options in ([], ["--json"]):
        words = ("validate", directory.name, *options)
        done = python("from mone_ref.cli import main; main()", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "\\udcff\\n" in done.stdout
