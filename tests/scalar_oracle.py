"""A second oracle: models with expert substitution, one scalar at a time.

It shares nothing with ``mone_ref``: not a line, not a library. Two oracles with one
author's assumption in both would agree and prove nothing, so this one is written from
the architectures and the clauses alone: plain loops over lists of Python floats (IEEE
float64), checkpoint bytes decoded here. A substituted expert is a route that adds
``weight * constant`` (SEM-1); there are no compact rows and no rewritten routes.

Every inner product is ``math.fsum`` over rounded products: the sum itself rounds once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

Vector = list[float]
Matrix = list[Vector]  # one list per output row
Route = tuple[int, float]  # (logical expert, router weight)


class Architecture(NamedTuple):
    """Names and defaults of one ``model_type``.

    ``gate``, ``up`` and ``down`` name the matrices of an expert and of a dense MLP alike.
    """

    block: str
    gate: str
    up: str
    down: str
    epsilon: float
    theta: float


ARCHITECTURES = {
    "olmoe": Architecture("mlp", "gate_proj", "up_proj", "down_proj", 1e-5, 1e4),
    "qwen3_moe": Architecture("mlp", "gate_proj", "up_proj", "down_proj", 1e-6, 1e4),
    "mixtral": Architecture("block_sparse_moe", "w1", "w3", "w2", 1e-5, 1e6),
}


def log_probabilities(directory: str | Path, prompt: list[int]) -> Matrix:
    """Log-probabilities ``[T, V]`` of the next token after each token of ``prompt``."""
    directory = Path(directory)
    config = read_config(directory)
    weights = read_weights(directory)
    return [log_softmax(row) for row in logits(config, weights, prompt)]


# Files


def read_config(directory: Path) -> dict[str, Any]:
    """config.json; refuses what this oracle does not compute rather than ignore it."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    unsupported = {
        "model_type": config.get("model_type") not in ARCHITECTURES,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "sliding_window": config.get("sliding_window") is not None,
        "rope_type": rope_type != "default" or config.get("rope_scaling") is not None,
    }
    if any(unsupported.values()):
        raise ValueError(f"not computed here: {[key for key, bad in unsupported.items() if bad]}")
    return config


def architecture(config: Mapping[str, Any]) -> Architecture:
    return ARCHITECTURES[config["model_type"]]


def norm_epsilon(config: Mapping[str, Any]) -> float:
    return config.get("rms_norm_eps", architecture(config).epsilon)


def constant_names(config: Mapping[str, Any]) -> dict[int, dict[int, str]]:
    """Layer -> substituted expert -> name of its constant, in the form that the config has."""
    transforms = (config.get("compression_config") or {}).get("transform_config") or {}
    explicit = transforms.get("expert_substitution")
    if explicit is None:
        path = f"model.layers.{{}}.{architecture(config).block}.experts.{{}}.approx_value"
        return {
            int(layer): {i: path.format(layer, i) for i in ids or []}
            for layer, ids in (config.get("approximate_experts") or {}).items()
        }
    names: dict[int, dict[int, str]] = {}
    for path, target in explicit["targets"].items():
        (layer,) = (int(part) for part in path.split(".") if part.isdecimal())
        names[layer] = {
            int(expert): replacement["tensors"]["value"]
            for expert, replacement in target["replacements"].items()
        }
    return names


def read_weights(directory: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint: a ``Vector`` for one dimension, a ``Matrix`` for two."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    weights: dict[str, Any] = {}
    for file in files:
        weights.update(read_safetensors(directory / file))
    return weights


def read_safetensors(path: Path) -> dict[str, Any]:
    """One file: eight bytes of header length, the header in JSON, then the data."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    tensors: dict[str, Any] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = decode(data[begin:end], entry["dtype"])
        tensors[name] = values if len(entry["shape"]) == 1 else rows(values, entry["shape"])
    return tensors


def rows(values: Vector, shape: list[int]) -> Matrix:
    height, width = shape
    return [values[row * width : (row + 1) * width] for row in range(height)]


def decode(data: bytes, dtype: str) -> Vector:
    """Little-endian numbers as Python floats, exactly."""
    if dtype == "BF16":  # the upper half of a float32
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        data, dtype = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)), "F32"
    letter, size = {"F16": ("e", 2), "F32": ("f", 4), "F64": ("d", 8)}[dtype]
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


# Arithmetic


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(map(mul, a, b))


def apply(matrix: Matrix, x: Vector) -> Vector:
    return [dot(row, x) for row in matrix]


def add(a: Vector, b: Vector) -> Vector:
    return [p + q for p, q in zip(a, b, strict=True)]


def weighted_sum(terms: Iterable[Route], vectors: Mapping[int, Vector], size: int) -> Vector:
    """Sum of ``weight * vectors[key]`` over (key, weight) terms."""
    terms = list(terms)
    return [math.fsum(weight * vectors[key][i] for key, weight in terms) for i in range(size)]


def softmax(x: Vector) -> Vector:
    top = max(x)
    powers = [math.exp(value - top) for value in x]
    total = math.fsum(powers)
    return [power / total for power in powers]


def log_softmax(x: Vector) -> Vector:
    top = max(x)
    log_total = math.log(math.fsum(math.exp(value - top) for value in x))
    return [value - top - log_total for value in x]


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def rms_norm(x: Vector, weight: Vector, epsilon: float) -> Vector:
    scale = 1.0 / math.sqrt(dot(x, x) / len(x) + epsilon)
    return [w * (value * scale) for w, value in zip(weight, x, strict=True)]


# Attention


def attention(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, states: Matrix
) -> Matrix:
    """Causal attention over normalised ``states`` ``[T, H]``; returns ``[T, H]``."""
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    queries, keys, values = [], [], []  # [T][heads][head_dim]
    for position, x in enumerate(states):
        q, k, v = project(config, weights, prefix, x)
        angles = rotary_angles(config, position, head_dim)
        queries.append([rotate(head, angles) for head in rows(q, [num_heads, head_dim])])
        keys.append([rotate(head, angles) for head in rows(k, [num_kv_heads, head_dim])])
        values.append(rows(v, [num_kv_heads, head_dim]))
    outputs = []
    for position in range(len(states)):
        mixed: Vector = []
        for head in range(num_heads):
            kv = head // (num_heads // num_kv_heads)
            past = range(position + 1)
            mixed += attend(
                queries[position][head], [keys[t][kv] for t in past], [values[t][kv] for t in past]
            )
        outputs.append(apply(weights[f"{prefix}.o_proj.weight"], mixed))
    return outputs


def project(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, x: Vector
) -> tuple[Vector, Vector, Vector]:
    """Query, key and value of one token.

    OLMoE normalises all queries at once and all keys at once, Qwen3 each head by itself,
    Mixtral neither.
    """
    epsilon, kind = norm_epsilon(config), config["model_type"]
    q, k, v = (apply(weights[f"{prefix}.{name}_proj.weight"], x) for name in "qkv")
    if kind == "olmoe":
        q = rms_norm(q, weights[f"{prefix}.q_norm.weight"], epsilon)
        k = rms_norm(k, weights[f"{prefix}.k_norm.weight"], epsilon)
    elif kind == "qwen3_moe":
        q = norm_heads(q, weights[f"{prefix}.q_norm.weight"], epsilon)
        k = norm_heads(k, weights[f"{prefix}.k_norm.weight"], epsilon)
    limit = config.get("clip_qkv")
    if limit is not None:
        q, k, v = ([min(max(value, -limit), limit) for value in part] for part in (q, k, v))
    return q, k, v


def norm_heads(x: Vector, weight: Vector, epsilon: float) -> Vector:
    """Heads lie one after another, each as long as the one weight that they share."""
    heads = rows(x, [len(x) // len(weight), len(weight)])
    return [value for head in heads for value in rms_norm(head, weight, epsilon)]


def rotary_angles(config: Mapping[str, Any], position: int, head_dim: int) -> Vector:
    parameters = config.get("rope_parameters") or config
    theta = parameters.get("rope_theta", architecture(config).theta)
    return [position * theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def rotate(head: Vector, angles: Vector) -> Vector:
    """Element i turns with element i + head_dim / 2."""
    half = len(head) // 2
    pairs = list(zip(head[:half], head[half:], angles, strict=True))
    first = [a * math.cos(angle) - b * math.sin(angle) for a, b, angle in pairs]
    second = [b * math.cos(angle) + a * math.sin(angle) for a, b, angle in pairs]
    return first + second


def attend(query: Vector, keys: Matrix, values: Matrix) -> Vector:
    scale = len(query) ** -0.5
    shares = softmax([dot(query, key) * scale for key in keys])
    return [dot(shares, list(column)) for column in zip(*values, strict=True)]


# Experts


def route(router_logits: Vector, top_k: int, normalise: bool) -> list[Route]:
    """The ``top_k`` routes of a token: softmax over ALL experts first, ties to the lower id."""
    scores = softmax(router_logits)
    ids = best(scores, top_k)
    total = math.fsum(scores[expert] for expert in ids) if normalise else 1.0
    return [(expert, scores[expert] / total) for expert in ids]


def route_mixtral(router_logits: Vector, top_k: int) -> list[Route]:
    """As Mixtral's authors wrote it: the best logits first, then the softmax of those alone."""
    ids = best(router_logits, top_k)
    return list(zip(ids, softmax([router_logits[expert] for expert in ids]), strict=True))


def best(scores: Vector, top_k: int) -> list[int]:
    """Ids of the ``top_k`` largest, best first, ties to the lower id."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:top_k]


def swiglu(weights: Mapping[str, Any], path: str, names: Architecture, x: Vector) -> Vector:
    """An expert, or the MLP of a dense layer: ``down(silu(gate(x)) * up(x))``."""
    gate = apply(weights[f"{path}.{names.gate}.weight"], x)
    up = apply(weights[f"{path}.{names.up}.weight"], x)
    return apply(weights[f"{path}.{names.down}.weight"], list(map(mul, map(silu, gate), up)))


def constant_sum(routes: list[Route], constants: Mapping[int, Vector], size: int) -> Vector:
    """The constant part of SEM-1: routes to no substituted expert add nothing."""
    return weighted_sum([term for term in routes if term[0] in constants], constants, size)


def moe(
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    prefix: str,
    constants: Mapping[int, Vector],
    x: Vector,
) -> Vector:
    """SEM-1 for one token: retained ``w * expert(x)`` plus substituted ``w * v``, as routed."""
    router_logits = apply(weights[f"{prefix}.gate.weight"], x)
    top_k = config["num_experts_per_tok"]
    if config["model_type"] == "mixtral":
        routes = route_mixtral(router_logits, top_k)
    else:
        routes = route(router_logits, top_k, config.get("norm_topk_prob", False))
    retained = [term for term in routes if term[0] not in constants]
    names = architecture(config)
    outputs = {i: swiglu(weights, f"{prefix}.experts.{i}", names, x) for i, _ in retained}
    constant = constant_sum(routes, constants, len(x))
    return add(weighted_sum(retained, outputs, len(x)), constant)


# The decoder


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """In Qwen3 every ``decoder_sparse_step``-th layer, unless ``mlp_only_layers`` names it."""
    if config["model_type"] != "qwen3_moe":
        return True
    in_step = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return in_step and layer not in (config.get("mlp_only_layers") or [])


def mlp(
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    layer: int,
    constants: Mapping[int, Vector],
    x: Vector,
) -> Vector:
    """The experts of a layer, or its one dense MLP."""
    path = f"model.layers.{layer}.{architecture(config).block}"
    if has_experts(config, layer):
        return moe(config, weights, path, constants, x)
    return swiglu(weights, path, architecture(config), x)


def logits(config: Mapping[str, Any], weights: Mapping[str, Any], prompt: list[int]) -> Matrix:
    """Logits ``[T, V]``: pre-norm layers with residuals, final norm, language head."""
    epsilon = norm_epsilon(config)
    names = constant_names(config)
    states = [weights["model.embed_tokens.weight"][token] for token in prompt]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm = weights[f"{prefix}.input_layernorm.weight"]
        normed = [rms_norm(x, norm, epsilon) for x in states]
        states = list(map(add, states, attention(config, weights, f"{prefix}.self_attn", normed)))
        norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        constants = {expert: weights[name] for expert, name in names.get(layer, {}).items()}
        states = [
            add(x, mlp(config, weights, layer, constants, rms_norm(x, norm, epsilon)))
            for x in states
        ]
    tied = config.get("tie_word_embeddings", False)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return [apply(head, rms_norm(x, weights["model.norm.weight"], epsilon)) for x in states]
