"""The most memory that a piece of work holds over what its process held before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SAMPLE = 0.002  # seconds between two looks


@dataclass
class Peak:
    """MB gained: *anonymous* memory is allocated, *mapped* are pages of files, which the system
    may drop; *together* is the most of both at one time."""

    anonymous: float = 0.0
    mapped: float = 0.0
    together: float = 0.0

    def take(self, anonymous: float, mapped: float) -> None:
        """One look."""
        self.anonymous = max(self.anonymous, anonymous)
        self.mapped = max(self.mapped, mapped)
        self.together = max(self.together, anonymous + mapped)


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of this process for the time of a ``with`` block."""
    before, peak, done = resident(), Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE):
            peak.take(*(now - then for now, then in zip(resident(), before, strict=True)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def resident() -> tuple[float, float]:
    """Anonymous and mapped MB of this process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kib["RssAnon"] * 1024 / 1e6, kib["RssFile"] * 1024 / 1e6
