"""Time and memory of rewriting, beside ``cp`` of the same bytes and a load-and-save loop in torch.

Makes a checkpoint of OLMoE's sizes (13.8 GB of data) unless one is there, and halves its experts
in both ways, durably. In each round every contender runs once, in a new order; medians are told,
and the ratio to ``cp`` and ``sync`` of the very files that were written. The source is read once
before each run, so that it is in the page cache, as for ``cp``. Peak memory is the process's own
(``ru_maxrss``).

    python benchmarks/rewriting.py DIR [--repeat 5] [--layers 16] [--workers 1 2] [--no-torch]

``DIR`` needs 30 GB; outputs are deleted, the checkpoint in ``DIR/source`` stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
KEEP = list(range(0, 64, 2))
SOURCE_DOCUMENT = "the tool of the source document: 13.0 GB to 7.39 GB in 17.3 s on another machine"

REWRITE = """
import resource, sys
from pathlib import Path
from mone_ref.rewrite import make, plan, writer
source, chosen, out, workers = sys.argv[1:]
made = make.blueprint(Path(source), plan.read(Path(chosen)))
assert made.blueprint is not None, made.problems
writer.write(made.blueprint, Path(out), workers=int(workers))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

TORCH = """
import re, resource, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
source, chosen, out = map(Path, sys.argv[1:4])
out.mkdir()
for shard in sorted(source.glob("*.safetensors")):
    kept = {}
    for name, tensor in load_file(shard).items():
        expert = re.search(r"experts\\.(\\d+)\\.", name)
        if expert and int(expert[1]) % 2:
            continue
        kept[name] = tensor[::2].contiguous() if name.endswith("mlp.gate.weight") else tensor
    save_file(kept, out / shard.name, metadata={"format": "pt"})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def plans(root: Path, layers: int, hidden: int) -> dict[str, Path]:
    """Half of the experts, pruned and substituted; the constants are zeros."""
    constants = {
        f"model.layers.{layer}.mlp.experts.{expert}.approx_value": expert
        for layer in range(layers)
        for expert in range(64)
        if expert not in KEEP
    }
    stored = [(name, "BF16", (hidden,)) for name in constants]
    make_checkpoint.write_shard(root / "constants.safetensors", stored, dense=False)
    listed = {str(layer): {"keep": KEEP} for layer in range(layers)}
    written = {}
    for kind, more in (("prune", {}), ("substitute", {"constants": "constants.safetensors"})):
        written[kind] = root / f"{kind}.json"
        document = {"version": 1, "kind": kind, **more, "layers": listed}
        written[kind].write_text(json.dumps(document))
    return written


def script(text: str, *arguments: object) -> int:
    """Run Python in a process of its own; its peak memory in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1]) * 1024


def synced(out: Path) -> None:
    """What makes the files of a directory durable."""
    subprocess.run(["sync", *filter(Path.is_file, out.rglob("*")), out], check=True)


def copy(files: Path, out: Path) -> int:
    """``cp -r`` and ``sync``."""
    subprocess.run(["cp", "-r", files, out], check=True)
    synced(out)
    return 0


def torch_loop(source: Path, plan: Path, out: Path) -> int:
    """Load, drop, save, shard by shard; and ``sync``."""
    peak = script(TORCH, source, plan, out)
    synced(out)
    return peak


def warm(directory: Path) -> None:
    """Read all files once."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(8 << 20)
            while file.readinto(buffer):
                pass


def size(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--no-torch", action="store_true")
    chosen = parser.parse_args()
    source, out, files = (chosen.root / name for name in ("source", "out", "files"))
    chosen.root.mkdir(exist_ok=True)
    config = {**make_checkpoint.OLMOE.config, "num_hidden_layers": chosen.layers}
    model = replace(make_checkpoint.OLMOE, layers=chosen.layers, config=config)
    if not source.exists():
        make_checkpoint.write(model, source, dense=True)
    planned = plans(chosen.root, chosen.layers, model.hidden)
    shutil.rmtree(files, ignore_errors=True)
    script(REWRITE, source, planned["prune"], files, 2)

    contenders: dict[str, Callable[[], int]] = {"cp and sync": lambda: copy(files, out)}
    for kind, path in planned.items():
        for count in chosen.workers:
            name = f"{kind}, workers {count}"
            contenders[name] = lambda p=path, n=count: script(REWRITE, source, p, out, n)
    if not chosen.no_torch:
        name = "prune, torch loop and sync"
        contenders[name] = lambda: torch_loop(source, planned["prune"], out)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks = dict.fromkeys(contenders, 0)
    for _ in range(chosen.repeat):
        for name in random.sample(list(contenders), len(contenders)):
            warm(files if name == "cp and sync" else source)
            subprocess.run(["sync", "-f", chosen.root], check=True)
            begun = time.perf_counter()
            peaks[name] = max(peaks[name], contenders[name]())
            seconds[name].append(time.perf_counter() - begun)
            shutil.rmtree(out)
    told(seconds, peaks, size(source), size(files))
    shutil.rmtree(files)


def told(seconds: dict[str, list[float]], peaks: dict[str, int], read: int, written: int) -> None:
    """The table."""
    print(f"{read / 1e9:.2f} GB -> {written / 1e9:.2f} GB")
    base = statistics.median(seconds["cp and sync"])
    print(f"{'':28} {'median s':>9} {'min':>7} {'max':>7} {'ratio':>6} {'GB/s':>6} {'peak MB':>8}")
    for name, took in seconds.items():
        middle = statistics.median(took)
        peak = f"{peaks[name] / 1e6:8.0f}" if peaks[name] else f"{'':8}"
        rate = written / 1e9 / middle
        spread = f"{middle:9.2f} {min(took):7.2f} {max(took):7.2f}"
        print(f"{name:28} {spread} {middle / base:6.2f} {rate:6.2f} {peak}")
    print(SOURCE_DOCUMENT)


if __name__ == "__main__":
    main()
