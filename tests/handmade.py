"""Checkpoints written byte for byte, without the code under test and without safetensors.

The model is the smallest OLMoE that has everything: two layers of four experts, hidden
size 4, layer 0 with experts 1 and 3 substituted, layer 1 not listed.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any


class Absent(Enum):
    """A key to leave out; it has a name, so that test ids are the same in every process."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT

ONE = b"\x80\x3f"  # 1.0 in bfloat16, little-endian

# name -> (dtype, shape, bytes)
Tensors = dict[str, tuple[str, list[int], bytes]]

ATTENTION = {
    "input_layernorm": [4],
    "self_attn.q_proj": [4, 4],
    "self_attn.k_proj": [2, 4],
    "self_attn.v_proj": [2, 4],
    "self_attn.o_proj": [4, 4],
    "self_attn.q_norm": [4],
    "self_attn.k_norm": [2],
    "post_attention_layernorm": [4],
    "mlp.gate": [4, 4],
}
EXPERT = {"gate_proj": [3, 4], "up_proj": [3, 4], "down_proj": [4, 3]}
SUBSTITUTED = {0: [1, 3], 1: []}


def config() -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 5,
        "hidden_size": 4,
        "intermediate_size": 3,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "clip_qkv": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "approximate_experts": {"0": [1, 3]},
    }


def explicit(constants: dict[int, str], layer: int = 0) -> dict[str, Any]:
    """compression_config: one layer in the explicit form."""
    replacements = {
        str(expert): {"format": "constant-v1", "tensors": {"value": name}}
        for expert, name in constants.items()
    }
    declared = {
        "version": 1,
        "router_semantics": {
            "preserve_logical_expert_ids": True,
            "preserve_router_weights": True,
            "renormalize_after_substitution": False,
        },
        "targets": {
            f"model.layers.{layer}.mlp.experts": {
                "num_logical_experts": 4,
                "weight_layout": "compact_retained_experts",
                "replacements": replacements,
            }
        },
    }
    return {"transform_config": {"expert_substitution": declared}}


def bf16(shape: list[int], value: bytes = ONE) -> tuple[str, list[int], bytes]:
    """A bfloat16 tensor with one value everywhere."""
    size = 1
    for length in shape:
        size *= length
    return "BF16", shape, value * size


def tensors() -> Tensors:
    """All tensors of the model, each filled with 1.0."""
    named = {
        "model.embed_tokens.weight": [5, 4],
        "model.norm.weight": [4],
        "lm_head.weight": [5, 4],
    }
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        named |= {f"{prefix}.{name}.weight": shape for name, shape in ATTENTION.items()}
        for expert in range(4):
            path = f"{prefix}.mlp.experts.{expert}"
            if expert in SUBSTITUTED[layer]:
                named[f"{path}.approx_value"] = [4]
            else:
                named |= {f"{path}.{name}.weight": shape for name, shape in EXPERT.items()}
    return {name: bf16(shape) for name, shape in named.items()}


def with_header(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """A file with a given header: bytes as they are, an object as JSON padded to 8 bytes."""
    text = header if isinstance(header, bytes) else padded(json.dumps(header).encode())
    return len(text).to_bytes(8, "little") + text + data


def padded(text: bytes) -> bytes:
    """A header's JSON with spaces behind it, so that the data starts aligned."""
    return text + b" " * (-len(text) % 8)


def safetensors(stored: Tensors, metadata: Any = (("format", "pt"),)) -> bytes:
    """A well-formed file: tensors back to back in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, content) in stored.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    return with_header(header, data)


def write(directory: Path, files: dict[str, bytes | dict[str, Any]]) -> Path:
    """Write files into a directory, objects as JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name).write_bytes(data)
    return directory


def index(weight_map: dict[str, str], total: Any = None) -> dict[str, Any]:
    """A shard index."""
    metadata = {} if total is None else {"total_size": total}
    return {"metadata": metadata, "weight_map": weight_map}


RECIPE = {
    "family": "olmoe",
    "seed": 12,
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_experts": 4,
    "top_k": 2,
    "substitution": {"0": [2, 0]},
    "prompts": [8, 6],
}
"""The smallest fixture that a user would fill, but for its name."""
