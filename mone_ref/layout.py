"""Which tensors a complete checkpoint holds, and their shapes: names only, no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from mone_ref.config import Config, ModelConfig
from mone_ref.families import QkNorm
from mone_ref.model_config import Latent

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
def unbuilt_constants(config: Config) -> frozenset[str]:
    """Names of constants of layers that are not built: consumed, and dropped (LOAD-5)."""
    unbuilt = config.substitution.unbuilt.values()
    return frozenset(name for layer in unbuilt for name in layer.constants.values())


@lru_cache(maxsize=1)
def of_model(config: Config) -> Mapping[str, Shape]:
    """Everything but the constants, in the order of the model.

    Retained experts keep their logical names and all three projections (FMT-4); the
    router keeps all E rows (FMT-1). ``lm_head`` is absent when it is tied to the embedding.
    """
    model = config.model
    family = model.family
    tensors: dict[str, Shape] = {family.embedding_name: (model.vocab_size, model.hidden_size)}
    for index in range(model.num_layers):
        tensors.update(layer(config, index))
    tensors[family.norm_name] = (model.hidden_size,)
    if not model.tie_word_embeddings:
        tensors["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return tensors


def layer(config: Config, index: int) -> Iterator[tuple[str, Shape]]:
    """Tensors of one layer of the stack, without constants; an MTP layer is one with experts."""
    yield from _attention(config.model, index)
    if index in config.model.dense_layers:
        yield from _dense(config.model, index)
    else:
        yield from _moe(config, index)


def _attention(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """Attention and its norms, of either kind."""
    prefix, hidden = model.family.layer_prefix(layer), model.hidden_size
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    parts = _grouped(model) if model.latent is None else _latent(model, model.latent)
    for name, shape in parts:
        yield f"{prefix}.self_attn.{name}", shape
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _grouped(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Grouped queries. Heads of another size than hidden / heads make q and o oblong."""
    hidden = model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield "q_proj.weight", (queries, hidden)
    yield "k_proj.weight", (keys, hidden)
    yield "v_proj.weight", (keys, hidden)
    yield "o_proj.weight", (hidden, queries)
    if model.attention_bias:
        yield "q_proj.bias", (queries,)
        yield "k_proj.bias", (keys,)
        yield "v_proj.bias", (keys,)
    if model.qk_norm is not QkNorm.NONE:
        per_head = model.qk_norm is QkNorm.HEAD
        yield "q_norm.weight", (model.head_dim if per_head else queries,)
        yield "k_norm.weight", (model.head_dim if per_head else keys,)


def _latent(model: ModelConfig, sizes: Latent) -> Iterator[tuple[str, Shape]]:
    """Multi-head latent attention."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    if sizes.query_rank:
        yield "q_a_proj.weight", (sizes.query_rank, hidden)
        yield "q_a_layernorm.weight", (sizes.query_rank,)
        yield "q_b_proj.weight", (queries, sizes.query_rank)
    else:
        yield "q_proj.weight", (queries, hidden)
    yield "kv_a_proj_with_mqa.weight", (sizes.rank + sizes.rotated, hidden)
    yield "kv_a_layernorm.weight", (sizes.rank,)
    yield "kv_b_proj.weight", (model.num_heads * (sizes.plain + sizes.value), sizes.rank)
    yield "o_proj.weight", (hidden, model.num_heads * sizes.value)


def _dense(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """The MLP of a layer without experts."""
    path = f"{model.family.layer_prefix(layer)}.{model.family.dense}"
    return _mlp(model, path, model.dense_intermediate_size)


def _mlp(model: ModelConfig, path: str, intermediate: int) -> Iterator[tuple[str, Shape]]:
    """Gate, up and down of one MLP."""
    gate, up, down = model.family.mlp_names(path)
    yield gate, (intermediate, model.hidden_size)
    yield up, (intermediate, model.hidden_size)
    yield down, (model.hidden_size, intermediate)


def _moe(config: Config, layer: int) -> Iterator[tuple[str, Shape]]:
    """Router, shared experts, and retained experts, ids ascending."""
    model, family = config.model, config.model.family
    substitution = config.substitution.layer(layer, model.num_experts)
    yield family.router_name(layer), (model.num_experts, model.hidden_size)
    if family.correction_bias:
        yield f"{family.layer_prefix(layer)}.{family.correction_bias}", (model.num_experts,)
    if model.shared_intermediate_size:
        yield from _shared(model, layer)
    for expert in substitution.retained:
        path = f"{family.experts_path(layer)}.{expert}"
        yield from _mlp(model, path, model.intermediate_size)


def _shared(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """Shared experts, which are stored as one MLP, and their gate."""
    family, prefix = model.family, model.family.layer_prefix(layer)
    yield from _mlp(model, f"{prefix}.{family.shared}", model.shared_intermediate_size)
    if family.shared_gate:
        yield f"{prefix}.{family.shared_gate}.weight", (1, model.hidden_size)
