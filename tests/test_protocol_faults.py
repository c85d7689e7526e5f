"""Engines that break the protocol, each a real process: the outcome, its text, and what goes on."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from patience import HANG, comes_true

from mone_ref.backend import LoadOptions
from mone_ref.backends import BackendError, conversation
from mone_ref.backends.child import Child
from mone_ref.backends.process import ProcessBackend, commanded
from mone_ref.errors import Phase
from mone_ref.protocol.failures import ProtocolError
from mone_ref.suite import cases, errormap, options
from mone_ref.suite.bench import Options
from mone_ref.suite.capture import LIMIT
from mone_ref.suite.outcomes import Result
from mone_ref.suite.run import Run, Settings
from mone_ref.suite.runner import Harness

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
ENGINE = str(TESTS / "faulty_engine.py")
WORDS = errormap.parse({"MISSING_CONSTANT": ["no novice for expert"]})

SCORED = "controls/olmoe-approx-plain"
LAYER = "layer/routes"


# It waits for the first request: a line before that is another fault.
HELLO = (
    'import os; os.read(int(os.environ["MONE_REF_READ_FD"]), 1); '
    'os.write(int(os.environ["MONE_REF_WRITE_FD"]), b"hello\\n")'
)


@pytest.fixture(scope="module")
def by_id() -> dict[str, cases.Case]:
    return {case.id: case for case in cases.load(ROOT)}


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """A process that has closed its pipes is waited for until it ends, however long that takes."""
    monkeypatch.setattr(conversation, "CLOSED_GRACE", HANG)


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The process group of every engine that a test starts; at its end all must be empty."""
    groups: list[int] = []

    class Noted(Child):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            groups.append(self.pid)

    monkeypatch.setattr(conversation, "Child", Noted)
    return groups


def engine(fault: str) -> ProcessBackend:
    return ProcessBackend([sys.executable, ENGINE, fault], HANG, os.environ)


def harness(fault: str, case_limit: float = 2 * HANG) -> Harness:
    backend = engine(fault)
    told = Options(HANG, case_limit, error_map=WORDS, watchdog=False)
    return Harness(backend, backend.describe(), ROOT, told)


def members(group: int) -> list[str]:
    """Processes of a group that run; zombies wait for a parent that may never look."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        state, _, its_group = text.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(text)
    return found


def all_gone(groups: list[int]) -> bool:
    """Whether every group becomes empty: the kernel takes a moment to end what was killed."""
    return comes_true(lambda: not any(members(group) for group in groups))


# Fault -> outcome of the case it strikes in, and words of the reason.
STRUCK = {
    # the process
    "segfault": ("crashed", "the engine's process was killed by SIGSEGV during score"),
    "exit_3": ("crashed", "the engine's process exited with code 3 during score"),
    "exit_0": ("crashed", "the engine's process exited with code 0 during score"),
    "killed": ("crashed", "the engine's process was killed by SIGKILL during score"),
    "abort_with_words": ("crashed", "was killed by SIGABRT during score"),
    "out_of_memory": ("crashed", "MemoryError"),
    "dies_before_descendants": ("crashed", "exited with code 1 during score"),
    "close_pipes": ("errored", "the engine closed its pipes and went on running, during score"),
    # lines
    "garbage": ("errored", "score: a line that is not JSON"),
    "broken_bytes": ("errored", "score: a line that is not JSON (byte 8 is not UTF-8"),
    "overlong": ("errored", "score: a line of more than 1048576 bytes"),
    "half_a_line": ("crashed", "exited with code 0 during score"),
    "not_an_object": ("errored", "score: a line that is no JSON object"),
    "key_twice": ("errored", "score: a line that is no JSON object with distinct keys"),
    "not_a_number": ("errored", "NaN is not JSON"),
    # the order of messages
    "seq_of_the_future": ("errored", "score: an answer to request 8; asked was 3"),
    "seq_of_the_past": ("errored", "an answer to request 2, which had its answer; asked was 3"),
    "two_answers": ("errored", "score: a line that nobody asked for"),
    "answer_of_another_command": ("errored", "answer.score: $: "),
    "unknown_kind": ("errored", "answer: $.answer: "),
    "unknown_ability": ("errored", "answer.load: $.abilities[0]: "),
    # tensor files
    "too_few_answers": ("errored", "score: 0 answers for 1 prompts"),
    "too_many_answers": ("errored", "score: 99 answers for 1 prompts"),
    "answers_misnamed": ("errored", "score: no tensor 'logprobs.0' in the answer"),
    "other_shape": ("mismatch", "shape [7], expected"),
    "other_dtype": ("mismatch", "no float tensor"),
    "file_truncated": ("errored", "score: tensor file '3.out': "),
    "file_missing": ("errored", "tensor file 'none.safetensors': No such file"),
    "file_outside": ("errored", "outside.safetensors' is not in the exchange directory"),
    "file_absolute": ("errored", "3.out' is not in the exchange directory"),
    "file_is_a_link": ("errored", "tensor file 'link': is a symbolic link"),
    "file_is_a_directory": ("errored", "tensor file 'directory' is no regular file"),
    "file_is_a_pipe": ("errored", "tensor file 'pipe' is no regular file"),
    "file_huge": ("errored", "tensor file 'huge' has 1099511627776 bytes, at most 268435456"),
    # what it says
    "flood_then_fail": ("errored", "gave up"),
    "refuses_with_a_code": (
        "wrongly-refused",
        "refused at load: rank 0: no",
    ),
    "refuses_in_its_own_words": ("wrongly-refused", "no novice for expert 5"),
    "refuses_in_a_log": ("wrongly-refused", "RuntimeError: worker failed"),
    "stumbles": ("errored", "KeyError: 'layers.1'"),
    "has_no_models": ("not-applicable", "layers only"),
}


@pytest.mark.parametrize("fault", STRUCK)
def test_a_fault_costs_its_case_and_no_other(fault, by_id, started, monkeypatch):
    if fault == "close_pipes":
        monkeypatch.setattr(conversation, "CLOSED_GRACE", 0.5)
    judge = harness(fault)
    struck = judge.run(by_id[SCORED], "float32")
    after = judge.run(by_id[LAYER], "float32")
    outcome, words = STRUCK[fault]
    assert (str(struck.outcome), struck.case) == (outcome, SCORED)
    assert words in struck.found
    assert str(after.outcome) == "ok"
    assert judge.close() is None
    assert all_gone(started)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("answer_again_later", "close: an answer to request"),
        ("answer_after_close", "close: a line that nobody asked for"),
    ],
)
def test_a_fault_at_the_close_is_told_beside_the_answers(fault, words, by_id, started):
    judge = harness(fault)
    result = judge.run(by_id[SCORED], "float32")
    assert "close() failed: " in result.evidence
    assert words in result.evidence
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    assert words in judge.close().first_line  # of the layer, which is closed last
    assert len(started) == 2
    assert all_gone(started)


@pytest.mark.parametrize("fault", ["honest", "split", "flood", "prints_a_fake_answer"])
def test_what_is_no_fault_of_the_protocol_costs_nothing(fault, by_id, started):
    judge = harness(fault)
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    assert judge.close() is None
    assert len(started) == 1
    assert all_gone(started)


@pytest.mark.parametrize("fault", ["hang", "hang_with_descendants"])
def test_a_hang_is_ended_with_all_descendants(fault, by_id, started):
    judge = harness(fault)
    struck = judge.run(by_id[SCORED], "float32")
    assert str(struck.outcome) == "timeout"
    assert f"no answer within {HANG:g} s" in struck.found
    assert ("so far" in struck.evidence) == (fault == "hang")
    assert all_gone(started)
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    assert judge.close() is None
    assert len(started) == 2
    assert all_gone(started)


def test_a_case_has_a_limit_of_its_own(by_id, started):
    judge = harness("hang_at_load", case_limit=3.0)
    struck = judge.run(by_id[SCORED], "float32")
    assert str(struck.outcome) == "timeout"
    assert "the case was not over within 3 s" in struck.found
    # What was cut short by one case's limit is asked again by the next.
    again = judge.run(by_id[SCORED], "float32")
    assert len(started) == 2
    assert "the case was not over within 3 s" in again.found
    judge.bench.engine.guard.case_limit = HANG
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    assert judge.close() is None
    assert all_gone(started)


def test_descendants_of_a_dead_process_are_ended_too(by_id, started):
    judge = harness("dies_before_descendants")
    judge.run(by_id[SCORED], "float32")
    assert all_gone(started)
    judge.close()


def test_an_engine_is_started_again_only_when_it_must(by_id, started):
    judge = harness("stumbles")
    for case in (SCORED, LAYER, SCORED, LAYER):
        judge.run(by_id[case], "float32")
    assert len(started) == 1
    judge.close()
    crashing = harness("exit_3")
    for case in (SCORED, LAYER, LAYER):
        crashing.run(by_id[case], "float32")
    assert len(started) == 3
    crashing.close()


def test_a_process_that_died_between_two_requests_is_told_at_the_next(by_id, started):
    judge = harness("dies_idle")
    assert "no tensor" not in judge.run(by_id[SCORED], "float32").found
    os.waitid(os.P_PID, started[0], os.WEXITED | os.WNOWAIT)
    struck = judge.run(by_id[LAYER], "float32")
    assert str(struck.outcome) == "crashed"
    assert "the engine's process exited with code 5 before build_layer" in struck.found
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    judge.close()


def test_last_words_before_a_crash_are_evidence_and_no_refusal(by_id):
    result = harness_result("abort_with_words", by_id)
    assert (str(result.outcome), result.codes) == ("crashed", ())
    assert "no novice for expert 5" in result.evidence
    told = harness_result("segfault", by_id)
    assert "about to fall" in told.evidence


def test_a_refusal_over_the_wire_keeps_codes_phase_and_every_rank(by_id):
    result = harness_result("refuses_with_a_code", by_id)
    assert result.codes == ("MISSING_CONSTANT/absent", "SUBSTITUTION/id-range")
    assert result.phase == str(Phase.LOAD)
    assert result.evidence == "rank 0: no\nrank 1: no"
    for fault in ("refuses_in_its_own_words", "refuses_in_a_log"):
        result = harness_result(fault, by_id)
        assert result.codes == ("MISSING_CONSTANT",)
    assert "worker 0: no novice for expert 5" in result.evidence


def test_a_flood_leaves_a_bounded_tail(by_id):
    result = harness_result("flood_then_fail", by_id)
    assert "bytes left out]" in result.evidence
    assert LIMIT <= len(result.evidence) < LIMIT + 200
    assert result.evidence.endswith("noise")


def test_an_ability_that_a_layer_lacks_is_not_applicable(by_id):
    judge = harness("has_no_such_kernel")
    result = judge.run(by_id[LAYER], "float32")
    assert (str(result.outcome), result.found) == ("not-applicable", "no kernel of this size")
    result = judge.run(by_id["layer/mixed"], "float32")
    assert "have no forward()" in result.found
    result = judge.run(by_id["rows/olmoe-approx"], "float32")
    assert result.found == "the engine has no expert_rows()"
    judge.close()


def test_a_session_whose_process_broke_the_protocol_stays_broken(by_id, started):
    backend = engine("garbage")
    backend.describe()
    checkpoint = ROOT / "fixtures" / "olmoe-approx-plain" / "checkpoint"
    session = backend.load(checkpoint, LoadOptions())
    for words in ("^score: a line that is not JSON", "ended after a breach of the protocol: score"):
        with pytest.raises(ProtocolError, match=words):
            session.score([[1, 2]])
    session.close()  # with its process, nothing is left to close
    backend.close()
    assert all_gone(started)


def test_a_result_that_lacks_is_named(by_id):
    judge = harness("result_missing")
    result = judge.run(by_id[LAYER], "float32")
    assert "rewrite_routes: no tensor 'constants' in the answer" in result.found
    judge.close()


def harness_result(fault: str, by_id) -> Result:
    judge = harness(fault)
    try:
        return judge.run(by_id[SCORED], "float32")
    finally:
        judge.close()


# -- the beginning and the end


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other_version", "the engine speaks protocol 2, the suite 1"),
        ("speaks_first", "start: an answer to request 0"),
    ],
)
def test_a_handshake_that_fails_is_one_clear_error(fault, words, started):
    backend = engine(fault)
    with pytest.raises(ProtocolError, match=words):
        backend.describe()
    with pytest.raises(options.OptionError, match=f"the engine cannot describe itself: .*{words}"):
        Run(Settings("x"), backend, ROOT)
    assert len(started) == 2
    assert all_gone(started)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("true", "the engine's process exited with code 0 during start"),
        ("sh -c 'echo no licence; exit 4'", "the engine's process exited with code 4 during start"),
        (shlex.join([sys.executable, "-c", HELLO]), "start: a line that is not JSON .*hello"),
    ],
)
def test_a_command_that_is_no_engine_is_one_clear_error(command, words, started):
    with pytest.raises(options.OptionError, match=words):
        Run(Settings("x"), commanded(command), ROOT)
    assert all_gone(started)


def test_a_command_without_a_program_is_told_before_anything_is_started(started):
    with pytest.raises(BackendError, match="--backend-cmd: there is no program 'no-such-command'"):
        commanded("no-such-command --now")
    assert not started


def test_an_engine_that_never_answers_the_handshake_is_ended(started):
    backend = ProcessBackend(["sleep", "600"], 1.0, os.environ)
    with pytest.raises(TimeoutError, match="no answer to start within 1 s"):
        backend.describe()
    assert all_gone(started)


def test_an_engine_must_be_the_same_after_a_restart(by_id, started, tmp_path):
    script = tmp_path / "engine.sh"
    words = shlex.join([sys.executable, ENGINE])
    script.write_text(f'V="$(cat {shlex.quote(str(tmp_path))}/v)"; exec {words} "$V"\n')
    (tmp_path / "v").write_text("exit_3")
    backend = ProcessBackend(["sh", str(script)], HANG, os.environ)
    judge = Harness(backend, backend.describe(), ROOT)
    (tmp_path / "v").write_text("other_version")
    assert str(judge.run(by_id[SCORED], "float32").outcome) == "crashed"
    after = judge.run(by_id[LAYER], "float32")
    assert str(after.outcome) == "errored"
    assert "the engine speaks protocol 2" in after.found
    assert all_gone(started)


def test_a_line_after_the_stop_is_told(by_id, started):
    judge = harness("answer_after_stop")
    assert str(judge.run(by_id[LAYER], "float32").outcome) == "ok"
    closing = judge.close()
    assert "stop: a line that nobody asked for" in closing.first_line
    assert all_gone(started)
