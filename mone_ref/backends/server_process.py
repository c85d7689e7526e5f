"""A server's processes: started in a group of their own, heard, and ended without exception."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from mone_ref.backends.server_settings import HOST
from mone_ref.suite.capture import LIMIT

WATCHDOG = Path(__file__).with_name("watchdog.py")

FRESH_MEMORY = {"MALLOC_PERTURB_": "128"}
"""glibc fills what it allocates with bytes 0x7f then: 3e38 in float32 and bfloat16, NaN in
float16. A weight that was never loaded cannot be right by luck, as for an engine in process."""


class ServerProcess:
    """A command that serves until it is stopped.

    Its standard output and error are read as they come, and the end of them is kept. The
    group is killed by ``stop``, or by a watchdog when this process ends without a word.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Raises ``OSError`` when the program cannot be started."""
        # A session of its own: what ends our process group must not end the watchdog.
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=FRESH_MEMORY | os.environ,
                start_new_session=True,
            )
        except BaseException:
            self._watchdog.communicate()
            raise
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(b"%d\n" % self._process.pid)
        self._watchdog.stdin.flush()
        self._stopped = False
        self._tail = Tail()
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._tail.follow, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def ended(self, patience: float = 0) -> int | None:
        """The exit code (minus a signal's number) of the front process, None while it runs.

        ``patience`` is how many seconds to wait for it.
        """
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        return None

    def log(self) -> str:
        """The end of what the server wrote so far; all of it after ``stop``."""
        return self._tail.text()

    def stop(self, patience: float) -> None:
        """End every process of the group, and know the whole log then.

        The front process is asked first and given ``patience`` seconds, so that engines
        can remove what they share.
        """
        if self._stopped:
            return
        try:
            if patience and self._process.poll() is None:
                self._process.terminate()
                self.ended(patience)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._stopped = True
            self._watchdog.communicate(b"stopped")
            self._reader.join(timeout=1)  # a process that left the group may hold the pipe


class Tail:
    """The last ``LIMIT`` bytes of a stream, whatever its length and speed."""

    def __init__(self) -> None:
        self._kept = b""
        self._left_out = 0
        self._lock = threading.Lock()

    def follow(self, stream: IO[bytes]) -> None:
        """Read until the stream ends."""
        with stream:
            while chunk := os.read(stream.fileno(), LIMIT):
                with self._lock:
                    whole = self._kept + chunk
                    self._kept = whole[-LIMIT:]
                    self._left_out += len(whole) - len(self._kept)

    def text(self) -> str:
        """What is kept, and how much is not."""
        with self._lock:
            text = self._kept.decode("utf-8", errors="backslashreplace").replace("\r\n", "\n")
            return f"[{self._left_out} bytes left out]\n{text}" if self._left_out else text


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def told_end(code: int) -> str:
    """An exit code in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def by_signal(code: int) -> bool:
    """Whether an exit code is that of a process that a signal ended, perhaps below a shell."""
    return code < 0 or 128 < code <= 128 + max(signal.valid_signals())
