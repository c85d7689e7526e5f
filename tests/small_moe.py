"""Small MoE checkpoints of several layouts, written byte for byte, and blueprints as bytes.

Every row of every tensor has bytes of its own, so that a test sees which row went where.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import handmade

from mone_ref.rewrite.blueprint import Blueprint, OutputTensor
from mone_ref.rewrite.plan import Plan, from_document

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4, "Q7": 1}
HIDDEN, INNER = 16, 6

Tensors = handmade.Tensors


def tensor(name: str, shape: list[int], dtype: str = "BF16") -> tuple[str, list[int], bytes]:
    """Bytes that follow from the name and the row."""
    rows = shape[0] if len(shape) > 1 else 1
    size = math.prod(shape) * BYTES[dtype] // rows
    data = b""
    for row in range(rows):
        seed = hashlib.sha256(f"{name}/{row}".encode()).digest()
        data += (seed * (size // 32 + 1))[:size]
    return dtype, shape, data


def named(shapes: dict[str, list[int]], dtype: str = "BF16") -> Tensors:
    return {name: tensor(name, shape, dtype) for name, shape in shapes.items()}


def config(**changes: Any) -> dict[str, Any]:
    """A config of no family that the oracle knows."""
    return {
        "architectures": ["SomeMoeForCausalLM"],
        "model_type": "some_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        **changes,
    }


def per_expert(
    layers: tuple[int, ...] = (0, 1),
    experts: int = 6,
    stack: str = "model.layers",
    block: str = "mlp",
    router: str = "gate",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """Experts stored one by one, with a shared expert, attention and embeddings."""
    shapes = {"model.embed_tokens.weight": [20, HIDDEN], "lm_head.weight": [20, HIDDEN]}
    gate, up, down = projections
    for layer in layers:
        path = f"{stack}.{layer}"
        shapes[f"{path}.self_attn.q_proj.weight"] = [HIDDEN, HIDDEN]
        shapes[f"{path}.input_layernorm.weight"] = [HIDDEN]
        shapes[f"{path}.{block}.{router}.weight"] = [experts, HIDDEN]
        for name, shape in (
            (gate, [INNER, HIDDEN]),
            (up, [INNER, HIDDEN]),
            (down, [HIDDEN, INNER]),
        ):
            shapes[f"{path}.{block}.shared_experts.{name}.weight"] = shape
            for expert in range(experts):
                shapes[f"{path}.{block}.experts.{expert}.{name}.weight"] = shape
    return named(shapes)


def fused(experts: int = 4, layers: int = 1, **shapes: list[int]) -> Tensors:
    """All experts in one tensor, rows [E, out, in] unless ``shapes`` says otherwise."""
    default = {"gate_up_proj": [experts, 2 * INNER, HIDDEN], "down_proj": [experts, HIDDEN, INNER]}
    every = {"model.embed_tokens.weight": [20, HIDDEN]}
    for layer in range(layers):
        path = f"model.layers.{layer}.mlp"
        every[f"{path}.gate.weight"] = [experts, HIDDEN]
        every |= {f"{path}.experts.{name}": shape for name, shape in (shapes or default).items()}
    return named(every)


def write(
    directory: Path, tensors: Tensors, document: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """One file, or shards with an index, and two auxiliary files."""
    files: dict[str, Any] = {
        "config.json": config() if document is None else document,
        "tokenizer.json": {"version": "1.0"},
        "modeling.py": b"# code\n",
    }
    if shards == 1:
        files["model.safetensors"] = handmade.safetensors(tensors)
    else:
        listed = list(tensors)
        weight_map = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = listed[shard * len(listed) // shards : (shard + 1) * len(listed) // shards]
            own = {"format": "pt", "shard": str(shard)}
            stored = {one: tensors[one] for one in part}
            files[name] = handmade.safetensors(stored, tuple(own.items()))
            weight_map |= dict.fromkeys(part, name)
        total = sum(len(data) for _, _, data in tensors.values())
        files["model.safetensors.index.json"] = {
            "metadata": {"total_size": total, "by": "somebody"},
            "weight_map": weight_map,
        }
    return handmade.write(directory, files)


def prune(keep: dict[str, list[int]], **fields: Any) -> Plan:
    layers = {key: {"keep": ids} for key, ids in keep.items()}
    return from_document({"version": 1, "kind": "prune", "layers": layers, **fields}, Path())


def substitute(
    directory: Path, gone: dict[str, list[int]], stack: str = "model.layers", **fields: Any
) -> Plan:
    """A plan, and its file of constants in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {
        f"{stack}.{layer}.mlp.experts.{expert}.approx_value": [HIDDEN]
        for layer, ids in gone.items()
        for expert in ids
    }
    (directory / "constants.safetensors").write_bytes(handmade.safetensors(named(shapes)))
    layers = {key: {"substitute": ids} for key, ids in gone.items()}
    document = {"version": 1, "kind": "substitute", "constants": "constants.safetensors"}
    return from_document({**document, "layers": layers, **fields}, directory)


def content(output: OutputTensor) -> bytes:
    """The bytes that a blueprint asks for."""
    data = b""
    for piece in output.pieces:
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            data += file.read(piece.end - piece.begin)
    return data


def contents(blueprint: Blueprint) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Name -> shape and bytes of every output tensor."""
    return {
        output.name: (output.shape, content(output))
        for shard in blueprint.shards
        for output in shard.tensors
    }


def document(blueprint: Blueprint, name: str = "config.json") -> dict[str, Any]:
    """A document of the output."""
    value: dict[str, Any] = json.loads(blueprint.documents[name])
    return value
