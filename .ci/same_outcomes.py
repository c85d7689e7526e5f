"""Two reports of the same suite and engine: exit 1 and say where their outcomes differ."""

import sys
from pathlib import Path

from mone_ref.suite import report

one, other = (report.read(Path(name)) for name in sys.argv[1:3])
differing = report.differences(one, other)
print(
    *differing, f"{len(one.results)} outcomes, {len(differing)} differ between two runs", sep="\n"
)
sys.exit(bool(differing))
