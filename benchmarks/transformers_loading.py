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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
SAMPLE = 0.002  # seconds between two looks at the memory


def write(directory: Path, layers: int, substituted: list[int]) -> None:
    """One checkpoint, a shard per layer, values from a seed."""
    seeded = torch.Generator().manual_seed(0)
    hidden, inner, vocab = (SIZES[f"{key}_size"] for key in ("hidden", "intermediate", "vocab"))

    def fill(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=seeded) * 0.02).to(torch.bfloat16)

    shards: list[dict[str, torch.Tensor]] = [
        {
            "model.embed_tokens.weight": fill(vocab, hidden),
            "model.norm.weight": fill(hidden),
            "lm_head.weight": fill(vocab, hidden),
        }
    ]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shard = {
            f"{prefix}.{name}.weight": fill(hidden)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        for part in "qkvo":
            shard[f"{prefix}.self_attn.{part}_proj.weight"] = fill(hidden, hidden)
        for part in "qk":
            shard[f"{prefix}.self_attn.{part}_norm.weight"] = fill(hidden)
        shard[f"{prefix}.mlp.gate.weight"] = fill(SIZES["num_experts"], hidden)
        for expert in range(SIZES["num_experts"]):
            path = f"{prefix}.mlp.experts.{expert}"
            if expert in substituted:
                shard[f"{path}.approx_value"] = fill(hidden)
                continue
            shard[f"{path}.gate_proj.weight"] = fill(inner, hidden)
            shard[f"{path}.up_proj.weight"] = fill(inner, hidden)
            shard[f"{path}.down_proj.weight"] = fill(hidden, inner)
        shards.append(shard)
    store(directory, layers, substituted, shards)


def store(
    directory: Path, layers: int, substituted: list[int], shards: list[dict[str, torch.Tensor]]
) -> None:
    """Shards, their index and the config."""
    directory.mkdir()
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config: dict[str, Any] = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
        **SIZES,
    }
    if substituted:
        config["approximate_experts"] = {str(layer): substituted for layer in range(layers)}
    (directory / "config.json").write_text(json.dumps(config))


def memory() -> tuple[int, int]:
    """Anonymous and mapped bytes of this process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kib["RssAnon"] * 1024, kib["RssFile"] * 1024


def measured(load: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of a load, its peak memory, and the size of the model, in MB."""
    start, peak, done = memory(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE):
            for place, (now, before) in enumerate(zip(memory(), start, strict=True)):
                peak[place] = max(peak[place], now - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, busy = time.perf_counter(), time.process_time()
    model = load()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    done.set()
    watcher.join()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "seconds": seconds,
        "cpu": busy,
        "anonymous": peak[0] / 1e6,
        "mapped": peak[1] / 1e6,
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
        write(Path(root, "plain"), options.layers, [])
        write(Path(root, "substituted"), options.layers, SUBSTITUTED)
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
