"""Time and memory of loading into transformers: a substituted checkpoint beside its plain sibling.

Fills two OLMoE checkpoints of the same sizes in a temporary directory, about 1 GB plain, with
half of the experts of every layer substituted in the other. Each load runs in a process of its
own; the best of three is told. Peak memory is what the process gained over its state before the
load: *anonymous* is allocated, *mapped* are pages of the files, which the system may drop.

    python benchmarks/transformers_loading.py [--layers 5]
"""

from __future__ import annotations

import argparse
import json
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
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}
SUBSTITUTED = list(range(0, 32, 2))
DTYPES = ("bfloat16", "float32")
REPEATS = 3


def measured(load: Callable[[], torch.nn.Module]) -> dict[str, float]:
    """Wall and CPU seconds of a load, its peak memory, and the size of the model, in MB."""
    with watched() as peak:
        began, busy = time.perf_counter(), time.process_time()
        model = load()
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "seconds": seconds,
        "cpu": busy,
        "anonymous": peak.anonymous,
        "mapped": peak.mapped,
        "parameters": size / 1e6,
    }


def run_one(loader: str, path: str, dtype: str) -> None:
    """In a process of its own: load once and print what it took as JSON."""
    import transformers

    from mone_ref.integrations.transformers import load

    transformers.utils.logging.disable_progress_bar()
    if loader == "load":
        found = measured(lambda: load(path, dtype))
    else:
        stock = transformers.OlmoeForCausalLM
        found = measured(lambda: stock.from_pretrained(path, dtype=dtype))
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument(
        "--one", nargs=3, metavar=("LOADER", "PATH", "DTYPE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
        return
    with tempfile.TemporaryDirectory() as root:
        shards = options.layers + 1
        write(Path(root, "plain"), SIZES, options.layers, shards=shards)
        write(Path(root, "substituted"), SIZES, options.layers, SUBSTITUTED, shards)
        print("loader           checkpoint   dtype     seconds: wall   CPU  MB: anon. mapped model")
        for loader, name in (
            ("from_pretrained", "plain"),
            ("load", "plain"),
            ("load", "substituted"),
        ):
            for dtype in DTYPES:
                command = [sys.executable, __file__, "--one", loader, f"{root}/{name}", dtype]
                runs = [
                    json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                    for _ in range(REPEATS)
                ]
                best = {key: min(run[key] for run in runs) for key in runs[0]}
                print(
                    f"{loader:16} {name:12} {dtype:9} {best['seconds']:13.2f} {best['cpu']:5.2f} "
                    f"{best['anonymous']:10.0f} {best['mapped']:6.0f} {best['parameters']:5.0f}"
                )


if __name__ == "__main__":
    main()
