"""Checkpoints of real sizes for measuring the checkpoint tools, without downloading one.

Headers, index and config are real. The data are a hole in the file, which takes no disk space
and reads as zeros; with ``--dense`` they are written out, from a fixed pattern.

    python benchmarks/make_checkpoint.py olmoe OUT [--dense]   # 13.8 GB in 3 shards
    python benchmarks/make_checkpoint.py terabyte OUT          # 1 TB in 160 shards
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
BLOCK = 128  # rows and columns that share one scale of an FP8 weight
CHUNK = os.urandom(1 << 22)  # never all zeros: a file system could store those as a hole

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


@dataclass(frozen=True)
class Model:
    """Sizes of a model whose experts are stored one by one."""

    config: dict[str, Any]
    layers: int
    dense_layers: int
    experts: int
    hidden: int
    intermediate: int
    shards: int
    fp8: bool
    correction_bias: bool


OLMOE = Model(
    config={
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    layers=16,
    dense_layers=0,
    experts=64,
    hidden=2048,
    intermediate=1024,
    shards=3,
    fp8=False,
    correction_bias=False,
)

TERABYTE = Model(
    config={
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    },
    layers=61,
    dense_layers=1,
    experts=384,
    hidden=7168,
    intermediate=2048,
    shards=160,
    fp8=True,
    correction_bias=True,
)

MODELS = {"olmoe": OLMOE, "terabyte": TERABYTE}


def tensors(model: Model) -> Iterator[Tensor]:
    """Every tensor, in the order of the model."""
    vocabulary, hidden = model.config["vocab_size"], model.hidden
    yield "model.embed_tokens.weight", "BF16", (vocabulary, hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", "BF16", (hidden,)
        yield from attention(model, f"{prefix}.self_attn")
        if layer < model.dense_layers:
            yield from mlp(model, f"{prefix}.mlp", model.config["intermediate_size"])
        else:
            yield from moe(model, f"{prefix}.mlp")
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocabulary, hidden)


def attention(model: Model, path: str) -> Iterator[Tensor]:
    """Plain attention of OLMoE, or latent attention."""
    config, hidden = model.config, model.hidden
    if "kv_lora_rank" not in config:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{path}.{name}.weight", "BF16", (hidden, hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{path}.{name}.weight", "BF16", (hidden,)
        return
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    rotated, value = config["qk_rope_head_dim"], config["v_head_dim"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    yield f"{path}.q_a_layernorm.weight", "BF16", (queries,)
    yield f"{path}.kv_a_layernorm.weight", "BF16", (keys,)
    yield from matrix(model, f"{path}.q_a_proj", queries, hidden)
    yield from matrix(model, f"{path}.q_b_proj", heads * (plain + rotated), queries)
    yield from matrix(model, f"{path}.kv_a_proj_with_mqa", keys + rotated, hidden)
    yield from matrix(model, f"{path}.kv_b_proj", heads * (plain + value), keys)
    yield from matrix(model, f"{path}.o_proj", hidden, heads * value)


def moe(model: Model, path: str) -> Iterator[Tensor]:
    """Router, experts, and the shared expert where there is one."""
    yield f"{path}.gate.weight", "BF16", (model.experts, model.hidden)
    if model.correction_bias:
        yield f"{path}.gate.e_score_correction_bias", "F32", (model.experts,)
        yield from mlp(model, f"{path}.shared_experts", model.intermediate)
    for expert in range(model.experts):
        yield from mlp(model, f"{path}.experts.{expert}", model.intermediate)


def mlp(model: Model, path: str, intermediate: int) -> Iterator[Tensor]:
    """Gate, up and down."""
    yield from matrix(model, f"{path}.gate_proj", intermediate, model.hidden)
    yield from matrix(model, f"{path}.up_proj", intermediate, model.hidden)
    yield from matrix(model, f"{path}.down_proj", model.hidden, intermediate)


def matrix(model: Model, path: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A weight, with its scales in FP8."""
    yield f"{path}.weight", "F8_E4M3" if model.fp8 else "BF16", (rows, columns)
    if model.fp8:
        blocks = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
        yield f"{path}.weight_scale_inv", "F32", blocks


def size(tensor: Tensor) -> int:
    """Bytes."""
    _, dtype, shape = tensor
    return math.prod(shape) * BYTES[dtype]


def split(model: Model) -> list[list[Tensor]]:
    """Shards of about equal size, in the order of the model."""
    every = list(tensors(model))
    share = sum(map(size, every)) / model.shards
    shards: list[list[Tensor]] = [[] for _ in range(model.shards)]
    written = 0
    for tensor in every:
        shards[min(int(written / share), model.shards - 1)].append(tensor)
        written += size(tensor)
    return shards


def write_shard(path: Path, stored: list[Tensor], dense: bool) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in stored:
        name, dtype, shape = tensor
        begin, end = end, end + size(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if dense:
            for begin in range(0, end, len(CHUNK)):
                file.write(CHUNK[: end - begin])
        else:
            file.truncate(8 + len(text) + end)


def write(model: Model, directory: Path, dense: bool = False) -> int:
    """The whole checkpoint; returns its tensor bytes."""
    directory.mkdir(parents=True)
    shards, weight_map, total = split(model), {}, 0
    for number, stored in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / name, stored, dense)
        weight_map |= {tensor[0]: name for tensor in stored}
        total += sum(map(size, stored))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    (directory / "generation_config.json").write_text('{"do_sample": false}\n')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return total


def main() -> None:
    """Write one of the models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dense", action="store_true", help="write data, not a hole")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    chosen = parser.parse_args()
    model = MODELS[chosen.model]
    if chosen.layers:
        config = {**model.config, "num_hidden_layers": chosen.layers}
        model = replace(model, layers=chosen.layers, config=config)
    if chosen.out.exists():
        sys.exit(f"{chosen.out} exists")
    total = write(model, chosen.out, chosen.dense)
    print(f"{chosen.out}: {total / 1e9:.1f} GB of tensors in {model.shards} shards")


if __name__ == "__main__":
    main()
