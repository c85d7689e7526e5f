"""Captures, evidence, time limits and error maps: what is taken for a refusal, and what is not."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fake_engines as fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG

from mone_ref.backend import Crashed, Refused
from mone_ref.errors import Code, Phase, Problem, Rejected
from mone_ref.protocol.failures import ProtocolError, Relayed, RelayedRefusal
from mone_ref.suite import capture, errormap
from mone_ref.suite import guard as guard_module
from mone_ref.suite.errormap import Ambiguous, ErrorMap, ErrorMapError
from mone_ref.suite.guard import Failed, Failure, Guard

MAP = errormap.parse(
    {
        "MISSING_CONSTANT": ["no novice"],
        "SUBSTITUTION/id-range": [r"id \d+ is too large$"],
        "SUBSTITUTION": ["bad list"],
    }
)


def captured(write) -> str:
    caught = capture.Captured()
    with capture.output(caught):
        write()
    return caught.text


def call(function, error_map: ErrorMap = MAP):
    return Guard(error_map, HANG).call(Phase.LOAD, function)


def raising(error: BaseException):
    def function():
        raise error

    return function


# -- capture


def test_everything_a_process_tree_writes_is_captured():
    def write():
        print("print")
        print("error", file=sys.stderr)
        os.write(1, b"descriptor\n")
        subprocess.run(["sh", "-c", "echo child; echo complaint >&2"], check=True)

    text = captured(write)
    assert all(word in text for word in ("print", "error", "descriptor", "child", "complaint"))


def test_descriptors_and_streams_are_restored_after_a_failure():
    before = sys.stdout, sys.stderr, file_of(1), file_of(2)
    with pytest.raises(SystemExit):
        captured(raising(SystemExit(3)))
    assert (sys.stdout, sys.stderr, file_of(1), file_of(2)) == before


def file_of(descriptor: int) -> tuple[int, int]:
    """Which file it is, whatever was written to it in the meantime."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def test_captures_nest_and_do_not_mix():
    inner = []

    def write():
        print("outer")
        inner.append(captured(lambda: print("inner")))
        print("again")

    outer = captured(write)
    assert inner == ["inner\n"]
    assert outer == "outer\ninner\nagain\n"
    assert captured(lambda: print("next")) == "next\n"


def test_a_worker_started_earlier_is_heard_in_later_calls():
    """Engines keep workers; their descriptors are those of the call that started them."""
    worker = []

    def start():
        command = ["sh", "-c", "read line; echo late $line >&2"]
        worker.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))

    def speak():
        worker[0].communicate("words\n")

    assert captured(start) == ""
    assert captured(speak) == "late words\n"


def test_a_log_handler_made_during_a_call_survives_it():
    handlers = []
    captured(lambda: handlers.append(logging.StreamHandler()))
    record = logging.LogRecord("engine", logging.INFO, "", 0, "still here", None, None)
    assert captured(lambda: handlers[0].emit(record)) == "still here\n"


def test_long_output_keeps_its_end():
    text = captured(lambda: print("x" * capture.LIMIT + "end"))
    assert text.startswith("[4 bytes left out]\n")
    assert text.endswith("end\n")


def test_broken_bytes_are_shown():
    assert captured(lambda: os.write(2, b"\xff")) == r"\xff"


@given(st.text(max_size=30))
def test_any_text_can_be_printed(text):
    assert (
        captured(lambda: print(text, end="")) == text.encode("utf-8", "backslashreplace").decode()
    )


def test_the_chain_tells_causes_contexts_notes_and_groups():
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from OSError("cause")
    except ValueError as error:
        error.add_note("a note")
        group = ExceptionGroup("both", [error, TypeError("third")])
    told = capture.chain(group)
    for words in ("both", "ValueError: second", "a note", "OSError: cause", "'first'", "third"):
        assert words in told


def test_the_chain_ends_when_it_bites_its_tail():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert capture.chain(one).count("ValueError") == 2


def test_an_exception_that_cannot_print_itself_is_named():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Mute: <no message: RuntimeError>" in capture.chain(Mute())


# -- failures


def test_a_value_is_handed_on():
    assert call(lambda: 7) == 7
    assert call(lambda: None) is None


@pytest.mark.parametrize(
    ("error", "kind", "codes"),
    [
        (Refused("x", code="MISSING_CONSTANT/absent"), "refused", ("MISSING_CONSTANT/absent",)),
        (Refused("x", code=Code.ID_RANGE), "refused", ("SUBSTITUTION/id-range",)),
        (Refused(["rank 0", "no novice"]), "refused", ("MISSING_CONSTANT",)),
        (Refused("x"), "refused", ()),
        (ValueError("id 9 is too large"), "refused", ("SUBSTITUTION/id-range",)),
        (ValueError("bad list: id 9 is too large"), "refused", ("SUBSTITUTION/id-range",)),
        (ValueError("bad list, no novice"), "errored", ()),
        (ValueError("x"), "errored", ()),
        (MemoryError("no novice"), "crashed", ()),
        (RuntimeError("CUDA out of memory; no novice"), "crashed", ()),
        (Crashed("no novice"), "crashed", ()),
        (ProtocolError("a line that is not JSON: no novice"), "errored", ()),
        (Relayed("engine.Error: id 9 is too large"), "refused", ("SUBSTITUTION/id-range",)),
        (Relayed("builtins.MemoryError: no novice"), "crashed", ()),
        (RelayedRefusal(["x"], None, ["A/b", "C"]), "refused", ("A/b", "C")),
        (SystemExit(0), "crashed", ()),
        (KeyboardInterrupt(), "crashed", ()),
        (GeneratorExit(), "crashed", ()),
    ],
)
def test_only_deliberate_refusals_are_refusals(error, kind, codes):
    failure = call(raising(error))
    assert isinstance(failure, Failure)
    assert (str(failure.kind), failure.codes) == (kind, codes)


def test_a_rejection_carries_all_its_codes_and_its_phase():
    problems = [
        Problem(Code.MISSING_CONSTANT, Phase.LOAD, "a", "nothing", "a tensor"),
        Problem(Code.ID_RANGE, Phase.PARSE, "$", "9", "less"),
    ]
    failure = call(raising(Rejected(problems)))
    assert failure.codes == ("MISSING_CONSTANT/absent", "SUBSTITUTION/id-range")
    assert failure.phase is Phase.PARSE


def test_the_exception_goes_before_the_log():
    def function():
        print("warning: bad list ahead")
        raise ValueError("no novice")

    assert call(function).codes == ("MISSING_CONSTANT",)


def test_memory_that_ran_out_in_a_worker_is_no_refusal():
    def function():
        os.write(2, b"torch.OutOfMemoryError: tried to allocate\n")
        raise RuntimeError("no novice")

    assert call(function).kind is Failed.CRASHED


def test_an_ambiguous_message_names_both_patterns():
    failure = call(raising(ValueError("bad list, no novice")))
    assert "MISSING_CONSTANT: 'no novice'; SUBSTITUTION: 'bad list'" in failure.evidence


def test_a_call_beyond_the_limit_is_a_timeout_with_what_it_said():
    passed = []

    def function():
        print("so far")
        fakes.hang()
        passed.append("the alarm")

    failure = call(function)
    assert failure.kind is Failed.TIMEOUT
    assert f"no answer within {HANG:g} s\nso far" in failure.evidence
    assert not passed


def test_a_limit_is_kept_by_its_own_clock():
    late = Guard(MAP, limit=0.1, watchdog=False).call(Phase.RUN, lambda: time.sleep(600))
    assert late == Failure(Failed.TIMEOUT, Phase.RUN, "no answer within 0.1 s\n")


def test_the_calls_of_one_case_share_a_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    guard = Guard(MAP, limit=HANG, case_limit=100.0, watchdog=False)
    guard.begin_case()
    assert guard.call(Phase.RUN, lambda: 1) == 1
    now[0] = 99.9  # a tenth of a second is left
    late = guard.call(Phase.RUN, lambda: time.sleep(600))
    assert (late.kind, late.first_line) == (Failed.TIMEOUT, "the case was not over within 100 s")
    assert not guard.case_over
    now[0] = 100.0
    assert guard.case_over
    asked = []
    never = guard.call(Phase.RUN, lambda: asked.append(1))
    assert never == Failure(Failed.TIMEOUT, Phase.RUN, "the case was not over within 100 s")
    assert asked == []
    # What is open is closed all the same, and the next case starts afresh.
    assert guard.call(Phase.RUN, lambda: "closed", closing=True) == "closed"
    guard.begin_case()
    assert guard.call(Phase.RUN, lambda: 2) == 2


def test_what_another_process_told_is_evidence_as_it_stands():
    told = "engine.Error: first\nbuiltins.OSError: cause"
    assert call(raising(Relayed(told))).evidence == told
    assert capture.chain(RelayedRefusal(["rank 0: no", "rank 1: no"], None, [])) == (
        "rank 0: no\nrank 1: no"
    )


def test_the_alarm_is_off_after_a_call():
    assert call(lambda: signal.getitimer(signal.ITIMER_REAL))[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_users_interrupt_passes():
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        call(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_cannot_judge():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="from the main thread"):
        pool.submit(call, lambda: 1).result()


# -- error maps


def test_the_first_detailed_code_of_a_group_is_told():
    assert MAP.find("bad list: id 9 is too large") == "SUBSTITUTION/id-range"
    assert MAP.find("bad list") == "SUBSTITUTION"
    assert MAP.find("fine") is None
    with pytest.raises(Ambiguous):
        MAP.find("bad list, no novice")


def test_patterns_see_single_lines():
    assert MAP.find("engine: id 9 is too large\nstack follows") == "SUBSTITUTION/id-range"


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("= broken", "Invalid"),
        ('NOVICE = ["x"]', "NOVICE: no such code"),
        ('"SUBSTITUTION/novice" = ["x"]', "SUBSTITUTION/novice: no such code"),
        ('SUBSTITUTION = "x"', "SUBSTITUTION: expected a list"),
        ('SUBSTITUTION = ["ok", 3]', "SUBSTITUTION: expected a list"),
        ('SUBSTITUTION = [""]', "SUBSTITUTION: expected a list"),
        ('SUBSTITUTION = ["(x"]', r"SUBSTITUTION: '\(x' does not compile"),
        ('reliable = "no"', "reliable is 'no'"),
    ],
)
def test_a_broken_error_map_is_refused_with_file_and_key(text, flaw, tmp_path):
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises(ErrorMapError, match=f"map.toml: .*{flaw}"):
        errormap.load(path)


def test_an_unreliable_map_says_so(tmp_path):
    path = tmp_path / "map.toml"
    path.write_text('reliable = false\nSUBSTITUTION = ["bad"]')
    read = errormap.load(path)
    assert read.reliable is False
    assert read.find("bad") == "SUBSTITUTION"


def test_a_missing_error_map_is_told(tmp_path):
    with pytest.raises(ErrorMapError, match=re.escape(str(tmp_path / "none.toml"))):
        errormap.load(tmp_path / "none.toml")
