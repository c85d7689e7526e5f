"""What a call into an engine leaves behind: output of the process tree, and exceptions as text.

Engines with worker processes say the reason for a refusal in a worker's log, so the
file descriptors themselves are captured. All captures share one file: a worker that
was started during one call keeps writing to it, and later calls still see its lines.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from mone_ref.protocol.failures import Relayed

LIMIT = 64 * 1024
"""Bytes kept of one call's output, from its end, where the reason stands."""

_lock = threading.RLock()
_spool: list[int] = []


class Captured:
    """Text of one capture; complete once the capture has ended."""

    text = ""


@contextmanager
def output(captured: Captured) -> Iterator[None]:
    """Redirect stdout and stderr, Python's and the descriptors', and restore them always.

    Captures nest: the outer one also has what the inner one caught. Other threads
    that want to capture wait.
    """
    with _lock:
        spool = _open_spool()
        start = os.lseek(spool, 0, os.SEEK_END)
        saved = [os.dup(1), os.dup(2)]
        streams = sys.stdout, sys.stderr
        _flush(*streams)
        try:
            os.dup2(spool, 1)
            os.dup2(spool, 2)
            # A log handler may keep these streams for ever. They write to the
            # descriptor, whatever it is by then, and closing them closes nothing.
            sys.stdout, sys.stderr = _stream(1), _stream(2)
            yield
        finally:
            _flush(sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = streams
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            captured.text = _read(spool, start)


def _open_spool() -> int:
    """The file of this process, unlinked, in append mode."""
    if not _spool:
        with tempfile.NamedTemporaryFile(prefix="mone-ref-output-") as file:
            _spool.append(os.open(file.name, os.O_RDWR | os.O_APPEND))
    return _spool[0]


def _stream(number: int) -> TextIO:
    return open(
        number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _flush(*streams: TextIO) -> None:
    for stream in streams:
        with suppress(Exception):  # an engine may have replaced or closed it
            stream.flush()


def _read(spool: int, start: int) -> str:
    end = os.lseek(spool, 0, os.SEEK_END)
    first = max(start, end - LIMIT)
    text = os.pread(spool, end - first, first).decode("utf-8", errors="backslashreplace")
    return text if first == start else f"[{first - start} bytes left out]\n{text}"


def chain(error: BaseException) -> str:
    """An exception with its causes, contexts, notes and group members, one per line."""
    lines: list[str] = []
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        lines.append(_told(current))
        lines += map(str, getattr(current, "__notes__", ()))
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
        waiting += filter(None, (current.__cause__, current.__context__))
    return "\n".join(lines)[:LIMIT]


def _told(error: BaseException) -> str:
    """Class and message; of an exception from another process, the chain that was told there."""
    if isinstance(error, Relayed):
        return str(error)
    return f"{type(error).__module__}.{type(error).__qualname__}: {_message(error)}"


def _message(error: BaseException) -> str:
    """``str(error)``; an engine's exception may be unable to print itself."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: {type(broken).__name__}>"
