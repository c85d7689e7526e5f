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

    ``gate``, ``up`` and ``down`` name the matrices of an expert, of a dense MLP and of the
    shared experts alike; ``bias`` is the router's correction, ``norms`` what a norm of queries
    or keys spans, ``best`` how many experts a group stands by. ``defaults`` are what absent
    keys of the config mean.
    """

    block: str
    gate: str
    up: str
    down: str
    epsilon: float
    theta: float
    root: str = "model"
    norms: str = ""
    scoring: str = "softmax"
    bias: str = ""
    best: int = 0
    shared: str = ""
    latent: bool = False
    defaults: Mapping[str, Any] = {}


LLAMA = ("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
ARCHITECTURES = {
    "olmoe": Architecture(*LLAMA, 1e-5, 1e4, norms="projection"),
    "qwen3_moe": Architecture(*LLAMA, 1e-6, 1e4, norms="head"),
    "mixtral": Architecture(*MIXTRAL, 1e-5, 1e6),
    "qwen2_moe": Architecture(*LLAMA, 1e-6, 1e4, shared="shared_expert"),
    "glm4_moe": Architecture(
        *LLAMA,
        1e-5,
        1e4,
        norms="head",
        scoring="sigmoid",
        bias="gate.e_score_correction_bias",
        best=2,
        shared="shared_experts",
        defaults={
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "deepseek_v2": Architecture(
        *LLAMA,
        1e-6,
        1e4,
        best=1,
        shared="shared_experts",
        latent=True,
        defaults={"topk_method": "greedy"},
    ),
    "deepseek_v3": Architecture(
        *LLAMA,
        1e-6,
        1e4,
        scoring="sigmoid",
        bias="gate.e_score_correction_bias",
        best=2,
        shared="shared_experts",
        latent=True,
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
    ),
    "minimax_m2": Architecture(
        *MIXTRAL,
        1e-6,
        5e6,
        norms="projection",
        scoring="sigmoid",
        bias="e_score_correction_bias",
        defaults={"norm_topk_prob": True},
    ),
    "qwen3_vl_moe": Architecture(*LLAMA, 1e-6, 5e5, root="model.language_model", norms="head"),
}


def log_probabilities(directory: str | Path, prompt: list[int]) -> Matrix:
    """Log-probabilities ``[T, V]`` of the next token after each token of ``prompt``."""
    directory = Path(directory)
    config = read_config(directory)
    weights = read_weights(directory)
    return [log_softmax(row) for row in logits(config, weights, prompt)]


# Files


def read_config(directory: Path) -> dict[str, Any]:
    """config.json; refuses what this oracle does not compute rather than ignore it.

    What a multimodal config says in ``text_config`` comes to the top.
    """
    document: dict[str, Any] = json.loads((directory / "config.json").read_text())
    kind = document.get("model_type")
    config = {**document, **(document.get("text_config") or {}), "model_type": kind}
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    angles = {"default", "yarn"} if kind in ("deepseek_v2", "deepseek_v3") else {"default"}
    rope_type = rope_parameters(config).get("rope_type", rope_parameters(config).get("type"))
    unsupported = {
        "model_type": kind not in ARCHITECTURES,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": kind != "glm4_moe" and bool(config.get("attention_bias")),
        "sliding_window": sliding,
        "rope_type": rope_type is not None and rope_type not in angles,
    }
    if any(unsupported.values()):
        raise ValueError(f"not computed here: {[key for key, bad in unsupported.items() if bad]}")
    return config


def architecture(config: Mapping[str, Any]) -> Architecture:
    return ARCHITECTURES[config["model_type"]]


def setting(config: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """A key of the config, else the architecture's default, else what changes nothing."""
    value = config.get(key)
    return architecture(config).defaults.get(key, otherwise) if value is None else value


def norm_epsilon(config: Mapping[str, Any]) -> float:
    return config.get("rms_norm_eps", architecture(config).epsilon)


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block of rotary settings under its new name, its old one, or none."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def constant_names(config: Mapping[str, Any]) -> dict[int, dict[int, str]]:
    """Layer -> substituted expert -> name of its constant, in the form that the config has."""
    transforms = (config.get("compression_config") or {}).get("transform_config") or {}
    explicit = transforms.get("expert_substitution")
    if explicit is None:
        names = architecture(config)
        path = f"{names.root}.layers.{{}}.{names.block}.experts.{{}}.approx_value"
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
    projected = latent_heads if architecture(config).latent else plain_heads
    each = [projected(config, weights, prefix, t, x) for t, x in enumerate(states)]
    queries, keys, values = zip(*each, strict=True)  # [T][heads][head size]
    scale = len(queries[0][0]) ** -0.5 * score_scale(config)
    outputs = []
    for position in range(len(states)):
        mixed: Vector = []
        for head in range(len(queries[0])):
            kv = head * len(keys[0]) // len(queries[0])
            past = range(position + 1)
            mixed += attend(
                [scale * q for q in queries[position][head]],
                [keys[t][kv] for t in past],
                [values[t][kv] for t in past],
            )
        outputs.append(apply(weights[f"{prefix}.o_proj.weight"], mixed))
    return outputs


Heads = tuple[Matrix, Matrix, Matrix]  # queries, keys and values of one token


def plain_heads(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, position: int, x: Vector
) -> Heads:
    """Grouped queries; the leading part of each head is rotated."""
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rotated = int(head_dim * setting(config, "partial_rotary_factor", 1.0))
    if config["model_type"] == "minimax_m2" and config.get("rotary_dim"):
        rotated = config["rotary_dim"]
    q, k, v = project(config, weights, prefix, x)
    angles = rotary_angles(config, position, rotated)
    return (
        [rotate_halves(head, angles) for head in rows(q, [num_heads, head_dim])],
        [rotate_halves(head, angles) for head in rows(k, [num_kv_heads, head_dim])],
        rows(v, [num_kv_heads, head_dim]),
    )


def latent_heads(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, position: int, x: Vector
) -> Heads:
    """DeepSeek: keys and values from one latent; the last part of each head is rotated, and in
    keys all heads share it."""
    num_heads, epsilon = config["num_attention_heads"], norm_epsilon(config)
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    source, name = x, "q_proj"
    if config.get("q_lora_rank") is not None:
        low = apply(weights[f"{prefix}.q_a_proj.weight"], x)
        source = rms_norm(low, weights[f"{prefix}.q_a_layernorm.weight"], epsilon)
        name = "q_b_proj"
    q = rows(apply(weights[f"{prefix}.{name}.weight"], source), [num_heads, plain + rotated])
    down = apply(weights[f"{prefix}.kv_a_proj_with_mqa.weight"], x)
    rank = config["kv_lora_rank"]
    latent = rms_norm(down[:rank], weights[f"{prefix}.kv_a_layernorm.weight"], epsilon)
    kv = rows(
        apply(weights[f"{prefix}.kv_b_proj.weight"], latent),
        [num_heads, plain + config["v_head_dim"]],
    )
    angles = rotary_angles(config, position, rotated)
    turn = rotate_neighbours if config.get("rope_interleave", True) else rotate_halves
    shared = turn(down[rank:], angles)
    return (
        [head[:plain] + turn(head[plain:], angles) for head in q],
        [head[:plain] + shared for head in kv],
        [head[plain:] for head in kv],
    )


def project(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, x: Vector
) -> tuple[Vector, Vector, Vector]:
    """Query, key and value of one token.

    Some normalise all queries at once and all keys at once, some each head by itself, some
    neither.
    """
    epsilon, norms = norm_epsilon(config), architecture(config).norms
    if config["model_type"] == "glm4_moe" and not config.get("use_qk_norm", False):
        norms = ""
    q, k, v = (apply(weights[f"{prefix}.{name}_proj.weight"], x) for name in "qkv")
    if has_bias(config):
        q, k, v = (
            add(part, weights[f"{prefix}.{name}_proj.bias"])
            for part, name in zip((q, k, v), "qkv", strict=True)
        )
    if norms:
        norm = rms_norm if norms == "projection" else norm_heads
        q = norm(q, weights[f"{prefix}.q_norm.weight"], epsilon)
        k = norm(k, weights[f"{prefix}.k_norm.weight"], epsilon)
    limit = config.get("clip_qkv")
    if limit is not None:
        q, k, v = ([min(max(value, -limit), limit) for value in part] for part in (q, k, v))
    return q, k, v


def has_bias(config: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have a bias: in Qwen2 unless denied, in GLM if asked."""
    if config["model_type"] == "qwen2_moe":
        return config.get("qkv_bias", True)
    return config["model_type"] == "glm4_moe" and config.get("attention_bias", False)


def norm_heads(x: Vector, weight: Vector, epsilon: float) -> Vector:
    """Heads lie one after another, each as long as the one weight that they share."""
    heads = rows(x, [len(x) // len(weight), len(weight)])
    return [value for head in heads for value in rms_norm(head, weight, epsilon)]


class Turn(NamedTuple):
    """How far one pair turns, and by how much it grows."""

    angle: float
    growth: float


def rotary_angles(config: Mapping[str, Any], position: int, size: int) -> list[Turn]:
    """One turn per pair of ``size`` elements."""
    block = rope_parameters(config)
    theta = block.get("rope_theta", config.get("rope_theta", architecture(config).theta))
    speeds = [theta ** (-2 * i / size) for i in range(size // 2)]
    if not is_yarn(config):
        return [Turn(position * speed, 1.0) for speed in speeds]
    growth = sharpness(block["factor"], block.get("mscale", 1.0))
    growth /= sharpness(block["factor"], block.get("mscale_all_dim", 0.0))
    speeds = [yarn_speed(block, theta, size, i, speed) for i, speed in enumerate(speeds)]
    return [Turn(position * speed, growth) for speed in speeds]


def is_yarn(config: Mapping[str, Any]) -> bool:
    block = rope_parameters(config)
    return "yarn" in (block.get("rope_type"), block.get("type"))


def yarn_speed(block: Mapping[str, Any], theta: float, size: int, pair: int, speed: float) -> float:
    """Pairs that turn often in the original context keep their speed, slow ones lose a factor."""

    def pair_with(turns: float) -> float:
        """The pair that makes so many turns: original * theta^(-2 pair / size) = 2 pi turns."""
        length = block["original_max_position_embeddings"]
        return size / 2 * math.log(length / (2 * math.pi * turns), theta)

    first = max(math.floor(pair_with(block.get("beta_fast", 32))), 0)
    last = min(math.ceil(pair_with(block.get("beta_slow", 1))), size - 1)
    share = min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
    return (1 - share) * speed + share * speed / block["factor"]


def sharpness(factor: float, weight: float) -> float:
    return 1.0 + 0.1 * weight * math.log(factor)


def score_scale(config: Mapping[str, Any]) -> float:
    """What YaRN multiplies attention scores by in DeepSeek."""
    if not is_yarn(config):
        return 1.0
    block = rope_parameters(config)
    return sharpness(block["factor"], block.get("mscale_all_dim", 0.0)) ** 2


def rotate_halves(head: Vector, turns: list[Turn]) -> Vector:
    """Element i turns with element i + half of what is rotated; the rest stays."""
    half = len(turns)
    pairs = [turned(*pair) for pair in zip(head[:half], head[half : 2 * half], turns, strict=True)]
    return [a for a, _ in pairs] + [b for _, b in pairs] + head[2 * half :]


def rotate_neighbours(head: Vector, turns: list[Turn]) -> Vector:
    """Element 2 i turns with element 2 i + 1."""
    pairs = zip(head[0::2], head[1::2], turns, strict=True)
    return [value for pair in pairs for value in turned(*pair)]


def turned(a: float, b: float, turn: Turn) -> tuple[float, float]:
    cosine, sine = turn.growth * math.cos(turn.angle), turn.growth * math.sin(turn.angle)
    return a * cosine - b * sine, b * cosine + a * sine


def attend(query: Vector, keys: Matrix, values: Matrix) -> Vector:
    """Values mixed by a softmax over the scores; the query is scaled already."""
    shares = softmax([dot(query, key) for key in keys])
    return [dot(shares, list(column)) for column in zip(*values, strict=True)]


# Experts


class Groups(NamedTuple):
    """``count`` equal groups, ``chosen`` of which may be routed to; each stands by the sum of
    its ``best`` highest experts."""

    count: int
    chosen: int
    best: int


def route(
    router_logits: Vector,
    top_k: int,
    normalise: bool,
    factor: float = 1.0,
    scoring: str = "softmax",
    bias: Vector | None = None,
    groups: Groups | None = None,
) -> list[Route]:
    """The ``top_k`` routes of a token: scores over ALL experts first, ties to the lower id.

    The bias has a say in the choice, none in the weights.
    """
    scores = softmax(router_logits) if scoring == "softmax" else list(map(sigmoid, router_logits))
    wanted = scores if bias is None else add(scores, bias)
    allowed = range(len(scores)) if groups is None else members(wanted, groups)
    ids = sorted(allowed, key=lambda expert: (-wanted[expert], expert))[:top_k]
    total = math.fsum(scores[expert] for expert in ids) if normalise else 1.0
    return [(expert, factor * (scores[expert] / total)) for expert in ids]


def members(wanted: Vector, groups: Groups) -> list[int]:
    """Experts of the chosen groups."""
    size = len(wanted) // groups.count
    ranks = [
        math.fsum(sorted(wanted[first : first + size])[-groups.best :])
        for first in range(0, len(wanted), size)
    ]
    chosen = best(ranks, groups.chosen)
    return [expert for expert in range(len(wanted)) if expert // size in chosen]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


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
    """SEM-1 for one token: retained ``w * expert(x)`` plus substituted ``w * v``, as routed,
    and what shared experts add to every token."""
    router_logits = apply(weights[f"{prefix}.gate.weight"], x)
    routes = routes_of(config, weights, prefix, router_logits)
    retained = [term for term in routes if term[0] not in constants]
    names = architecture(config)
    outputs = {i: swiglu(weights, f"{prefix}.experts.{i}", names, x) for i, _ in retained}
    constant = constant_sum(routes, constants, len(x))
    y = add(weighted_sum(retained, outputs, len(x)), constant)
    return add(y, shared(config, weights, prefix, x)) if names.shared else y


def routes_of(
    config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, router_logits: Vector
) -> list[Route]:
    """The routes of a token by the rule of its architecture."""
    names, top_k = architecture(config), config["num_experts_per_tok"]
    if config["model_type"] == "mixtral":
        return route_mixtral(router_logits, top_k)
    groups = None
    if names.best and setting(config, "topk_method", "") != "greedy":
        count, chosen = setting(config, "n_group", 1), setting(config, "topk_group", 1)
        groups = Groups(count, chosen, names.best)
    return route(
        router_logits,
        top_k,
        setting(config, "norm_topk_prob", False),
        setting(config, "routed_scaling_factor", 1.0),
        names.scoring,
        weights[f"{prefix}.{names.bias}"] if names.bias else None,
        groups,
    )


def shared(config: Mapping[str, Any], weights: Mapping[str, Any], prefix: str, x: Vector) -> Vector:
    """One MLP for every token, in Qwen2 behind a gate of its own."""
    names = architecture(config)
    y = swiglu(weights, f"{prefix}.{names.shared}", names, x)
    if config["model_type"] != "qwen2_moe":
        return y
    (openness,) = map(sigmoid, apply(weights[f"{prefix}.shared_expert_gate.weight"], x))
    return [openness * value for value in y]


# The decoder


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """In Qwen every ``decoder_sparse_step``-th layer, unless ``mlp_only_layers`` names it; in
    GLM and DeepSeek all but the first ones."""
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe"):
        in_step = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
        return in_step and layer not in (config.get("mlp_only_layers") or [])
    if config["model_type"] in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        return layer >= setting(config, "first_k_dense_replace", 0)
    return True


def mlp(
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    layer: int,
    constants: Mapping[int, Vector],
    x: Vector,
) -> Vector:
    """The experts of a layer, or its one dense MLP."""
    names = architecture(config)
    path = f"{names.root}.layers.{layer}.{names.block}"
    if has_experts(config, layer):
        return moe(config, weights, path, constants, x)
    return swiglu(weights, path, names, x)


def logits(config: Mapping[str, Any], weights: Mapping[str, Any], prompt: list[int]) -> Matrix:
    """Logits ``[T, V]``: pre-norm layers with residuals, final norm, language head."""
    epsilon, root = norm_epsilon(config), architecture(config).root
    names = constant_names(config)
    states = [weights[f"{root}.embed_tokens.weight"][token] for token in prompt]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"{root}.layers.{layer}"
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
    head = weights[f"{root}.embed_tokens.weight" if tied else "lm_head.weight"]
    return [apply(head, rms_norm(x, weights[f"{root}.norm.weight"], epsilon)) for x in states]
