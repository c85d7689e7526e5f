"""Engines behind a completions server: two dialects, every way to fail, and nothing left running.

The servers are processes (``fake_server.py``). The real one, ``vllm serve``, is marked ``vllm``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import HANG, comes_true

from mone_ref import backends
from mone_ref.backend import LoadOptions
from mone_ref.backends import BackendError, completions, server, server_http, server_settings
from mone_ref.backends.server import ServerBackend
from mone_ref.backends.server_process import ServerProcess, by_signal
from mone_ref.backends.vllm import CPU_ENVIRONMENT, ENVIRONMENT
from mone_ref.suite import capture, cases, errormap, report, spec, verdict
from mone_ref.suite.bench import Options
from mone_ref.suite.cases import Kind
from mone_ref.suite.golden import read as read_golden
from mone_ref.suite.options import OptionError
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.run import Settings
from mone_ref.suite.runner import Harness
from mone_ref.suite.verdict import Word

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CASES = {case.id: case for case in cases.load(ROOT)}
MAP = errormap.parse({"MISSING_CONSTANT": ["no novice"]})
CONTROL, OUTPUT, REFUSAL = (
    "controls/olmoe-approx-plain",
    "outputs/olmoe-approx",
    "load/missing-constant",
)
DECODE = "decode/olmoe-approx"
MARK = "MONE_REF_TEST"


def command(flaw: str) -> str:
    fake = shlex.join([sys.executable, "-S", str(TESTS / "fake_server.py")])
    return f"{fake} {{checkpoint}} {{port}} {shlex.quote(flaw)}"


def judged(case: str, flaw: str, *arguments: str, limit: float = HANG) -> Result:
    """One case on a fake server."""
    backend = ServerBackend(command(flaw), arguments, limit)
    options = Options(limit, 2 * HANG, error_map=MAP, watchdog=False)
    return Harness(backend, backend.describe(), ROOT, options).run(CASES[case], "float32")


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test starts inherits a mark; none may outlive the test."""
    mark = f"{MARK}={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    yield
    # What was killed is gone when the kernel comes to it.
    assert comes_true(lambda: not marked(mark)), marked(mark)


def marked(mark: str) -> list[str]:
    """Command lines of the processes that carry a mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:  # it ended while we looked, or is not ours
            continue
    return found


# -- answers


@pytest.mark.parametrize(
    ("flaw", "arguments"),
    [
        ("none", []),
        ("none", ["logprobs=vllm"]),
        ("none", ["batches=list"]),
        ("none", ["top=7"]),
        ("vllm with 20 at most", []),
        ("openai with ids", []),
        ("openai with strings", ["logprobs=openai"]),
        ("openai with 5 at most", []),
        ("choices without order", []),
        ("one at a time", ["batches=concurrent"]),
        ("answers in company", []),
        ("no health page", []),
        ("no health page", ["ready_path=/v1/models"]),
        ("tells its version", ["version=1.5"]),
    ],
)
def test_an_honest_server_is_right(flaw: str, arguments: list[str]) -> None:
    result = judged(CONTROL, flaw, *arguments)
    assert result.outcome is Outcome.OK, result.found + result.evidence
    assert result.numbers is not None


def test_a_substituted_model_is_judged_beside_its_control() -> None:
    assert judged(OUTPUT, "none").outcome is Outcome.OK


def test_a_server_that_does_not_show_what_it_generates_is_not_judged_on_it() -> None:
    result = judged(DECODE, "none")
    assert result.outcome is Outcome.NOT_APPLICABLE
    assert result.found.startswith("the server does not tell how it generates: HTTP 400")


def generated(*keys: str) -> dict[str, object]:
    """Two tokens behind a prompt, with the two likeliest ids of three for each."""
    rows = [{keys[0]: -0.5, keys[1]: -1.5}, {keys[2]: -0.25, keys[0]: -2.0}]
    return {"index": 0, "logprobs": {"tokens": [keys[0], keys[2]], "top_logprobs": rows}}


@pytest.mark.parametrize("keys", [("token_id:2", "token_id:0", "token_id:1"), ("c", "a", "b")])
def test_tokens_and_scores_of_what_was_generated(keys: tuple[str, ...]) -> None:
    vocabulary = completions.Vocabulary(3, {"a": 0, "b": 1, "c": 2})
    answer = {"choices": [generated(*keys)]}
    (made,) = completions.read_continuations(answer, [[7]], completions.OpenAi(2), vocabulary)
    assert made.tokens == [2, 1]
    assert made.scores.ids is not None
    assert made.scores.ids.tolist() == [[2, 0], [1, 2]]
    assert made.scores.logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"index": 0}, "choice 0: no log-probabilities of generated tokens"),
        (
            generated("a", "b", "c") | {"finish_reason": "stop"},
            'choice 0: finish_reason "stop", expected "length"',
        ),
        ({"index": 0, "logprobs": {"tokens": [], "top_logprobs": []}}, "no log-probabilities"),
        (
            {"index": 0, "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.0}] * 2}},
            "choice 0: 1 tokens beside 2 entries",
        ),
        (
            {"index": 0, "logprobs": {"tokens": ["_"], "top_logprobs": [{"a": -1.0}]}},
            "is no token of tokenizer.json",
        ),
        (
            {"index": 0, "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.0}]}},
            "entry 0: 1 log-probabilities where 2 were due",
        ),
    ],
)
def test_an_answer_without_what_was_asked_for(choice: dict[str, object], message: str) -> None:
    vocabulary = completions.Vocabulary(3, {"a": 0, "b": 1, "c": 2})
    with pytest.raises(completions.AnswerError, match=message):
        completions.read_continuations(
            {"choices": [choice]}, [[7]], completions.OpenAi(2), vocabulary
        )


@pytest.mark.parametrize(("arguments", "width"), [([], 128), (["top=7"], 7)])
def test_as_many_ids_are_asked_for_as_there_are(arguments: list[str], width: int) -> None:
    golden = read_golden(ROOT / "fixtures" / "olmoe-approx" / "golden.safetensors")
    backend = ServerBackend(command("none"), arguments)
    checkpoint = ROOT / "fixtures" / "olmoe-approx" / "checkpoint"
    session = backend.load(checkpoint, LoadOptions())
    scored = session.score(golden.ids)
    session.close()
    session.close()  # after a failure it may be closed already
    for scores, prompt in zip(scored, golden.prompts, strict=True):
        best = prompt.logprobs[:-1].topk(width)  # the row after the last token is not asked for
        assert scores.ids is not None
        assert scores.ids.tolist() == best.indices.tolist()
        assert scores.logprobs.tolist() == best.values.tolist()


@pytest.mark.parametrize(
    ("flaw", "outcome", "found"),
    [
        ("off by one", "mismatch", "error"),
        ("null for NaN", "mismatch", "1 NaN in the answer"),
        ("other vocabulary", "mismatch", "ids between 1 and 128, expected [0, 128)"),
        ("a token less", "errored", "15 entries, expected one for each of 16 tokens"),
        ("a choice less", "errored", "choices [], expected [0], one per prompt"),
        ("empty rows", "errored", "entry 1: None instead of log-probabilities by token"),
        ("fewer than asked", "errored", "4 log-probabilities where 128 were due"),
        ("text for numbers", "errored", "entry 15: '-1.0' is no log-probability"),
        ("openai with other strings", "errored", "is no token of tokenizer.json"),
        ("one at a time", "errored", "HTTP 400"),
        ("answers 500", "errored", "HTTP 500"),
        ("truncates", "errored", "100 bytes that are no JSON"),
        ("closes the connection", "errored", "RemoteDisconnected"),
        ("no model", "errored", "/v1/models names no model: HTTP 404"),
        ("dies", "crashed", "the server was ended by signal 9"),
        ("dies later", "crashed", "the server ended with exit code 1"),
        ("killed at start", "crashed", "ended by signal 9 before it was ready"),
    ],
)
def test_a_flaw_has_its_outcome(
    flaw: str, outcome: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if outcome == "crashed":  # however long it takes to die
        monkeypatch.setattr(server_http, "LAST_WORDS", HANG)
    result = judged(CONTROL, flaw)
    assert (result.outcome, found in result.evidence + result.found) == (outcome, True), result


@pytest.mark.parametrize("flaw", ["slow", "endless", "never ready"])
def test_a_server_without_an_answer_runs_into_the_limit(flaw: str) -> None:
    result = judged(CONTROL, flaw, limit=3)
    assert result.outcome is Outcome.TIMEOUT
    assert "no answer within 3 s" in result.evidence


def test_a_server_of_another_version_than_stated_is_told() -> None:
    result = judged(CONTROL, "tells its version", "version=1.6")
    assert "the server is version '1.5', --engine-arg says 1.6" in result.found


# -- refusals


@pytest.mark.parametrize("flaw", ["none", "fails to load"])
def test_what_a_server_says_before_it_is_ready_is_its_refusal(flaw: str) -> None:
    result = judged(REFUSAL, flaw)
    expected = Outcome.OK if flaw == "none" else Outcome.VOID  # it refuses the twin as well
    assert result.outcome is expected, result
    assert "no novice" in result.evidence + result.found


def test_a_flood_keeps_its_end_which_holds_the_reason() -> None:
    result = judged(CONTROL, "floods")
    assert (result.outcome, result.codes) == (Outcome.WRONGLY_REFUSED, ("MISSING_CONSTANT",))
    assert "bytes left out" in result.evidence
    assert len(result.evidence) < capture.LIMIT + 1000


INT = "invalid literal for int() with base 10:"


@pytest.mark.parametrize(
    ("cause", "layer", "code"),
    [
        ("TypeError: int() argument must be a string, not 'list'", "0", "SUBSTITUTION/id-type"),
        (f"ValueError: {INT} 'a'", "0", "SUBSTITUTION/id-type"),
        (f"ValueError: {INT} 'one'", "one", "SUBSTITUTION/layer-key"),
        ("TypeError: 'int' object is not iterable", "0", "SUBSTITUTION/not-a-list"),
    ],
)
def test_the_cause_of_vllms_exception_stands_before_it_in_a_log(
    cause: str, layer: str, code: str
) -> None:
    said = f"ValueError: approximate_experts has an invalid entry for layer '{layer}'"
    between = ["", "The above exception was the direct cause of the following exception:", ""]
    frames = ["  File config.py, line 1", "    parse()"] * 20
    lines = [f"(EngineCore pid=1) ERROR [core.py:1] {line}" for line in [cause, *between, *frames]]
    words = errormap.load(ROOT / "conformance" / "error_maps" / "vllm.toml")
    assert words.find("\n".join([*lines, f"(EngineCore pid=1) ERROR {said}"])) == code


def test_without_an_error_map_nothing_is_a_refusal() -> None:
    backend = ServerBackend(command("none"))
    harness = Harness(backend, backend.describe(), ROOT, Options())
    result = harness.run(CASES[REFUSAL], "float32")
    assert result.outcome is Outcome.ERRORED
    assert "the server ended with exit code 3 before it was ready" in result.found


# -- nothing is left running


def test_children_that_do_not_listen_are_ended_too() -> None:
    assert judged(CONTROL, "leaves children").outcome is Outcome.OK


def test_a_server_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.2)
    assert judged(CONTROL, "deaf").outcome is Outcome.OK


def test_the_server_does_not_outlive_whoever_started_it() -> None:
    code = f"""
import os, signal
from pathlib import Path
from mone_ref.backend import LoadOptions
from mone_ref.backends.server import ServerBackend
from mone_ref.backends.server_process import ServerProcess, by_signal
from mone_ref.backends.vllm import CPU_ENVIRONMENT, ENVIRONMENT
backend = ServerBackend({command("deaf")!r})
backend.load(Path("fixtures/olmoe-approx/checkpoint"), LoadOptions())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9  # the fixture sees to the server


@pytest.mark.parametrize(
    ("code", "signalled"),
    [(-9, True), (137, True), (0, False), (1, False), (128, False), (255, False)],
)
def test_a_shell_reports_the_signal_that_ended_its_command(code: int, signalled: bool) -> None:
    assert by_signal(code) is signalled


@pytest.mark.parametrize(("chosen", "found"), [(None, "128"), ("0", "0")])
def test_fresh_memory_is_filled_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, found: str
) -> None:
    if chosen is not None:
        monkeypatch.setenv("MALLOC_PERTURB_", chosen)
    process = ServerProcess(["sh", "-c", "echo $MALLOC_PERTURB_"])
    assert process.ended(HANG) == 0
    process.stop(0)
    assert process.log() == f"{found}\n"


def test_a_program_that_cannot_be_started_leaves_no_watchdog(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    backend = ServerBackend(f"{shlex.quote(str(broken))} {{checkpoint}} {{port}}")
    with pytest.raises(OSError, match="Exec format error"):
        backend.load(tmp_path, LoadOptions())


# -- settings


def test_words_are_filled_in_without_a_shell() -> None:
    settings = server_settings.read(
        "sh -c '{checkpoint}; $HOME' --port {port} --dtype={dtype} --len {max_tokens} "
        """--json '{"a": ["{host}"]}'""",
        ["feature.lora=--enable-lora '{dtype} x'"],
    )
    options = LoadOptions(dtype="float16", max_tokens=16, features=frozenset({"lora"}))
    assert settings.words(Path("/a b"), 81, options) == [
        "sh",
        "-c",
        "/a b; $HOME",
        "--port",
        "81",
        "--dtype=float16",
        "--len",
        "17",
        "--json",
        '{"a": ["127.0.0.1"]}',
        "--enable-lora",
        "float16 x",
    ]


def test_the_engine_describes_itself_by_arguments() -> None:
    told = ["name=vllm", "version=0.33.0", "device=cuda", "dtypes=float32,bfloat16"]
    info = ServerBackend(command("none"), [*told, "compute.float32=tf32"]).describe()
    assert (info.name, info.version, info.device) == ("vllm-server", "0.33.0", "cuda")
    assert info.compute == {"float32": "tf32", "bfloat16": "bfloat16"}


def test_a_server_offers_the_ranks_that_its_command_is_told_of() -> None:
    assert ServerBackend(command("none")).describe().parallel == frozenset()
    told = ServerBackend(command("none") + " --tp={tensor_parallel}").describe()
    assert told.parallel == {"tensor_parallel"}


def test_an_engine_keeps_its_words_behind_a_server() -> None:
    known, unknown = (ServerBackend(command("none"), [f"name={name}"]) for name in ("vllm", "x"))
    assert known.error_map == ROOT / "conformance" / "error_maps" / "vllm.toml"
    assert unknown.error_map is None


@pytest.mark.parametrize(
    ("words", "arguments", "message"),
    [
        ("", [], "needs --serve-cmd"),
        ("sh {port}", [], "{checkpoint} is missing"),
        ("sh {checkpoint}", [], "{port} is missing"),
        ("sh {checkpoint} {prot}", [], "{prot} is no placeholder; known: {checkpoint} {port}"),
        ("sh '{checkpoint} {port}", [], "No closing quotation"),
        ("no-such-program {checkpoint} {port}", [], "there is no program 'no-such-program'"),
        ("sh {checkpoint} {port}", ["colour=red"], "colour=red: a server has name, version"),
        ("sh {checkpoint} {port}", ["logprobs=both"], "logprobs=both: expected vllm or openai"),
        ("sh {checkpoint} {port}", ["top=-1"], "top=-1: expected a whole number"),
        ("sh {checkpoint} {port}", ["batches=all"], "batches=all: expected list or concurrent"),
        ("sh {checkpoint} {port}", ["compute.float16=tf32"], "dtypes are float32"),
        ("sh {checkpoint} {port}", ["feature.lora='"], "No closing quotation"),
        ("sh {checkpoint} {port}", ["feature.lora={lora}"], "{lora} is no placeholder"),
    ],
)
def test_settings_that_cannot_be_used(words: str, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        server_settings.read(words, arguments)
    assert message in str(caught.value)


def test_a_serve_command_is_for_servers_only() -> None:
    with pytest.raises(BackendError, match="--serve-cmd is for --backend=server, not 'reference'"):
        backends.chosen(Settings(backend="reference", serve_cmd=command("none")))
    with pytest.raises(BackendError, match="needs --serve-cmd"):
        backends.chosen(Settings(backend="server"))


# -- the command, and its verdict


def conform(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from mone_ref.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "conform", "--backend=server", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )


def test_a_run_tells_how_to_repeat_a_case(tmp_path: Path) -> None:
    serving = f"--serve-cmd={command('off by one')}"
    done = conform(tmp_path, serving, f"--case={CONTROL}", "--report=r.jsonl")
    assert done.returncode == 1
    assert f"--backend=server {shlex.quote(serving)}" in done.stdout
    (line,) = report.read(tmp_path / "r.jsonl").results
    assert line["outcome"] == "mismatch"


def test_a_broken_command_is_a_usage_error(tmp_path: Path) -> None:
    done = conform(tmp_path, "--serve-cmd=sh {port}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --serve-cmd 'sh {port}': {checkpoint} is missing" in done.stderr


def test_the_best_verdict_of_a_server_is_incomplete() -> None:
    """Nothing is updated over HTTP, and a whole group of MUST clauses is about that."""
    clauses = spec.load(ROOT)
    asked = [REFUSAL, "update/single-constants", "update/reload-refused", "rows/olmoe-approx"]
    found = {case: judged(case, "none") for case in asked}
    assert [result.outcome for result in found.values()] == ["ok", *["not-applicable"] * 3]
    kinds = {CASES[case].kind: result.outcome for case, result in found.items()}
    kinds |= dict.fromkeys((Kind.UPDATE_REFUSAL, Kind.LAYER), kinds[Kind.UPDATE])
    results = [
        Result(case.id, "float32", kinds.get(case.kind, Outcome.OK), "", "")
        for case in CASES.values()
    ]
    concluded = verdict.conclude(results, list(CASES.values()), clauses, partial=False)
    assert (concluded.word, concluded.missing) == (Word.INCOMPLETE, ("UPD",))


# -- the real one

VLLM_SERVE = (
    f"{Path(sys.executable).with_name('vllm')} serve "
    "{checkpoint} --host {host} --port {port} "
    "--dtype {dtype} --max-model-len {max_tokens} --max-num-seqs {max_prompts} --max-logprobs -1 "
    "--skip-tokenizer-init --enforce-eager --no-enable-prefix-caching "
    "--kv-cache-memory-bytes 16777216"
)
CPU_ONLY = """ --compilation-config '{"custom_ops": ["none"]}'"""


@pytest.mark.vllm
def test_vllm_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.cuda.is_available()
    for name, value in (ENVIRONMENT | ({} if cuda else CPU_ENVIRONMENT)).items():
        monkeypatch.setenv(name, value)
    backend = ServerBackend(
        VLLM_SERVE + ("" if cuda else CPU_ONLY),
        ["version=0.33.0", f"compute.float32={'tf32' if cuda else 'float32'}"],
        call_limit=300,
    )
    assert backend.error_map is not None
    options = Options(time_limit=300, error_map=errormap.load(backend.error_map))
    harness = Harness(backend, backend.describe(), ROOT, options)
    expected: dict[str, tuple[str, ...]] = {
        CONTROL: (),
        OUTPUT: (),
        REFUSAL: ("MISSING_CONSTANT/absent",),
        DECODE: (),
        "format/layer-key-word": ("SUBSTITUTION/layer-key",),
    }
    for case, codes in expected.items():
        result = harness.run(CASES[case], "float32")
        assert (result.outcome, result.codes) == (Outcome.OK, codes), result
