"""A server's processes: started in a group of their own, heard, and ended without exception."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from mone_ref.backends.child import Output
from mone_ref.backends.server_settings import HOST

WATCH = 'read group && { read word || kill -s KILL -- "-$group"; }'
"""The suite may be killed itself. This is told the group, and waits for a word that never
comes then."""

FRESH_MEMORY = {"MALLOC_PERTURB_": "128"}
"""glibc fills what it allocates with bytes 0x7f then: 3e38 in float32 and bfloat16, NaN in
float16. A weight that was never loaded cannot be right by luck, as for an engine in process."""


class ServerProcess:
    """A command that serves until it is stopped, in whatever way this process ends."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises ``OSError`` when the program cannot be started."""
        self._watch = subprocess.Popen(
            ["sh", "-c", WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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
            self._watch.communicate()
            raise
        assert self._watch.stdin is not None
        assert self._process.stdout is not None
        self._watch.stdin.write(b"%d\n" % self._process.pid)
        self._watch.stdin.flush()
        self._output = Output(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        self._stopped = False

    def ended(self, patience: float = 0) -> int | None:
        """The exit code (minus a signal's number) of the front process, None while it runs.

        ``patience`` is how many seconds to wait for it.
        """
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        return None

    def log(self) -> str:
        """The end of what the server wrote since the last call."""
        text = self._output.take().decode("utf-8", errors="backslashreplace")
        return text.replace("\r\n", "\n")

    def stop(self, patience: float) -> None:
        """End every process of the group.

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
            self._watch.communicate(b"stopped\n")


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
