"""Strictly one answer to each request: what an engine in its own process says, or how it failed.

Whatever breaks the order of requests and answers ends the process, with all its descendants:
nothing that is said afterwards could be trusted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from mone_ref.backend import Crashed, Unavailable
from mone_ref.backends.child import Child
from mone_ref.errors import Phase, show
from mone_ref.protocol import VERSION, messages
from mone_ref.protocol.channel import ChannelClosed
from mone_ref.protocol.exchange import Exchange
from mone_ref.protocol.failures import ProtocolError, Relayed, RelayedRefusal
from mone_ref.protocol.messages import Message

T = TypeVar("T")
Tensors = dict[str, Tensor]

CLOSED_GRACE = 2.0
STOP_GRACE = 30.0
"""Seconds in which a process that has closed its pipes, or was told to stop, must end."""


def only_ok(answer: Message, tensors: Tensors) -> None:
    """Read an answer that says nothing but that it was done."""


class Conversation:
    """One engine process, from its handshake to its end.

    ``over`` is how it ended, empty while it goes on. Raises ``OSError`` when the process
    cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._child = Child(command, environment)
        self._exchange = Exchange(self._child.directory)
        self._seq = 0
        self._forgotten: list[int] = []
        self.over = ""
        self._broken = False

    def start(self, seconds: float) -> Message:
        """The handshake, limited in time. Raises as ``ask``, and ``TimeoutError``."""
        directory = str(self._child.directory)
        fields = {"protocol": VERSION, "exchange": directory}
        deadline = time.monotonic() + seconds
        with suppress(TimeoutError):
            return self.ask("start", lambda answer, _: answer, fields, deadline=deadline)
        raise TimeoutError(f"no answer to start within {seconds:g} s")

    def ask(
        self,
        command: str,
        read: Callable[[Message, Tensors], T],
        fields: Mapping[str, Any],
        given: Mapping[str, Tensor] | None = None,
        deadline: float | None = None,
    ) -> T:
        """Ask, and read the answer; ``given`` tensors travel in a file.

        Raises what the engine answers (``RelayedRefusal``, ``Relayed``, ``Unavailable``);
        ``ProtocolError`` and ``Crashed`` when it did not properly answer.
        """
        while self._forgotten:
            self.ask("close", only_ok, {"session": self._forgotten.pop()})
        if self.over:
            raise (ProtocolError if self._broken else Crashed)(self.over)
        ended_idle = self._seq > 0 and bool(self._child.ended())
        try:
            answer, tensors = self._round(command, fields, given, deadline)
            raise_unless_ok(answer)
            value = read(answer, tensors)
        except (Relayed, Unavailable):
            self._repeat_output()
            raise
        except ChannelClosed:
            broken = self._closed(f"{'before' if ended_idle else 'during'} {command}")
        except ProtocolError as error:
            self._broken = True
            broken = ProtocolError(f"{command}: {error}")
            self._end(f"the engine's process was ended after a breach of the protocol: {broken}")
        except BaseException:
            self._end(f"the engine's process was ended during {command}, without an answer")
            raise
        else:
            self._child.output.take()
            return value
        raise broken  # here, where no exception of ours becomes part of the evidence

    def forget(self, session: int) -> None:
        """Have a layer closed before the next request: nobody holds it any more."""
        self._forgotten.append(session)

    def stop(self) -> None:
        """Have the process end, and end what it leaves behind. Raises as ``ask``."""
        if self.over:
            return
        try:
            self.ask("stop", only_ok, {})
            if not self._child.wait(STOP_GRACE):
                raise ProtocolError(f"stop: the process still runs after {STOP_GRACE:g} s")
            self._expect_silence()
        finally:
            self._end("the engine was stopped")

    def _round(
        self,
        command: str,
        fields: Mapping[str, Any],
        given: Mapping[str, Tensor] | None,
        deadline: float | None,
    ) -> tuple[Message, Tensors]:
        """One request and its answer, with the tensors that come with it."""
        self._expect_silence()
        self._seq += 1
        request = {"seq": self._seq, "command": command, **fields}
        if given is not None:
            name = f"request-{self._seq}.safetensors"
            request["tensors"] = self._exchange.write(name, given)
        messages.check_request(request)
        self._child.channel.send(messages.encode(request))
        answer = messages.decode(self._child.channel.receive(deadline))
        messages.check_answer(request, answer)
        self._expect_silence()
        tensors = self._exchange.read(answer["tensors"]) if "tensors" in answer else {}
        for message in (request, answer):
            if "tensors" in message:
                self._exchange.remove(message["tensors"])
        return answer, tensors

    def _expect_silence(self) -> None:
        """No line may wait that nobody asked for. Raises ``ProtocolError``."""
        unread = self._child.channel.unread()
        if unread:
            raise ProtocolError(f"a line that nobody asked for: {show(unread)}")

    def _closed(self, when: str) -> Exception:
        """Why the pipe has nobody at its other end."""
        end = self._child.wait(CLOSED_GRACE)
        if end:
            told = f"the engine's process {end} {when}"
            self._end(told)
            return Crashed(told)
        self._broken = True
        self._end("the engine's process was ended after it had closed its pipes")
        return ProtocolError(f"the engine closed its pipes and went on running, {when}")

    def _end(self, how: str) -> None:
        """End the process; what it wrote last is repeated for the record."""
        if self.over:
            return
        self.over = how
        self._repeat_output()
        self._child.kill()

    def _repeat_output(self) -> None:
        """Write what the engine wrote during this call to the suite's own standard error.

        There it is heard as the output of an engine in the suite's process is.
        """
        output = self._child.output.take()
        if output:
            os.write(2, output)


def raise_unless_ok(answer: Message) -> None:
    """Raise what an answer says that the engine raised."""
    match answer["answer"]:
        case messages.REFUSED:
            phase = answer.get("phase")
            stated = Phase(phase) if phase else None
            raise RelayedRefusal(answer["evidence"], stated, answer.get("codes", ()))
        case messages.UNAVAILABLE:
            raise Unavailable(answer["reason"])
        case messages.FAILED:
            raise Relayed(answer["evidence"])
