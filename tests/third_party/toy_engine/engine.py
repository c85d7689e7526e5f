"""The engine: OLMoE, Qwen3-MoE and Mixtral in float32, one prompt at a time.

It shares no line with mone-ref, as an engine of its own would not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toy_engine import checkpoint, declaration
from toy_engine.checkpoint import Array, BadCheckpoint

OLMOE = ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL = ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))
NAMES = {"OlmoeForCausalLM": OLMOE, "Qwen3MoeForCausalLM": OLMOE, "MixtralForCausalLM": MIXTRAL}
CONSTANT = re.compile(r"(model\.layers\.\d+\.[a-z_.]*experts)\.\d+\.approx_value")


@dataclass
class Expert:
    """A gated MLP ``x -> down(silu(gate(x)) * up(x))``."""

    gate: Array
    up: Array
    down: Array

    def __call__(self, x: Array) -> Array:
        """``[T, H]`` -> ``[T, H]``."""
        gate = x @ self.gate.T
        return (gate / (1 + np.exp(-gate)) * (x @ self.up.T)) @ self.down.T


class Model:
    """One loaded checkpoint. Raises ``BadCheckpoint`` for one that cannot be served."""

    def __init__(self, directory: Path) -> None:
        self.config = config = checkpoint.read_config(directory)
        self.architecture = next(iter(config.get("architectures", [])), None)
        if self.architecture not in NAMES:
            raise BadCheckpoint("model", f"architecture {self.architecture!r} is not served")
        self.router, self.experts, self.projections = NAMES[self.architecture]
        self.count = config.get("num_experts", config.get("num_local_experts"))
        self.hidden, self.vocab = config["hidden_size"], config["vocab_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.tensors = checkpoint.read_tensors(directory)

        layers = range(config["num_hidden_layers"])
        paths = {i: f"model.layers.{i}.{self.experts}" for i in layers if self.is_sparse(i)}
        self.names = declaration.read(config, self.count, paths)
        self.constants = {
            layer: {expert: self.constant(name) for expert, name in names.items()}
            for layer, names in self.names.items()
        }
        self.refuse_unlisted(paths)
        self.mlps = [self.moe(i) if i in paths else self.dense(i) for i in layers]

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts: in Qwen3-MoE some have one dense MLP instead."""
        step, dense = self.config.get("decoder_sparse_step", 1), self.config.get("mlp_only_layers")
        return (layer + 1) % step == 0 and layer not in (dense or ())

    # -- weights

    def take(self, name: str, *shape: int) -> Array:
        """A tensor that the model needs, of the right shape."""
        if name not in self.tensors:
            raise BadCheckpoint("tensor", f"{name} is missing")
        if self.tensors[name].shape != shape:
            raise BadCheckpoint("tensor", f"{name} is {self.tensors[name].shape}, not {shape}")
        return self.tensors[name]

    def constant(self, name: str) -> Array:
        """The constant of a substituted expert."""
        if name not in self.tensors:
            raise BadCheckpoint("constant-missing", name)
        return self.checked(name, self.tensors[name])

    def checked(self, name: str, value: Array) -> Array:
        """A constant that can be one: a vector of hidden size, of numbers."""
        if value.shape != (self.hidden,):
            raise BadCheckpoint("constant-shape", f"{name} is {value.shape}")
        if not np.isfinite(value).all():
            raise BadCheckpoint("constant-value", f"{name} holds NaN or infinity")
        return value

    def refuse_unlisted(self, paths: Mapping[int, str]) -> None:
        """Constants under derived names that no list names."""
        used = {name for names in self.names.values() for name in names.values()}
        for name in self.tensors.keys() - used:
            match = CONSTANT.fullmatch(name)
            if match and match[1] in paths.values():
                raise BadCheckpoint("constant-unlisted", name)

    def expert(self, path: str, width: int) -> Expert:
        """One MLP below a module path."""
        gate, up, down = (f"{path}.{name}.weight" for name in self.projections)
        narrow, wide = (width, self.hidden), (self.hidden, width)
        return Expert(self.take(gate, *narrow), self.take(up, *narrow), self.take(down, *wide))

    def moe(self, layer: int) -> dict[int, Expert]:
        """The retained experts of a layer."""
        width = self.config.get("moe_intermediate_size", self.config["intermediate_size"])
        retained = set(range(self.count)) - self.constants.get(layer, {}).keys()
        path = f"model.layers.{layer}.{self.experts}"
        return {expert: self.expert(f"{path}.{expert}", width) for expert in sorted(retained)}

    def dense(self, layer: int) -> Expert:
        """The MLP of a layer without experts."""
        return self.expert(f"model.layers.{layer}.mlp", self.config["intermediate_size"])

    def update(self, tensors: Mapping[str, Array]) -> None:
        """Change constants, all or none."""
        places = {
            name: [(i, e) for i, names in self.names.items() for e, n in names.items() if n == name]
            for name in tensors
        }
        for name, value in tensors.items():
            if not places[name]:
                raise BadCheckpoint("update", f"{name} is no constant")
            self.checked(name, value)
        for name, where in places.items():
            for layer, expert in where:
                self.constants[layer][expert] = tensors[name]

    # -- arithmetic

    def score(self, prompt: list[int]) -> Array:
        """Log-probabilities ``[T, V]`` of the token after each one."""
        x = self.take("model.embed_tokens.weight", self.vocab, self.hidden)[prompt]  # [T, H]
        for layer in range(len(self.mlps)):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            x = x + self.mlp(self.norm(x, f"{prefix}.post_attention_layernorm"), layer)
        head = self.take("lm_head.weight", self.vocab, self.hidden)
        logits = self.norm(x, "model.norm") @ head.T  # [T, V]
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def mlp(self, x: Array, layer: int) -> Array:
        """Experts by their router weight, or the dense MLP: ``[T, H]`` -> ``[T, H]``."""
        experts = self.mlps[layer]
        if isinstance(experts, Expert):
            return experts(x)
        router = self.take(f"model.layers.{layer}.{self.router}.weight", self.count, self.hidden)
        scores = softmax(x @ router.T)  # [T, E]
        chosen = np.argsort(-scores, -1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, -1)  # [T, K]
        if self.config.get("norm_topk_prob", self.architecture == "MixtralForCausalLM"):
            weights /= weights.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for expert in range(self.count):
            tokens, slots = np.nonzero(chosen == expert)
            paid = weights[tokens, slots, None]  # [n, 1]
            constant = self.constants.get(layer, {}).get(expert)
            y[tokens] += paid * (experts[expert](x[tokens]) if constant is None else constant)
        return y

    def norm(self, x: Array, name: str) -> Array:
        """Root-mean-square norm over the last axis."""
        scale = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x * scale * self.take(f"{name}.weight", x.shape[-1])

    def attention(self, x: Array, path: str) -> Array:
        """Causal grouped-query attention: ``[T, H]`` -> ``[T, H]``."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = (
            x @ self.take(f"{path}.{name}_proj.weight", size, self.hidden).T
            for name, size in (("q", width), ("k", kv_width), ("v", kv_width))
        )
        q, k = self.rotated(q, f"{path}.q_norm"), self.rotated(k, f"{path}.k_norm")
        v = v.reshape(len(x), -1, self.head_dim)
        k, v = (np.repeat(part, self.heads // self.kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(self.head_dim))
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(x), width)
        return mixed @ self.take(f"{path}.o_proj.weight", self.hidden, width).T

    def rotated(self, x: Array, norm: str) -> Array:
        """Heads ``[T, heads, D]``: normed where the family does that, then rotary embedding."""
        weight = self.tensors.get(f"{norm}.weight")
        if weight is not None:  # over a head in Qwen3-MoE, over all of them in OLMoE
            x = self.norm(x.reshape(len(x), -1, len(weight)), norm)
        x = x.reshape(len(x), -1, self.head_dim)
        powers = np.arange(0, self.head_dim, 2) / self.head_dim
        angles = np.outer(np.arange(len(x)), self.config["rope_theta"] ** -powers)[:, None]
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: Array) -> Any:
    """Over the last axis."""
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)
