"""``python -m mone_ref.backends.worker NAME``: any Python backend behind the protocol.

Requests come in and answers go out through the descriptors that the environment names.
What the engine prints goes where it always goes.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from mone_ref import backends
from mone_ref.backend import (
    Backend,
    BackendInfo,
    LayerSession,
    Refused,
    Session,
    Unavailable,
    capable,
)
from mone_ref.errors import Rejected
from mone_ref.protocol import READ_FD, VERSION, WRITE_FD, forms, messages
from mone_ref.protocol.channel import Channel, ChannelClosed
from mone_ref.protocol.exchange import Exchange
from mone_ref.protocol.failures import ProtocolError
from mone_ref.protocol.messages import Message
from mone_ref.suite.attempt import continuations, snapshot
from mone_ref.suite.capture import chain
from mone_ref.suite.compare import same
from mone_ref.suite.layers import as_tensors
from mone_ref.suite.memory import fresh_memory_is_nan

SESSION = ("generate", "update", "reload", "expert_rows", "trace")
LAYER = ("forward", "forward_routed", "rewrite_routes", "expert_rows")


def main(name: str) -> None:
    """Serve one backend until it is told to stop, or nobody is left to ask."""
    faulthandler.enable()
    # Nothing that the engine starts may answer for it.
    read, write = (int(os.environ.pop(variable)) for variable in (READ_FD, WRITE_FD))
    for descriptor in (read, write):
        os.set_inheritable(descriptor, False)
    channel, worker = Channel(read, write), Worker(name)
    try:
        while not worker.stopped:
            answer = worker.answer(channel.receive())
            sys.stdout.flush()
            sys.stderr.flush()
            channel.send(messages.encode(answer))
    except ChannelClosed:
        pass


class Worker:
    """One backend and its open sessions."""

    def __init__(self, name: str) -> None:
        self.stopped = False
        self._name = name
        self._sessions: dict[int, Session | LayerSession] = {}
        self._opened = 0

    def answer(self, line: bytes) -> Message:
        """Do what a line asks. ``SystemExit`` and the like pass: the process ends then."""
        request = messages.decode(line)
        told = {"seq": request.get("seq", 0)}
        try:
            messages.check_request(request)
            done: Message = getattr(self, f"_{request['command']}")(request)
        except Unavailable as unavailable:
            return told | {"answer": messages.UNAVAILABLE, "reason": unavailable.reason}
        except (Refused, Rejected) as refusal:
            return told | refused(refusal)
        except Exception as error:
            return told | {"answer": messages.FAILED, "evidence": chain(error)}
        return told | {"answer": messages.OK} | done

    # -- the process

    def _start(self, request: Message) -> Message:
        if request["protocol"] != VERSION:
            raise ProtocolError(f"this engine speaks protocol {VERSION}")
        self._exchange = Exchange(Path(request["exchange"]))
        self._backend: Backend = backends.find(self._name)
        info = self._backend.describe()
        if not isinstance(info, BackendInfo):
            raise TypeError(f"describe() returned {type(info).__name__}, not BackendInfo")
        return {
            "protocol": VERSION,
            "engine": forms.info_to_json(info),
            "abilities": [name for name in ("build_layer",) if capable(self._backend, name)],
            **forms.files_to_json(self._backend),
        }

    def _stop(self, _: Message) -> Message:
        self.stopped = True
        self._backend.close()
        return {}

    # -- checkpoints

    def _load(self, request: Message) -> Message:
        options = forms.options_from_json(request["options"])
        with fresh_memory_is_nan():
            session = self._backend.load(Path(request["checkpoint"]), options)
        if not isinstance(session, Session):
            raise TypeError(f"load() returned {type(session).__name__}, not a Session")
        return self._open(session, SESSION)

    def _score(self, request: Message) -> Message:
        answers = snapshot(self._session(request), request["prompts"])
        return self._tensors(request, forms.scores_to_tensors(answers))

    def _generate(self, request: Message) -> Message:
        made = continuations(self._session(request), request["prompts"], request["steps"])
        tokens = [list(generation.tokens) for generation in made]
        scores = forms.scores_to_tensors([generation.scores for generation in made])
        return {"tokens": tokens, **self._tensors(request, scores)}

    def _update(self, request: Message) -> Message:
        tensors = self._exchange.read(request["tensors"])
        with fresh_memory_is_nan():
            self._session(request).update(tensors)
        return {}

    def _reload(self, request: Message) -> Message:
        with fresh_memory_is_nan():
            self._session(request).reload(Path(request["checkpoint"]))
        return {}

    def _expert_rows(self, request: Message) -> Message:
        session = self._any_session(request)
        if isinstance(session, LayerSession):
            with fresh_memory_is_nan():
                return {"rows": int(session.expert_rows())}
        return {"rows": {str(layer): int(n) for layer, n in session.expert_rows().items()}}

    def _trace(self, request: Message) -> Message:
        traces = self._session(request).trace(request["prompts"])
        return self._tensors(request, forms.traces_to_tensors(traces))

    def _close(self, request: Message) -> Message:
        session = self._any_session(request)
        del self._sessions[request["session"]]
        if isinstance(session, Session):
            session.close()
        return {}

    # -- layers

    def _build_layer(self, request: Message) -> Message:
        layer = forms.layer_from_json(request["layer"])
        tensors = self._exchange.read(request["tensors"])
        with fresh_memory_is_nan():
            built = self._backend.build_layer(layer, tensors)
        if not isinstance(built, LayerSession):
            raise TypeError(f"build_layer() returned {type(built).__name__}, not a LayerSession")
        return {"in_place": built.in_place, **self._open(built, LAYER)}

    def _call(self, request: Message) -> Message:
        """Call a layer; arguments that it changed go back too."""
        method = request["command"]
        session = self._any_session(request)
        given = self._exchange.read(request["tensors"])
        before = {name: value.clone() for name, value in given.items()}
        with fresh_memory_is_nan():
            answer = getattr(session, method)(*(given[name] for name in forms.ARGUMENTS[method]))
        results = dict(zip(forms.RESULTS[method], as_tensors(method, answer), strict=True))
        for name, value in given.items():
            if not same(before[name], value):
                results[f"{forms.CHANGED}{name}"] = value
        return self._tensors(request, results)

    _forward = _forward_routed = _rewrite_routes = _call

    # -- helpers

    def _open(self, session: Session | LayerSession, methods: tuple[str, ...]) -> Message:
        self._opened += 1
        self._sessions[self._opened] = session
        abilities = [name for name in methods if capable(session, name)]
        return {"session": self._opened, "abilities": abilities}

    def _any_session(self, request: Message) -> Session | LayerSession:
        if request["session"] not in self._sessions:
            raise ProtocolError(f"no session {request['session']} is open")
        return self._sessions[request["session"]]

    def _session(self, request: Message) -> Session:
        session = self._any_session(request)
        if not isinstance(session, Session):
            raise ProtocolError(f"session {request['session']} is a layer")
        return session

    def _tensors(self, request: Message, tensors: dict[str, Tensor]) -> Message:
        name = f"answer-{request['seq']}.safetensors"
        return {"tensors": self._exchange.write(name, tensors)}


def refused(refusal: Refused | Rejected) -> Message:
    """A refusal with everything that the suite judges it by."""
    codes = [str(code) for code in refusal.codes]
    stated: dict[str, Any] = {"phase": refusal.phase, "codes": codes}
    return {"answer": messages.REFUSED, "evidence": [chain(refusal)], **stated}


if __name__ == "__main__":
    main(*sys.argv[1:])
