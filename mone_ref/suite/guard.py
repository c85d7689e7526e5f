"""One call into an engine: limited in time, captured, its failure told as data.

Only a deliberate refusal counts as one: ``Refused``, or an exception whose evidence
the engine's error map knows. Everything else is an error or a crash.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from unittest import mock

from mone_ref.backend import Crashed, Refused
from mone_ref.errors import Phase, Rejected
from mone_ref.protocol.failures import ProtocolError
from mone_ref.suite import capture
from mone_ref.suite.errormap import Ambiguous, ErrorMap

T = TypeVar("T")

MEMORY = re.compile(r"out of memory", re.IGNORECASE)
MEMORY_CLASS = re.compile(r"\b(OutOfMemoryError|MemoryError)\b")


class Failed(StrEnum):
    """How a call failed."""

    REFUSED = "refused"
    ERRORED = "errored"
    CRASHED = "crashed"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Failure:
    """A call that gave no answer.

    ``call`` is the phase that the call belongs to, ``phase`` what the engine itself
    stated. ``codes`` are those of a refusal; empty when the engine refused without one.
    """

    kind: Failed
    call: Phase
    evidence: str
    codes: tuple[str, ...] = ()
    phase: Phase | None = None

    @property
    def first_line(self) -> str:
        """The start of the evidence, for one-line messages."""
        return self.evidence.partition("\n")[0][:200]


class Deadline(BaseException):
    """Raised inside an engine's call by the alarm; no ``except Exception`` swallows it."""


class Guard:
    """Calls an engine and answers with its value or with a ``Failure``."""

    def __init__(
        self,
        error_map: ErrorMap,
        limit: float,
        case_limit: float = float("inf"),
        *,
        watchdog: bool = True,
    ) -> None:
        """``limit`` is in seconds, for each call; ``case_limit`` for all calls of one case.

        ``watchdog`` ends the process when a call is stuck outside Python.
        """
        self.error_map = error_map
        self.limit = limit
        self.case_limit = case_limit
        self.watchdog = watchdog
        self._case_end = float("inf")
        # Taken now: during a call descriptor 2 is captured.
        self._stderr = os.dup(2)

    def begin_case(self) -> None:
        """Start the clock of a case."""
        self._case_end = time.monotonic() + self.case_limit

    @property
    def case_over(self) -> bool:
        """Whether the case has used up its time: what failed since tells nothing about a call."""
        return time.monotonic() >= self._case_end

    def call(
        self, phase: Phase, function: Callable[[], T], *, closing: bool = False
    ) -> T | Failure:
        """Run one call. ``KeyboardInterrupt`` passes only when the user caused it.

        A ``closing`` call has its own time, even when the case has used up the case's.
        Raises ``RuntimeError`` outside the main thread, where no alarm can be heard.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an engine can only be judged from the main thread")
        limit, late = self.limit, f"no answer within {self.limit:g} s"
        left = self._case_end - time.monotonic()
        if left < limit and not closing:
            limit, late = left, f"the case was not over within {self.case_limit:g} s"
        if limit <= 0:
            return Failure(Failed.TIMEOUT, phase, late)
        captured = capture.Captured()
        alarm = Alarm(limit, self._stderr if self.watchdog else None)
        interrupts = Interrupts()
        try:
            with interrupts.watch(), capture.output(captured), alarm.set(), no_exit():
                value = function()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupts.pressed:
                raise
            if not alarm.rang:
                return self.failure(phase, error, captured.text)
        if alarm.rang:
            return Failure(Failed.TIMEOUT, phase, f"{late}\n{captured.text}")
        return value

    def failure(self, phase: Phase, error: BaseException, text: str) -> Failure:
        """Classify an exception by all the evidence."""
        told = capture.chain(error)
        evidence = f"{told}\n{text}".strip()
        gone = isinstance(error, Crashed) or not isinstance(error, Exception)
        if gone or out_of_memory(error, told, text):
            return Failure(Failed.CRASHED, phase, evidence)
        if isinstance(error, ProtocolError):
            return Failure(Failed.ERRORED, phase, evidence)
        if isinstance(error, Rejected):
            codes = tuple(str(code) for code in error.codes)
            return Failure(Failed.REFUSED, phase, evidence, codes, error.phase)
        stated = error.phase if isinstance(error, Refused) else None
        if isinstance(error, Refused) and error.codes:
            return Failure(Failed.REFUSED, phase, evidence, error.codes, stated)
        try:
            # The exception itself first: a log may hold words about other things.
            code = self.error_map.find(told) or self.error_map.find(text)
        except Ambiguous as ambiguous:
            return Failure(Failed.ERRORED, phase, f"{ambiguous}\n{evidence}")
        if code is None and not isinstance(error, Refused):
            return Failure(Failed.ERRORED, phase, evidence)
        return Failure(Failed.REFUSED, phase, evidence, (code,) if code else (), stated)


def out_of_memory(error: BaseException, told: str, text: str) -> bool:
    """Whether memory ran out, here or in a worker: never a deliberate refusal."""
    return (
        isinstance(error, MemoryError)
        or bool(MEMORY.search(told))
        or bool(MEMORY_CLASS.search(f"{told}\n{text}"))
    )


class ProcessExit(BaseException):
    """An engine called ``os._exit``, which would have ended the run without a word."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn ``os._exit`` in this process into ``ProcessExit``; forked children may use it."""
    here, leave = os.getpid(), os._exit

    def stop(status: int) -> None:
        if os.getpid() != here:
            leave(status)
        raise ProcessExit(f"os._exit({status})")

    with mock.patch.object(os, "_exit", stop):
        yield


class Alarm:
    """A time limit on a block of the main thread.

    At the limit ``Deadline`` is raised in the block. A call that is stuck outside
    Python never sees it; at twice the limit the process then prints its stacks to ``stderr``,
    where that is given, and exits; the report, which lacks its end, names the case.
    """

    def __init__(self, limit: float, stderr: int | None) -> None:
        self.limit = limit
        self.rang = False
        self._stderr = stderr

    @contextmanager
    def set(self) -> Iterator[None]:
        """Start the clock; stop it when the block is left."""
        previous = signal.signal(signal.SIGALRM, self._ring)
        if self._stderr is not None:
            faulthandler.dump_traceback_later(2 * self.limit, exit=True, file=self._stderr)
        signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self._stderr is not None:
                faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)

    def _ring(self, *_: Any) -> None:
        self.rang = True
        raise Deadline


class Interrupts:
    """Tells Ctrl-C of the user from a ``KeyboardInterrupt`` that an engine raises."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note a real interrupt while the block runs; it is raised as ever."""
        previous = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous or signal.SIG_DFL)

    def _press(self, *_: Any) -> None:
        self.pressed = True
        raise KeyboardInterrupt
