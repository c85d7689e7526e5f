"""Standard output that cannot be written: one line on standard error, and an exit code.

Commands print with ``print`` and ``typer.echo``. An OSError from there would be taken for one of
the files that a command works on, or for nobody's, and end in a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn, TextIO, cast

from mone_ref.errors import reason

STATUS = 74
"""Exit code of a command whose answer was not written: EX_IOERR of sysexits.h."""


class OutputLost(Exception):
    """A write to standard output that failed; the message is the system's reason."""


class _Watched:
    """A stream whose failures are ``OutputLost``."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """As the stream's own."""
        with _told():
            return self.stream.write(text)

    def flush(self) -> None:
        """As the stream's own."""
        with _told():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost(reason(error).lower()) from None


@contextmanager
def watched() -> Iterator[None]:
    """End the process with one line on standard error when what is printed within is lost.

    Raises SystemExit with ``STATUS``; whatever a command had done by then stays done.
    """
    stream: TextIO | None = sys.stdout
    if stream is None:  # the descriptor was closed; the next file opened would get its number
        _end("closed")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # an encoding without some letter is no end
    try:
        with redirect_stdout(cast(TextIO, _Watched(stream))):
            try:
                yield
            finally:
                sys.stdout.flush()
    except OutputLost as lost:
        _discard(stream)
        _end(str(lost))


def _discard(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: the interpreter writes it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _end(reason: str) -> NoReturn:
    print(f"error: standard output: found {reason}, expected that it takes text", file=sys.stderr)
    sys.exit(STATUS)
