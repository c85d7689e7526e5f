"""The protocol itself: lines, messages, tensor files, the schema, the example of the document."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG, comes_true
from test_protocol_faults import all_gone, members

from mone_ref import backend, backends
from mone_ref.backend import LayerSession, LayerSpec, LoadOptions, Scores, Session
from mone_ref.backends import BackendError, process, worker
from mone_ref.backends.child import Child
from mone_ref.backends.conversation import Conversation, only_ok
from mone_ref.cli import conform
from mone_ref.protocol import forms, messages
from mone_ref.protocol.channel import Channel, ChannelClosed, LineBuffer
from mone_ref.protocol.exchange import Exchange
from mone_ref.protocol.failures import ProtocolError
from mone_ref.suite.options import OptionError
from mone_ref.suite.run import Run, Settings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "protocol.md"
MINIMAL = ROOT / "docs" / "minimal_engine.py"

PIECES = st.lists(st.binary(max_size=40), max_size=12)


# -- lines


@given(PIECES)
def test_lines_do_not_depend_on_how_they_were_cut(pieces):
    whole = b"".join(pieces)
    found, buffer = [], LineBuffer()
    for piece in pieces:
        buffer.feed(piece)
        while (line := buffer.take()) is not None:
            found.append(line)
    assert [*found, buffer.rest] == whole.split(b"\n")


@given(PIECES)
def test_a_line_is_too_long_however_it_was_cut(pieces):
    buffer, long = LineBuffer(limit=30), False
    for piece in pieces:
        buffer.feed(piece)
        try:
            while buffer.take() is not None:
                pass
        except ProtocolError:
            long = True
            break
    assert long == any(len(line) > 30 for line in b"".join(pieces).split(b"\n"))


@given(st.binary(max_size=200))
def test_any_line_is_an_object_or_a_breach(line):
    try:
        assert isinstance(messages.decode(line), dict)
    except ProtocolError:
        return


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(("seq", "answer", "session", "tensors", "abilities", "evidence", "protocol"))


@given(st.dictionaries(KEYS, JSON | st.sampled_from(("ok", "refused", "failed", 1))))
def test_any_answer_fits_the_schema_or_is_a_breach(answer):
    line = messages.encode(answer)
    assert line.count(b"\n") == 1
    decoded = messages.decode(line.rstrip(b"\n"))
    assert decoded == answer
    for command in ("start", "load", "score", "stop"):
        try:
            messages.check_answer({"seq": 1, "command": command}, decoded)
        except ProtocolError:
            continue
        assert decoded["seq"] == 1
        assert decoded["answer"] in ("ok", "refused", "unavailable", "failed")


@pytest.fixture
def pair():
    """Two ends of one pair of pipes."""
    (one_read, one_write), (other_read, other_write) = os.pipe(), os.pipe()
    channels = Channel(one_read, other_write), Channel(other_read, one_write)
    yield channels
    for channel in channels:
        channel.close()


def test_lines_arrive_in_order_and_whole(pair):
    here, there = pair
    sent = [b"x" * size for size in (0, 1, 70_000, 3)]  # the third is more than a pipe holds
    writer = threading.Thread(target=lambda: [there.send(line + b"\n") for line in sent])
    writer.start()
    assert [here.receive() for _ in sent] == sent
    writer.join()
    assert here.unread() == b""
    there.send(b"left over")
    assert here.unread() == b"left over"


def test_nobody_is_waited_for_in_vain(pair):
    here, _ = pair
    with pytest.raises(TimeoutError):
        here.receive(deadline=time.monotonic())


def test_last_words_are_read_before_the_end_is_told():
    read, write = os.pipe()
    dead = Channel(read, write, alive=lambda: False)
    os.write(write, b"last words\n")
    assert dead.receive() == b"last words"
    with pytest.raises(ChannelClosed):  # although this process holds the pipe open
        dead.receive()
    dead.close()


# -- tensor files


def test_tensors_of_every_dtype_survive(tmp_path):
    tensors = {
        "bfloat16": torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16),
        "float16": torch.tensor([float("inf")], dtype=torch.float16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "ids": torch.tensor([[1, 2]]),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    exchange = Exchange(tmp_path)
    read = exchange.read(exchange.write("x.safetensors", tensors))
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
        assert torch.equal(read[name].nan_to_num(), value.nan_to_num())
    exchange.remove("x.safetensors")
    assert not list(tmp_path.iterdir())


@given(content=st.binary(max_size=64))
def test_any_file_is_tensors_or_a_breach(content, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp()
    (directory / "any").write_bytes(content)
    with pytest.raises(ProtocolError, match="tensor file 'any': "):
        Exchange(directory).read("any")


@pytest.mark.parametrize("name", ["", ".", "..", "/x", "a/b", "../x", "x\0", "a/"])
def test_names_that_leave_the_directory_are_refused(name, tmp_path):
    with pytest.raises(ProtocolError, match="is not in the exchange directory"):
        Exchange(tmp_path).read(name)


# -- objects as messages


def test_options_layers_and_identities_survive():
    info = backend.BackendInfo(
        name="x",
        version="1",
        device="cpu",
        compute={"float32": "tf32"},
        features=frozenset({"lora", "eplb"}),
        components={"torch": "2"},
        workarounds=("one",),
    )
    assert forms.info_from_json(through_json(forms.info_to_json(info))) == info
    asked = LoadOptions(features=frozenset({"lora"}), engine_args={"a": [1, None]}, max_tokens=7)
    assert forms.options_from_json(through_json(forms.options_to_json(asked))) == asked
    layer = LayerSpec(
        layer=3,
        path="model.layers.3.mlp.experts",
        hidden_size=4,
        intermediate_size=6,
        num_logical_experts=5,
        top_k=2,
        scoring="softmax",
        normalise=True,
        scaling_factor=1.5,
        scale_on_output=False,
        declared={3: (0, 2), 1: ()},
        form="approx",
        dtype="bfloat16",
        device="auto",
        groups=(4, 2),
        tp=(1, 2),
        activation_size=8,
    )
    assert forms.layer_from_json(through_json(forms.layer_to_json(layer))) == layer


def through_json(value):
    return json.loads(json.dumps(value))


def test_scores_and_traces_survive_and_count():
    answers = [Scores(torch.zeros(2, 3)), Scores(torch.ones(1, 2), torch.ones(1, 2).long())]
    tensors = forms.scores_to_tensors(answers)
    read = forms.scores_from_tensors(tensors, 2)
    assert read[0].ids is None
    assert torch.equal(read[1].ids, answers[1].ids)
    with pytest.raises(ProtocolError, match="2 answers for 3 prompts"):
        forms.scores_from_tensors(tensors, 3)
    with pytest.raises(ProtocolError, match=r"unexpected tensor 'ids\.2'"):
        forms.scores_from_tensors(tensors | {"ids.2": tensors["ids.1"]}, 2)
    traces = [{"layers.1.moe_in": torch.zeros(1)}, {}]
    assert forms.traces_from_tensors(forms.traces_to_tensors(traces), 2) == traces
    for name in ("2.layers.1.moe_in", "layers.1.moe_in", "0"):
        with pytest.raises(ProtocolError, match="belongs to none of 2 prompts"):
            forms.traces_from_tensors({name: torch.zeros(1)}, 2)


# -- the schema


def test_the_schema_knows_every_command_and_every_method_of_the_surface():
    schema = messages.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    commands = schema["$defs"]["request"]["properties"]["command"]["enum"]
    assert {f"request.{name}" for name in commands} <= schema["$defs"].keys()
    assert {f"answer.{name}" for name in commands} <= schema["$defs"].keys()
    methods = {
        name
        for kind in (backend.Backend, Session, LayerSession)
        for name in vars(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    # describe() is what the handshake answers; close() of a backend is the stop.
    assert methods - {"describe"} == set(commands) - {"start", "stop"}
    optional = set(worker.SESSION) | set(worker.LAYER)
    told = {
        *schema["$defs"]["session_abilities"]["items"]["enum"],
        *schema["$defs"]["layer_abilities"]["items"]["enum"],
    }
    assert optional == told == methods - {"describe", "load", "build_layer", "score", "close"}


def test_no_request_has_room_for_what_is_expected():
    """Whatever the suite could tell an engine stands in the schema, and it is closed."""
    allowed = set()
    for name, definition in messages.schema()["$defs"].items():
        if name.startswith("request."):
            assert definition["additionalProperties"] is False
            allowed |= definition["properties"].keys()
    assert allowed == {
        *("seq", "command", "protocol", "exchange", "checkpoint", "options", "session"),
        *("prompts", "steps", "tensors", "layer"),
    }


# -- the document


def recorded(commands) -> str:
    """What two sides say to each other, as the document shows it."""
    lines: list[str] = []
    child = Child([sys.executable, str(MINIMAL)], os.environ)
    try:
        exchange = Exchange(child.directory)
        for seq, (request, tensors) in enumerate(commands, 1):
            request = {"seq": seq, **request}
            if tensors is not None:
                request["tensors"] = exchange.write(f"request-{seq}.safetensors", tensors)
            if request["command"] == "start":
                request["exchange"] = str(child.directory)
            messages.check_request(request)
            child.channel.send(messages.encode(request))
            answer = messages.decode(child.channel.receive())
            messages.check_answer(request, answer)
            lines += [f"> {json.dumps(request)}", f"< {json.dumps(answer)}"]
            if "tensors" in answer:
                found = exchange.read(answer["tensors"])
                lines += [f"  {name} {value.tolist()}" for name, value in sorted(found.items())]
        return "\n".join(lines).replace(str(child.directory), "/tmp/exchange")
    finally:
        child.kill()


def test_the_transcript_of_the_document_is_what_is_said(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = re.search(r"```text\n(> .*?)\n```", text, re.DOTALL).group(1)
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    commands = []
    for line in shown.splitlines():
        if line.startswith("> "):
            request = json.loads(line[2:])
            del request["seq"]
            commands.append((request, TENSORS.get(request["command"])))
            request.pop("tensors", None)
            if "checkpoint" in request:
                request["checkpoint"] = str(tmp_path)
    assert recorded(commands).replace(str(tmp_path), "/models/tiny") == shown


PATH = "model.layers.0.mlp.experts"
TENSORS = {
    "build_layer": {f"{PATH}.1.approx_value": torch.tensor([8.0, -1.0])},
    "rewrite_routes": {
        "topk_weights": torch.tensor([[0.5, 0.25]]),
        "topk_ids": torch.tensor([[1, 2]]),
    },
}


def test_the_document_names_every_command_answer_and_limit():
    text = DOCUMENT.read_text(encoding="utf-8")
    definitions = messages.schema()["$defs"]
    for command in definitions["request"]["properties"]["command"]["enum"]:
        assert f"`{command}`" in text
    for kind in definitions["answer"]["properties"]["answer"]["enum"]:
        assert f"`{kind}`" in text
    for name in ("MONE_REF_READ_FD", "MONE_REF_WRITE_FD", "minimal_engine.py"):
        assert name in text


def test_the_minimal_engine_knows_nothing_of_mone_ref():
    imported = re.findall(r"^(?:import|from) (\w+)", MINIMAL.read_text(), re.MULTILINE)
    assert set(imported) <= {"itertools", "json", "os", "traceback", "numpy", "safetensors"}


# -- nothing is left behind

SUITE = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from mone_ref.backends.child import Child
child = Child(["sh", "-c", "sleep 600 & echo started >&2; sleep 600"], os.environ)
while b"started" not in child.output.take():
    time.sleep(0.01)
print(child.pid, child.directory, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_engine_does_not_outlive_the_suite(end):
    suite = subprocess.Popen(
        [sys.executable, "-c", SUITE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        group, directory = suite.stdout.readline().rstrip("\n").split(maxsplit=1)
        assert len(members(int(group))) >= 2
        assert Path(directory).is_dir()
        suite.send_signal(end)
        suite.wait(timeout=HANG)
        assert all_gone([int(group)])
        assert comes_true(lambda: not Path(directory).exists())
    finally:
        suite.kill()
        suite.communicate()


INTERRUPTS = """
import os, signal, time
os.read(int(os.environ["MONE_REF_READ_FD"]), 1)  # the request is on its way, and not answered
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""


def test_an_interrupt_in_the_middle_of_a_request_ends_the_engine():
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    talk = Conversation([sys.executable, "-c", INTERRUPTS], os.environ)
    group = talk._child.pid
    try:
        with pytest.raises(KeyboardInterrupt):
            talk.start(HANG)
    finally:
        signal.signal(signal.SIGINT, heard)
    assert talk.over == "the engine's process was ended during start, without an answer"
    with pytest.raises(backend.Crashed, match="was ended during start"):
        talk.ask("stop", only_ok, {})
    assert all_gone([group])


# -- options


@pytest.mark.parametrize(
    ("settings", "flaw"),
    [
        (Settings("", backend_cmd="x", isolate=True), "--backend-cmd and --isolate exclude"),
        (Settings("vllm", backend_cmd="x"), "--backend-cmd and --backend exclude each other"),
        (Settings("server", serve_cmd="x", isolate=True), "--serve-cmd and --isolate exclude"),
        (Settings("server", isolate=True), "--isolate: a server runs in a process of its own"),
        (Settings("", backend_cmd=" "), "--backend-cmd ' ': expected a command"),
        (Settings("", backend_cmd="a 'b"), "--backend-cmd .*: No closing quotation"),
    ],
)
def test_options_that_exclude_each_other_are_told(settings, flaw):
    with pytest.raises(BackendError, match=flaw):
        backends.chosen(settings)


def test_flags_take_no_value():
    words = ["--isolate", "--case", "x", "--backend-cmd", "a b"]
    assert conform.joined(words) == ["--isolate", "--case=x", "--backend-cmd=a b"]


def test_a_run_repeats_how_the_engine_was_started():
    assert Settings("x", isolate=True).chosen_by() == ["--backend=x", "--isolate"]
    assert Settings("", backend_cmd="./x -v").chosen_by() == ["--backend-cmd=./x -v"]


def test_a_case_limit_must_be_a_time(approx):
    with pytest.raises(OptionError, match=r"--case-limit 0: expected seconds in \(0, 86400\]"):
        Run(Settings("x", case_limit=0), process.commanded("true"), ROOT)
