"""Two reports of the same suite and engine: exit 1 and say where their outcomes differ.

Compared is what both runs have; when that is nothing, exit 1 as well.
"""

import sys
from pathlib import Path

from mone_ref.suite import report

one, other = (report.read(Path(name)) for name in sys.argv[1:3])
compared, differing = report.common(one, other), report.differences(one, other)
counts = f"{len(compared)} of {len(one.results)} outcomes compared with those of another run"
print(*differing, f"{counts}, {len(differing)} differ", sep="\n")
sys.exit(bool(differing) or not compared)
