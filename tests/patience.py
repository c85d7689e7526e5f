"""How long a test waits for what has to come."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 1800.0
"""Seconds after which what still runs is taken to hang. It measures nothing: what it bounds takes
seconds, at most a minute, and a busy machine that is many times slower still stays below."""


SOON = 300.0
"""Seconds in which the kernel ends what was killed, and a watchdog hears that nobody is left."""


def comes_true(condition: Callable[[], bool]) -> bool:
    """Wait for a condition that takes no work; whether it came true."""
    end = time.monotonic() + SOON
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
