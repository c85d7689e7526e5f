"""Lines over a pair of pipes: framing, a limit per line, deadlines, the end of the other side."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from mone_ref.errors import show
from mone_ref.protocol.failures import ProtocolError

LINE_LIMIT = 1 << 20
"""Longest line in bytes. Tensors travel in files, so honest lines stay far below it."""

CHUNK = 1 << 16
TICK_MS = 100
"""How often a silent pipe makes the reader look whether anybody is left to write."""


class ChannelClosed(Exception):
    """Nobody is left at the other end."""


class LineBuffer:
    """Bytes as they come -> whole lines, however they were cut on the way."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._bytes = b""

    def feed(self, data: bytes) -> None:
        """Add what was read."""
        self._bytes += data

    def take(self) -> bytes | None:
        """The next line without its end, None when there is no whole one.

        Raises ``ProtocolError`` as soon as a line is too long.
        """
        line, end, rest = self._bytes.partition(b"\n")
        if len(line) > self._limit:
            raise ProtocolError(f"a line of more than {self._limit} bytes: {show(line[:60])}")
        if not end:
            return None
        self._bytes = rest
        return line

    @property
    def rest(self) -> bytes:
        """What was read and not taken."""
        return self._bytes


class Channel:
    """One end of the pair. ``alive`` says whether the other side still runs: descendants of a
    dead process can hold its pipe open for ever."""

    def __init__(self, read: int, write: int, alive: Callable[[], bool] = lambda: True) -> None:
        self._read, self._write, self._alive = read, write, alive
        self._lines = LineBuffer()

    def send(self, line: bytes) -> None:
        """Write one line, its end included. Raises ``ChannelClosed``."""
        while line:
            try:
                line = line[os.write(self._write, line) :]
            except BrokenPipeError:
                raise ChannelClosed from None

    def receive(self, deadline: float | None = None) -> bytes:
        """The next line, waited for until ``deadline`` on the monotonic clock.

        Raises ``ChannelClosed``, ``ProtocolError`` for a line that is too long, and
        ``TimeoutError``.
        """
        while (line := self._lines.take()) is None:
            self._wait(deadline)
            self._feed()
        return line

    def unread(self) -> bytes:
        """What has come in that nobody took, without waiting for more."""
        try:
            while self._readable(0) and len(self._lines.rest) <= LINE_LIMIT:
                self._feed()
        except ChannelClosed:
            pass  # the next call will say so
        return self._lines.rest

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._read)
        os.close(self._write)

    def _feed(self) -> None:
        data = os.read(self._read, CHUNK)
        if not data:
            raise ChannelClosed
        self._lines.feed(data)

    def _wait(self, deadline: float | None) -> None:
        while not self._readable(TICK_MS):
            # It may have written its last words after the look into the pipe.
            if not self._alive() and not self._readable(0):
                raise ChannelClosed
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError

    def _readable(self, milliseconds: int) -> bool:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(milliseconds))
