"""Kills a process group when its standard input ends too soon: whoever held it is gone.

The input is the number of the group on a line, and more once the group is stopped. A
script of its own, so that it starts in milliseconds.
"""

import os
import signal
import sys
from contextlib import suppress

if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    group, _, more = sys.stdin.read().partition("\n")
    if group and not more:
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)
