"""The engine of docs/minimal_engine.py with one fault in how it speaks: ``faulty_engine.py FAULT``.

Each fault strikes at one command, and at every one of that kind; everything else is honest.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import minimal_engine as engine
import numpy as np
from safetensors.numpy import save_file

Message = dict[str, Any]
FAULTS: dict[str, tuple[str, Callable[[Message], None]]] = {}


def at(command: str) -> Callable[[Callable[[Message], None]], Callable[[Message], None]]:
    """Register a fault by the name of its function; it sends whatever it sends."""

    def register(fault: Callable[[Message], None]) -> Callable[[Message], None]:
        FAULTS[fault.__name__] = command, fault
        return fault

    return register


def honest(request: Message) -> bytes:
    return json.dumps({"seq": request["seq"], **engine.answer(request)}).encode() + b"\n"


def send(line: bytes) -> None:
    engine.ANSWERS.write(line)


def send_file(request: Message, name: str) -> None:
    engine.send(request, {"answer": "ok", "tensors": name})


def send_tensors(request: Message, tensors: dict[str, np.ndarray]) -> None:
    engine.send(request, {"answer": "ok", **engine.saved(request, tensors)})


# -- about the process


@at("score")
def segfault(request: Message) -> None:
    print("about to fall", file=sys.stderr, flush=True)
    ctypes.string_at(0)


@at("score")
def exit_3(request: Message) -> None:
    sys.exit(3)


@at("score")
def exit_0(request: Message) -> None:
    os._exit(0)


@at("score")
def killed(request: Message) -> None:
    os.kill(os.getpid(), 9)


@at("score")
def abort_with_words(request: Message) -> None:
    """Its last words look like a refusal."""
    os.write(2, b"no novice for expert 5\n")
    os.abort()


@at("close")
def dies_idle(request: Message) -> None:
    send(honest(request))
    os._exit(5)


@at("score")
def out_of_memory(request: Message) -> None:
    engine.send(request, {"answer": "failed", "evidence": "MemoryError: no novice for expert 5"})


@at("score")
def hang(request: Message) -> None:
    print("so far", flush=True)
    ring()
    time.sleep(600)


@at("score")
def hang_with_descendants(request: Message) -> None:
    descend()
    ring()
    time.sleep(600)


@at("load")
def hang_at_load(request: Message) -> None:
    time.sleep(600)


def ring() -> None:
    """Let the suite's alarm ring now: its limit can be long, and nobody waits for it."""
    os.kill(os.getppid(), signal.SIGALRM)


@at("score")
def dies_before_descendants(request: Message) -> None:
    descend()
    os._exit(1)


def descend() -> None:
    """Children and grandchildren, one of which holds both pipes of the protocol open."""
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


@at("score")
def close_pipes(request: Message) -> None:
    engine.ANSWERS.close()
    time.sleep(600)


@at("rewrite_routes")
def flood(request: Message) -> None:
    """Far more than a pipe holds, to both streams, then the right answer."""
    for _ in range(200):
        os.write(1, b"noise " * 20000)
        os.write(2, b"NOISE " * 20000)
    send(honest(request))


@at("score")
def flood_then_fail(request: Message) -> None:
    for _ in range(20):
        os.write(2, b"noise " * 20000)
    engine.send(request, {"answer": "failed", "evidence": "gave up"})


@at("rewrite_routes")
def prints_a_fake_answer(request: Message) -> None:
    """Lines on standard output are no answers."""
    print(json.dumps({"seq": request["seq"], "answer": "refused", "evidence": ["x"]}), flush=True)
    send(honest(request))


# -- about lines


@at("rewrite_routes")
def split(request: Message) -> None:
    """Byte by byte: legal."""
    for byte in honest(request):
        send(bytes([byte]))


@at("score")
def garbage(request: Message) -> None:
    send(b"no novice for expert 5\n")


@at("score")
def broken_bytes(request: Message) -> None:
    send(b'{"seq": \xff\xfe}\n')


@at("score")
def overlong(request: Message) -> None:
    send(b'{"seq": "' + b"x" * (1 << 21))


@at("score")
def half_a_line(request: Message) -> None:
    send(honest(request)[:20])
    os._exit(0)


@at("score")
def not_an_object(request: Message) -> None:
    send(b"[]\n")


@at("score")
def key_twice(request: Message) -> None:
    send(b'{"seq": 1, "seq": 2, "answer": "ok"}\n')


@at("score")
def not_a_number(request: Message) -> None:
    send(b'{"seq": NaN, "answer": "ok"}\n')


# -- about the order of messages


@at("start")
def other_version(request: Message) -> None:
    send(honest(request).replace(b'"protocol": 1', b'"protocol": 2'))


@at("start")
def speaks_first(request: Message) -> None:
    send(honest({**request, "seq": 0}) + honest(request))


@at("score")
def seq_of_the_future(request: Message) -> None:
    engine.send({"seq": request["seq"] + 5}, engine.answer(request))


@at("score")
def seq_of_the_past(request: Message) -> None:
    engine.send({"seq": request["seq"] - 1}, engine.answer(request))


@at("score")
def two_answers(request: Message) -> None:
    send(honest(request) * 2)


@at("close")
def answer_again_later(request: Message) -> None:
    """The last score is answered once more when the close is due."""
    engine.send({"seq": request["seq"] - 1}, {"answer": "ok", "tensors": "x"})
    send(honest(request))


@at("close")
def answer_after_close(request: Message) -> None:
    send(honest(request) + b'{"seq": 3, "answer": "ok"}\n')


@at("stop")
def answer_after_stop(request: Message) -> None:
    send(honest(request) + honest(request))


@at("score")
def answer_of_another_command(request: Message) -> None:
    engine.send(request, {"answer": "ok", "session": 1})


@at("score")
def unknown_kind(request: Message) -> None:
    engine.send(request, {"answer": "maybe"})


@at("load")
def unknown_ability(request: Message) -> None:
    engine.send(request, {"answer": "ok", "session": 1, "abilities": ["fly"]})


# -- about tensor files


@at("score")
def too_few_answers(request: Message) -> None:
    send_tensors(request, {})


@at("score")
def too_many_answers(request: Message) -> None:
    send_tensors(request, {f"logprobs.{i}": np.zeros((2, 2), np.float32) for i in range(99)})


@at("score")
def answers_misnamed(request: Message) -> None:
    send_tensors(request, {f"logprobs.{i + 1}": np.zeros(1) for i in range(prompts(request))})


@at("score")
def other_shape(request: Message) -> None:
    send_tensors(request, {f"logprobs.{i}": np.zeros(7) for i in range(prompts(request))})


@at("score")
def other_dtype(request: Message) -> None:
    shapes = [(len(prompt), 128) for prompt in request["prompts"]]
    send_tensors(request, {f"logprobs.{i}": np.zeros(s, int) for i, s in enumerate(shapes)})


def prompts(request: Message) -> int:
    return len(request["prompts"])


@at("rewrite_routes")
def result_missing(request: Message) -> None:
    send_tensors(request, {"weights": np.zeros((5, 2), np.float32)})


@at("score")
def file_truncated(request: Message) -> None:
    answer = engine.answer(request)
    os.truncate(answer["tensors"], 100)
    engine.send(request, answer)


@at("score")
def file_missing(request: Message) -> None:
    send_file(request, "none.safetensors")


@at("score")
def file_outside(request: Message) -> None:
    save_file({"logprobs.0": np.zeros((1, 1))}, "../mone-ref-outside.safetensors")
    os.unlink("../mone-ref-outside.safetensors")
    send_file(request, "../mone-ref-outside.safetensors")


@at("score")
def file_absolute(request: Message) -> None:
    send_file(request, os.path.abspath(engine.answer(request)["tensors"]))


@at("score")
def file_is_a_link(request: Message) -> None:
    os.symlink("/etc/passwd", "link")
    send_file(request, "link")


@at("score")
def file_is_a_directory(request: Message) -> None:
    os.mkdir("directory")
    send_file(request, "directory")


@at("score")
def file_is_a_pipe(request: Message) -> None:
    os.mkfifo("pipe")
    send_file(request, "pipe")


@at("score")
def file_huge(request: Message) -> None:
    with open("huge", "wb") as file:
        file.truncate(1 << 40)
    send_file(request, "huge")


# -- about what the engine says


@at("load")
def refuses_with_a_code(request: Message) -> None:
    codes = ["MISSING_CONSTANT/absent", "SUBSTITUTION/id-range"]
    told = {"evidence": ["rank 0: no", "rank 1: no"], "phase": "load", "codes": codes}
    engine.send(request, {"answer": "refused", **told})


@at("load")
def refuses_in_its_own_words(request: Message) -> None:
    engine.send(request, {"answer": "refused", "evidence": ["no novice for expert 5"]})


@at("load")
def refuses_in_a_log(request: Message) -> None:
    os.write(2, b"worker 0: no novice for expert 5\n")
    engine.send(request, {"answer": "failed", "evidence": "RuntimeError: worker failed"})


@at("load")
def stumbles(request: Message) -> None:
    engine.send(request, {"answer": "failed", "evidence": "KeyError: 'layers.1'"})


@at("load")
def has_no_models(request: Message) -> None:
    engine.send(request, {"answer": "unavailable", "reason": "layers only"})


@at("rewrite_routes")
def has_no_such_kernel(request: Message) -> None:
    engine.send(request, {"answer": "unavailable", "reason": "no kernel of this size"})


def main(name: str) -> None:
    command, strike = FAULTS.get(name, ("", None))
    for line in engine.REQUESTS:
        request = json.loads(line)
        if request["command"] == command:
            strike(request)
        else:
            send(honest(request))
        if request["command"] == "stop":
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
