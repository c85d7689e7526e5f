"""Time and memory of loading stacked experts: our conversion beside transformers' own.

Writes a plain OLMoE checkpoint in bfloat16, one tensor per expert and projection, and its
sibling with half of the experts substituted. Loads, each in a process of its own and in turn:
``convert`` (mone_ref.conversion, into gate_up_proj [R, 2I, H] and down_proj [R, H, I]),
and ``from_pretrained`` (transformers, the same stacks; the plain checkpoint only, since it
cannot read the other). Prints medians. Files are in the page cache.

Peak memory is what the process gained over its state before the load. *anonymous* is
allocated; *all* is resident memory together, pages of mapped files included.

    python benchmarks/loading.py [--layers 5] [--repeats 5] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from olmoe_checkpoints import write
from peak_memory import watched

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
SUBSTITUTED = list(range(0, 64, 2))
RUNS = (
    ("convert", "plain"),
    ("from_pretrained", "plain"),
    ("convert", "substituted"),
)


# -- one load


def measured(load: Callable[[], dict[str, torch.Tensor]]) -> dict[str, float]:
    """Seconds of a load, the peak memory it gained and the bytes it keeps, in MB."""
    with watched() as peak:
        began = time.perf_counter()
        kept = load()
        seconds = time.perf_counter() - began
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept.values()}
    size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    return {
        "seconds": seconds,
        "anonymous": peak.anonymous,
        "all": peak.together,
        "kept": size / 1e6,
        "checksum": checksum(kept),
    }


def checksum(kept: dict[str, torch.Tensor]) -> float:
    """The sum of every 101st value of the stacked experts, equal where the loads are."""
    names = [name for name in sorted(kept) if name.endswith(("gate_up_proj", "down_proj"))]
    parts = (kept[name].view(torch.int16).flatten()[::101] for name in names)
    return float(sum(part.sum(dtype=torch.int64) for part in parts))


def converted(path: str) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, experts stacked."""
    from mone_ref import config as config_file
    from mone_ref.checkpoint import Checkpoint
    from mone_ref.conversion import (
        Concatenate,
        MergeModulelist,
        Request,
        WeightConverter,
        grouped,
        stream,
    )

    experts = "model.layers.{layer}.mlp.experts"
    one = experts + ".{expert}"
    converters = [
        WeightConverter(
            [f"{one}.gate_proj.weight", f"{one}.up_proj.weight"],
            [f"{experts}.gate_up_proj"],
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            [f"{one}.down_proj.weight"], [f"{experts}.down_proj"], [MergeModulelist(dim=0)]
        ),
    ]
    config, checkpoint = config_file.read(Path(path)), Checkpoint.open(path)
    request = Request(
        substitution=lambda layer: config.substitution.layer(layer, config.model.num_experts)
    )
    return dict(stream(checkpoint, grouped(checkpoint, converters, request)))


def run_one(loader: str, path: str) -> None:
    """In a process of its own: load once and print what it took as JSON."""
    if loader == "convert":
        print(json.dumps(measured(lambda: converted(path))))
        return
    import transformers

    transformers.utils.logging.disable_progress_bar()
    stock = transformers.OlmoeForCausalLM
    print(json.dumps(measured(lambda: stock.from_pretrained(path, dtype="auto").state_dict())))


# -- all of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write (default: temporary)")
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        write(Path(root, "plain"), SIZES, options.layers)
        write(Path(root, "substituted"), SIZES, options.layers, SUBSTITUTED)
        compare(root, options.repeats)


def compare(root: str, repeats: int) -> None:
    """All loads in turn, ``repeats`` times and once before to warm up; prints medians."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {run: [] for run in RUNS}
    for repeat in range(repeats + 1):
        for loader, name in RUNS:
            command = [sys.executable, __file__, "--one", loader, f"{root}/{name}"]
            output = subprocess.run(command, check=True, capture_output=True).stdout
            if repeat:
                found[loader, name].append(json.loads(output))
    print("loader           checkpoint   seconds  peak MB: anonymous    all   kept MB")
    medians = {}
    for (loader, name), runs in found.items():
        values = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        medians[loader, name] = values
        print(
            f"{loader:16} {name:12} {values['seconds']:7.2f} {values['anonymous']:19.0f} "
            f"{values['all']:6.0f} {values['kept']:9.0f}"
        )
    for name in ("plain", "substituted"):
        sums = {run["checksum"] for key, runs in found.items() if key[1] == name for run in runs}
        print(f"{name}: stacked experts are {'equal' if len(sums) == 1 else 'NOT EQUAL'}")
    ours, theirs = medians["convert", "plain"], medians["from_pretrained", "plain"]
    print(f"convert / from_pretrained, seconds: {ours['seconds'] / theirs['seconds']:.2f}")
    for name in ("plain", "substituted"):
        ours = medians["convert", name]
        bound = 1.05 * ours["kept"] + 200
        print(f"convert, {name}: peak {ours['all']:.0f} MB, 1.05 x kept + 200 is {bound:.0f} MB")


if __name__ == "__main__":
    main()
