"""Progress of long copies and loads on a terminal, and their end by a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Interrupted(BaseException):
    """A signal that asks the command to end; ``status`` is the exit code."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(signal.Signals(number).name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise ``Interrupted`` in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shown(verb: str, size: int, least: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar with rate and remaining time on standard error.

    Nothing where that is no terminal, or below ``least`` bytes, which take no time to speak of.
    """
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = size < least or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task(verb, total=size)
        yield lambda done: bar.advance(task, done)
