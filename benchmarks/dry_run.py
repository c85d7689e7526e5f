"""Time and memory of inspect and of a dry run, on checkpoints of real sizes that take no space.

Each run is a process of its own; told are the median of five of the work alone, without the start
of Python and the imports, by the clock and by the processor, and the largest peak of memory.

    python benchmarks/dry_run.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import make_checkpoint

REPEATS = 5
KEPT = 2  # of how many experts one stays

PROGRAM = """
import json, resource, sys, time
from pathlib import Path
from mone_ref.rewrite import make, plan
from mone_ref.rewrite.forecast import forecast
from mone_ref.rewrite.inspection import inspect
from mone_ref.rewrite.uncollected import uncollected

@uncollected  # as the command does it
def dry_run():
    made = make.blueprint(sys.argv[2], plan.read(Path(sys.argv[3])))
    return forecast(made.structure, made.blueprint)

begin, busy = time.perf_counter(), time.process_time()
if sys.argv[1] == "inspect":
    assert not inspect(sys.argv[2]).problems
else:
    assert dry_run().saved
work = time.perf_counter() - begin, time.process_time() - busy
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([*work, peak / 1024]))
"""


def measure(command: str, checkpoint: Path, plan: Path) -> tuple[float, float, float]:
    """Median seconds of work by the clock and by the processor, and the largest peak in MB."""
    runs = []
    for _ in range(REPEATS):
        arguments = [sys.executable, "-c", PROGRAM, command, str(checkpoint), str(plan)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    clock, processor, peaks = zip(*runs, strict=True)
    return statistics.median(clock), statistics.median(processor), max(peaks)


def write_plan(model: make_checkpoint.Model, path: Path) -> None:
    """Every second expert of every layer stays."""
    keep = list(range(0, model.experts, KEPT))
    layers = {str(layer): {"keep": keep} for layer in range(model.dense_layers, model.layers)}
    path.write_text(json.dumps({"version": 1, "kind": "prune", "layers": layers}))


def main() -> None:
    """Print one line per checkpoint and command."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, model in make_checkpoint.MODELS.items():
            checkpoint, plan = Path(scratch) / name, Path(scratch) / f"{name}.json"
            size = make_checkpoint.write(model, checkpoint)
            write_plan(model, plan)
            for command in ("inspect", "dry run"):
                clock, busy, peak = measure(command, checkpoint, plan)
                text = f"{size / 1e9:7.1f} GB in {model.shards:3} shards"
                times = f"{clock:6.3f} s, {busy:6.3f} s of processor"
                print(f"{name:9} {text}  {command:8} {times}, peak {peak:4.0f} MB")


if __name__ == "__main__":
    main()
