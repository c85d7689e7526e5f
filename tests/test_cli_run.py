"""``mone-ref run``: answers against goldens, routes against the second oracle, and refusals."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import handmade
import pytest
import scalar_oracle
import torch
from handmade import safetensors, write
from safetensors.torch import load_file

from mone_ref.backend import Scores
from mone_ref.cli import main
from mone_ref.families import REFUSED
from mone_ref.suite import golden
from mone_ref.suite.compare import compare

ROOT = Path(__file__).resolve().parent.parent / "fixtures"
FIXTURES = sorted(path.parent.name for path in ROOT.glob("*/recipe.yaml"))
DTYPES = ("float32", "bfloat16", "float16")
CERTIFIED = [
    (fixture, dtype)
    for fixture in FIXTURES
    for dtype in golden.read(ROOT / fixture / "golden.safetensors").compute_types
    if dtype in DTYPES
]


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as stop:
        main(["run", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code, *capsys.readouterr()


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """The document of a prompt that is answered."""
    status, out, err = run(capsys, *words, "--json")
    document: dict[str, Any] = json.loads(out)
    assert (status, document["exit_code"], err) == (0, 0, "")
    return document


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def plain(directory: Path, **changes: Any) -> Path:
    """The checkpoint written by hand, with another config."""
    config = handmade.config() | changes
    return write(
        directory, {"config.json": config, "model.safetensors": safetensors(handmade.tensors())}
    )


# -- answers


@pytest.mark.parametrize(("fixture", "dtype"), CERTIFIED)
def test_every_golden_is_met(fixture: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ROOT / fixture
    right = golden.read(directory / "golden.safetensors")
    vocabulary = right.prompts[0].logprobs.shape[1]
    for prompt in right.prompts:
        words = ["--tokens", joined(prompt.ids), "--dtype", dtype, "--top", str(vocabulary)]
        told = answer(capsys, directory / "checkpoint", *words, "--all-positions")
        rows = [position["top"] for position in told["positions"]]
        ids = torch.tensor([[one["token"] for one in row] for row in rows])  # [T, V]
        values = torch.tensor([[one["logprob"] for one in row] for row in rows])  # [T, V]
        assert not compare(Scores(values, ids), prompt, dtype).flaw
        assert torch.equal(values, values.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_routes_are_those_of_the_second_oracle(
    fixture: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest prompt of each fixture, layer by layer and expert by expert."""
    directory = ROOT / fixture / "checkpoint"
    prompt = min(golden.read(ROOT / fixture / "golden.safetensors").ids, key=len)
    routed: dict[int, list[int]] = {}
    routes_of = scalar_oracle.routes_of

    def recorded(config: Any, weights: Any, prefix: str, logits: Any) -> Any:
        routes = routes_of(config, weights, prefix, logits)
        layer = int(prefix.split("layers.")[1].split(".")[0])
        routed.setdefault(layer, []).extend(expert for expert, _ in routes)
        return routes

    monkeypatch.setattr(scalar_oracle, "routes_of", recorded)
    scalar_oracle.log_probabilities(directory, prompt)
    listed = scalar_oracle.constant_names(scalar_oracle.read_config(directory))
    expected = []
    for layer, ids in sorted(routed.items()):
        hits = {str(expert): ids.count(expert) for expert in sorted(listed.get(layer, {}))}
        total = sum(hits.values())
        counts = {"layer": layer, "routes": len(ids), "substituted": total}
        expected.append(counts | {"share": total / len(ids), "experts": hits})
    assert answer(capsys, directory, "--tokens", joined(prompt))["layers"] == expected


def test_routes_that_one_can_count_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights are one, so every logit of a router ties, and ties go to the lower ids 0 and 1.

    Layer 0 substitutes 1 and 3: half of its routes hit expert 1. Layer 1 substitutes none.
    Every token is as likely as any other: log(1/5) = -1.6094 each.
    """
    status, out, _ = run(capsys, plain(tmp_path), "--tokens", "4 0,2", "--top", "2")
    assert status == 0
    assert out.splitlines() == [
        "olmoe, 2 layers, 4 experts, 2 per token, substitution approx, float32",
        "after token 2 at position 2",
        "      token    log-prob        prob",
        "          0     -1.6094      0.2000",
        "          1     -1.6094      0.2000",
        "routes to substituted experts",
        "  layer 0: 3 of 6 (50.0%): expert 1 (3)",
        "  layer 1: 0 of 6 (0.0%)",
    ]


def test_a_file_of_tokens_is_read_like_the_option(
    tmp_path: Path, approx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("5, 17\n3\t99\n")
    told = answer(capsys, approx, "--tokens-file", file)
    assert told["tokens"] == [5, 17, 3, 99]
    assert told == answer(capsys, approx, "--tokens", "5,17,3,99")


def test_findings_that_stop_no_load_stand_beside_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = plain(tmp_path, approximate_expert_init_tokens={"0": [0, 0]})
    status, out, err = run(capsys, directory, "--tokens", "1")
    assert status == 0
    assert out.startswith("olmoe, 2 layers")
    assert err.startswith("note SUBSTITUTION/dialect config.json: ")
    (finding,) = answer(capsys, directory, "--tokens", "1")["findings"]
    assert finding["code"] == "SUBSTITUTION/dialect"


def test_a_number_that_is_none_is_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = handmade.tensors()
    stored["lm_head.weight"] = handmade.bf16([5, 4], b"\xc0\x7f")  # NaN
    write(tmp_path, {"config.json": handmade.config(), "model.safetensors": safetensors(stored)})
    told = answer(capsys, tmp_path, "--tokens", "1", "--top", "5")
    assert [one["logprob"] for one in told["positions"][0]["top"]] == [None] * 5


# -- prompts that cannot be asked

BAD_PROMPTS: list[tuple[list[str], list[str]]] = [
    (["--tokens", "5,x,1.0"], ["PROMPT/not-an-id --tokens[1]: found 'x'",
                               "PROMPT/not-an-id --tokens[2]: found '1.0'"]),
    (["--tokens", "-1"], ["PROMPT/not-an-id --tokens[0]: found '-1'"]),
    (["--tokens", "\u0663"], ["PROMPT/not-an-id --tokens[0]: found '\\u0663'"]),
    (["--tokens", "[1, 2]"], ["PROMPT/not-an-id --tokens[0]: found '[1'",
                              "PROMPT/not-an-id --tokens[1]: found '2]'"]),
    (["--tokens", "9" * 5000], ["PROMPT/not-an-id --tokens[0]: found '9999"]),
    (["--tokens", ""], ["PROMPT/empty --tokens: found no token"]),
    (["--tokens", " , "], ["PROMPT/empty --tokens: found no token"]),
    (["--tokens", "127,128,500"], [
        "PROMPT/vocabulary --tokens[1]: found 128, expected a token id from 0 to 127",
        "PROMPT/vocabulary --tokens[2]: found 500, expected a token id from 0 to 127"]),
    (["--tokens", joined([1] * 65)], [
        "PROMPT/too-long --tokens: found 65 tokens, expected at most 64, "
        "the model's max_position_embeddings"]),
    ([], ["PROMPT/source --tokens, --tokens-file: found none of them, expected one of them"]),
    (["--tokens", "1", "--tokens-file", "x"],
        ["PROMPT/source --tokens, --tokens-file: found both, expected one of them"]),
    (["--tokens-file", "/nowhere/ids"], ["PROMPT/file '/nowhere/ids': found 'No such file"]),
    (["--tokens-file", "/"], ["PROMPT/file '/': found 'not a regular file'"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), BAD_PROMPTS, ids=lambda words: str(words)[:40])
def test_a_prompt_that_cannot_be_asked_exits_2(
    words: list[str], expected: list[str], approx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, approx, *words)
    assert (status, out) == (2, "")
    told = err.splitlines()
    assert len(told) == len(expected)
    for line, beginning in zip(told, expected, strict=True):
        assert line.startswith(f"error {beginning}")
    status, out, err = run(capsys, approx, *words, "--json")
    document = json.loads(out)
    assert (status, document["exit_code"], err) == (2, 2, "")
    codes = [fault["code"] for fault in document["findings"]]
    assert codes == [beginning.split()[0] for beginning in expected]


def test_the_longest_prompt_is_answered(approx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(capsys, approx, "--tokens", joined([1] * 64))["tokens"]) == 64


def test_of_many_faults_the_first_are_told(
    approx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = run(capsys, approx, "--tokens", joined([999] * 50))
    told = err.splitlines()
    assert len(told) == 21
    assert told[-1] == "error PROMPT/vocabulary --tokens: found 30 more, expected none"


@pytest.mark.parametrize(
    ("data", "found"), [(b"5 \xff", "byte 2 that is no UTF-8"), (b" " * (2**24 + 1), "more bytes")]
)
def test_a_file_that_holds_no_prompt(
    data: bytes, found: str, tmp_path: Path, approx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids"
    file.write_bytes(data)
    status, _, err = run(capsys, approx, "--tokens-file", file)
    assert status == 2
    assert f"found {found}" in err


@pytest.mark.parametrize("words", [["--dtype", "int8"], ["--top", "0"], ["--steps", "3"]])
def test_wrong_usage_exits_2(
    words: list[str], approx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, approx, "--tokens", "1", *words)[0] == 2


# -- checkpoints that are refused


def test_a_broken_checkpoint_is_refused_with_every_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = handmade.tensors()
    missing = "model.layers.0.mlp.experts.1.approx_value"
    del stored[missing], stored["lm_head.weight"]
    write(tmp_path, {"config.json": handmade.config(), "model.safetensors": safetensors(stored)})
    status, out, err = run(capsys, tmp_path, "--tokens", "1")
    assert (status, out) == (1, "")
    first, second, summary = err.splitlines()
    assert first.startswith(f"error MISSING_CONSTANT/absent model.safetensors: {missing}: ")
    assert second.startswith("error MODEL_WEIGHTS/missing model.safetensors: lm_head.weight: ")
    assert summary.startswith(f"{tmp_path}: 2 errors")
    status, out, err = run(capsys, tmp_path, "--tokens", "1", "--json")
    document = json.loads(out)
    assert (status, document["exit_code"], err) == (1, 1, "")
    codes = [finding["code"] for finding in document["findings"]]
    assert codes == ["MISSING_CONSTANT/absent", "MODEL_WEIGHTS/missing"]


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_family_that_is_not_computed_is_refused_with_its_reason(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = plain(tmp_path, architectures=[architecture], model_type="x")
    status, out, err = run(capsys, directory, "--tokens", "1")
    assert (status, out) == (1, "")
    first = err.splitlines()[0]
    assert first.startswith("error CONFIG_MODEL/unknown-family config.json: $.architectures: ")
    assert REFUSED[architecture] in first


def test_a_path_that_is_no_directory_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, tmp_path / "absent", "--tokens", "1")
    assert (status, out) == (2, "")
    assert err.startswith("error CHECKPOINT/not-a-directory ")


def test_a_dtype_in_which_a_constant_is_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = handmade.tensors()
    name = "model.layers.0.mlp.experts.1.approx_value"
    stored[name] = handmade.bf16([4], b"\xc3\x47")  # 99840
    write(tmp_path, {"config.json": handmade.config(), "model.safetensors": safetensors(stored)})
    assert run(capsys, tmp_path, "--tokens", "1")[0] == 0
    status, _, err = run(capsys, tmp_path, "--tokens", "1", "--dtype", "float16")
    assert status == 1
    assert err.startswith("error NON_FINITE_CONSTANT/overflow ")


def test_a_model_beyond_this_machines_memory_is_told_before_it_is_read(
    approx: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine, of one page of 4 kB: this one cannot be made smaller."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1}.__getitem__)
    status, out, err = run(capsys, approx, "--tokens", "1")
    assert (status, out) == (2, "")
    parameters = 4 * stored_elements(approx / "model.safetensors") / 1e3
    assert err == (
        f"error PROMPT/memory model and prompt: found {parameters:.2f} kB of parameters and "
        "1.54 kB for the prompt in float32, "  # three rows of 128 in 4 bytes
        "expected at most 4.10 kB, the memory of this machine\n"
    )
    status, out, err = run(capsys, approx, "--tokens", "1", "--json")
    assert (status, err) == (2, "")
    assert [fault["code"] for fault in json.loads(out)["findings"]] == ["PROMPT/memory"]


def test_a_prompt_beyond_this_machines_memory_is_told_where_a_config_bounds_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four times 2 heads and 300 000 squared scores in 4 bytes: 2.88 TB."""
    config = handmade.config()
    config.pop("max_position_embeddings", None)
    stored = safetensors(handmade.tensors())
    write(tmp_path, {"config.json": config, "model.safetensors": stored})
    file = tmp_path / "ids"
    file.write_text("1 " * 300_000)
    status, out, err = run(capsys, tmp_path, "--tokens-file", file)
    assert (status, out) == (2, "")
    assert err.startswith("error PROMPT/memory ")
    assert "2880.00 GB for the prompt in float32" in err


def stored_elements(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())


# -- progress

DRAWN = """
import sys
from mone_ref.cli import main, run
run.LARGE = int(sys.argv.pop(1))
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("large", "shown"), [(0, True), (2**30, False)])
def test_a_terminal_sees_the_progress_of_a_large_load_only(
    large: int, shown: bool, approx: Path
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", DRAWN, str(large), "run", str(approx), "--tokens", "1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment, cwd=ROOT.parent
    ) as child:
        os.close(theirs)
        drawn = drain(ours)
        assert child.stdout is not None
        out = child.stdout.read().decode()
    assert child.returncode == 0
    assert out.startswith("olmoe, 2 layers")
    assert ("loading" in drawn) == shown


def drain(terminal: int) -> str:
    """Everything that is written to a terminal until its other end is closed."""
    pieces = []
    try:
        while piece := os.read(terminal, 4096):
            pieces.append(piece)
    except OSError as error:  # Linux says so in place of an end
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(terminal)
    return b"".join(pieces).decode()


def test_nothing_is_drawn_into_a_pipe(
    approx: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mone_ref.cli import run as command

    monkeypatch.setattr(command, "LARGE", 0)
    assert run(capsys, approx, "--tokens", "1")[2] == ""
