"""OLMoE checkpoints in bfloat16, one tensor per expert and projection, whole or substituted.

Sizes are the caller's. Values are small and finite, for loaders whose answers nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def tensors(
    sizes: Mapping[str, int], layers: int, substituted: Sequence[int]
) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes, in the order of the model."""
    hidden, inner, vocab = (sizes[f"{key}_size"] for key in ("hidden", "intermediate", "vocab"))
    yield "model.embed_tokens.weight", [vocab, hidden]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", [hidden]
        for part in "qkvo":
            yield f"{prefix}.self_attn.{part}_proj.weight", [hidden, hidden]
        for part in "qk":
            yield f"{prefix}.self_attn.{part}_norm.weight", [hidden]
        yield f"{prefix}.mlp.gate.weight", [sizes["num_experts"], hidden]
        for expert in range(sizes["num_experts"]):
            path = f"{prefix}.mlp.experts.{expert}"
            if expert in substituted:
                yield f"{path}.approx_value", [hidden]
                continue
            yield f"{path}.gate_proj.weight", [inner, hidden]
            yield f"{path}.up_proj.weight", [inner, hidden]
            yield f"{path}.down_proj.weight", [hidden, inner]
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [vocab, hidden]


def write(
    directory: Path,
    sizes: Mapping[str, int],
    layers: int,
    substituted: Sequence[int] = (),
    shards: int = 3,
) -> None:
    """One checkpoint in consecutive shards, streamed to disk. ``sizes`` are keys of its config;
    ``substituted`` are the same experts in every layer."""
    directory.mkdir()
    named = list(tensors(sizes, layers, substituted))
    places: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        begin, end = (len(named) * n // shards for n in (number, number + 1))
        write_shard(directory / file, named[begin:end])
        places |= dict.fromkeys((name for name, _ in named[begin:end]), file)
    total = sum(2 * int(np.prod(shape)) for _, shape in named)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config: dict[str, Any] = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
        **sizes,
    }
    if substituted:
        config["approximate_experts"] = {str(layer): list(substituted) for layer in range(layers)}
    (directory / "config.json").write_text(json.dumps(config))


def write_shard(path: Path, named: list[tuple[str, list[int]]]) -> None:
    """Header and values, small finite bfloat16 from a seed; no tensor has over 2^22 values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in named:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(0).integers(0x3C00, 0x3D00, 2**23, dtype=np.uint16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (_, shape) in enumerate(named):  # another stretch of the values for each
            begin, size = 7919 * number % 2**21, int(np.prod(shape))
            file.write(values[begin : begin + size].tobytes())
