"""An engine's process with all its descendants: started, listened to, and ended without a trace."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mone_ref.protocol import READ_FD, WRITE_FD
from mone_ref.protocol.channel import CHUNK, Channel
from mone_ref.suite import capture

# The suite may be killed itself. This waits for a word that never comes then.
WATCH = 'read done || { kill -s KILL -- "-$1"; rm -rf -- "$2"; }'


class Child:
    """One process, the leader of a group of its own, with a pair of pipes and a directory.

    Raises ``OSError`` when the command cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mone-ref-exchange-"))
        requests, answers = os.pipe(), os.pipe()
        theirs = requests[0], answers[1]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environment, READ_FD: str(theirs[0]), WRITE_FD: str(theirs[1])},
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError:
            shutil.rmtree(self.directory)
            for descriptor in (*requests, *answers):
                os.close(descriptor)
            raise
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = self._process.pid
        self._watch = subprocess.Popen(
            ["sh", "-c", WATCH, "mone-ref-watch", str(self.pid), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output = Output(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        self.channel = Channel(answers[0], requests[1], lambda: not self.ended())

    def ended(self) -> str:
        """How the process ended; empty while it runs.

        It is only looked at: until it is reaped, its number names this group and no other.
        """
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return ""
        if found.si_code == os.CLD_EXITED:
            return f"exited with code {found.si_status}"
        number = found.si_status
        known = number in set(signal.Signals)
        return f"was killed by {signal.Signals(number).name if known else f'signal {number}'}"

    def wait(self, seconds: float) -> str:
        """Wait some time for the end; as ``ended``."""
        deadline = time.monotonic() + seconds
        while not (end := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return end

    def kill(self) -> None:
        """End whatever is left of the group, and free what belonged to it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.channel.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._watch.communicate(b"done\n")


class Output:
    """What a process tree writes: read all the time, so that nobody waits, and kept short."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._kept = b""
        self._dropped = 0
        self._open = True
        threading.Thread(target=self._drain, daemon=True).start()

    def take(self) -> bytes:
        """The end of what was written since the last time, what waits in the pipe included."""
        with self._lock:
            # As much as a pipe holds, and no more: one who never stops is not waited for.
            for _ in range(16):
                if not self._read():
                    break
            kept, dropped = self._kept, self._dropped
            self._kept, self._dropped = b"", 0
        return b"[%d bytes left out]\n%s" % (dropped, kept) if dropped else kept

    def _drain(self) -> None:
        while self._open:
            select.select([self._descriptor], [], [])
            with self._lock:
                self._read()
        os.close(self._descriptor)

    def _read(self) -> bool:
        """Read once; whether there was anything."""
        if not self._open:
            return False
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return False
        self._open = bool(data)
        self._kept += data
        excess = max(len(self._kept) - capture.LIMIT, 0)
        self._dropped += excess
        self._kept = self._kept[excess:]
        return bool(data)
