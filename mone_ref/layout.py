"""Which tensors a complete checkpoint holds, and their shapes: names only, no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from mone_ref.config import Config, ModelConfig
from mone_ref.families import QkNorm

Shape = tuple[int, ...]


def expected(config: Config) -> dict[str, Shape]:
    """Every tensor name of a complete checkpoint with its shape, constants last."""
    return {**of_model(config), **constants(config)}


@lru_cache(maxsize=1)
def constants(config: Config) -> Mapping[str, Shape]:
    """The constants, one ``[H]`` per substituted expert (FMT-5) or per name, if shared (FMT-29)."""
    return {
        name: (config.model.hidden_size,)
        for layer in config.substitution.layers.values()
        for name in layer.constants.values()
    }


@lru_cache(maxsize=1)
def of_model(config: Config) -> Mapping[str, Shape]:
    """Everything but the constants, in the order of the model.

    Retained experts keep their logical names and all three projections (FMT-4); the
    router keeps all E rows (FMT-1). ``lm_head`` is absent when it is tied to the embedding.
    """
    model = config.model
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        tensors.update(_attention(model, layer))
        dense = layer in model.dense_layers
        tensors.update(_dense(model, layer) if dense else _moe(config, layer))
    tensors["model.norm.weight"] = (model.hidden_size,)
    if not model.tie_word_embeddings:
        tensors["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return tensors


def _attention(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """Attention and its norms. Heads of another size than hidden / heads make q and o oblong."""
    prefix = model.family.layer_prefix(layer)
    hidden = model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
    if model.family.qk_norm is not QkNorm.NONE:
        per_head = model.family.qk_norm is QkNorm.HEAD
        yield f"{prefix}.self_attn.q_norm.weight", (model.head_dim if per_head else queries,)
        yield f"{prefix}.self_attn.k_norm.weight", (model.head_dim if per_head else keys,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _dense(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """The MLP of a layer without experts."""
    family, hidden, intermediate = model.family, model.hidden_size, model.dense_intermediate_size
    yield family.dense_name(layer, family.gate), (intermediate, hidden)
    yield family.dense_name(layer, family.up), (intermediate, hidden)
    yield family.dense_name(layer, family.down), (hidden, intermediate)


def _moe(config: Config, layer: int) -> Iterator[tuple[str, Shape]]:
    """Router and retained experts, ids ascending."""
    model, family = config.model, config.model.family
    hidden, intermediate = model.hidden_size, model.intermediate_size
    substitution = config.substitution.layer(layer, model.num_experts)
    yield family.router_name(layer), (model.num_experts, hidden)
    for expert in substitution.retained:
        yield family.projection_name(layer, expert, family.gate), (intermediate, hidden)
        yield family.projection_name(layer, expert, family.up), (intermediate, hidden)
        yield family.projection_name(layer, expert, family.down), (hidden, intermediate)
