"""A recipe -> the directory an engine loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mone_ref import config, layout
from mone_ref.config import Config
from mone_ref.families import DenseRule
from mone_ref.fill import forms, generator
from mone_ref.fill.recipe import Recipe

MAX_POSITIONS = 64

# Exponents of two for k in [-128, 127]: projections turn a unit-variance input into a
# unit-scale output at a fan-in near 100; router logits spread over a few units; a constant is
# as loud as an expert's output.
EXPONENTS = {"embedding": -6, "head": -8, "down": -8, "constant": -5, "other": -9}


def write(recipe: Recipe, directory: Path) -> None:
    """Write config, weights and the files that servers want. ``directory`` must exist."""
    text = json.dumps(config_json(recipe), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    parsed = config.parse(text.encode())
    write_weights(recipe, tensors(recipe, parsed), directory)
    for name, document in side_files(recipe).items():
        (directory / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_weights(recipe: Recipe, weights: Mapping[str, Tensor], directory: Path) -> None:
    """One file, or shards with or without their index.

    Shards are dealt in the order of names, so that the projections of one expert come to
    lie in several.
    """
    if not recipe.shards:
        save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i:05}-of-{recipe.shards:05}.safetensors" for i in range(1, recipe.shards + 1)]
    weight_map = {name: files[i % len(files)] for i, name in enumerate(sorted(weights))}
    for file in files:
        held = {name: weights[name] for name, place in weight_map.items() if place == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    if recipe.index:
        total = sum(tensor.nbytes for tensor in weights.values())
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(document, indent=2) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def config_json(recipe: Recipe) -> dict[str, Any]:
    """The original architecture's config plus the declaration (FMT-1, FMT-2, FMT-6)."""
    family = recipe.row
    document: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_types[0],
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        family.intermediate_key: recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        family.count_keys[0]: recipe.num_experts,
        family.top_k_keys[0]: recipe.top_k,
        **{key: value for key, value in optional_fields(recipe).items() if key in family.reads},
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": family.rms_norm_eps_default,
        "rope_theta": family.rope_theta_default,
        "attention_bias": False,
        **({"clip_qkv": None} if "clip_qkv" in family.reads else {}),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "torch_dtype": recipe.stored,
    }
    if family.dense_rule is not DenseRule.NONE:
        dense_size = recipe.dense_intermediate_size or recipe.intermediate_size
        document["intermediate_size"] = dense_size
    document |= recipe.fields
    if is_multimodal(recipe):
        return multimodal(recipe, document)
    return {**document, **forms.declaration(recipe)}


def multimodal(recipe: Recipe, text: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model: its decoder's fields, and the list of the approx form,
    in ``text_config`` (FMT-3); the explicit form at the top level (FMT-16)."""
    outer = {key: text.pop(key) for key in ("architectures", "tie_word_embeddings", "torch_dtype")}
    outer["model_type"], text["model_type"] = recipe.row.model_types
    declared = forms.declaration(recipe)
    inside = declared if recipe.form == "approx" else {}
    return {**outer, "text_config": {**text, **inside}, **({} if inside else declared)}


def optional_fields(recipe: Recipe) -> dict[str, Any]:
    """Fields that not every family reads."""
    return {
        "head_dim": recipe.head_dim or recipe.hidden_size // recipe.num_heads,
        "norm_topk_prob": recipe.normalise,
        "decoder_sparse_step": recipe.sparse_step,
        "mlp_only_layers": list(recipe.dense_layers),
    }


def tensors(recipe: Recipe, parsed: Config) -> dict[str, Tensor]:
    """Every tensor of the layout, filled by name; a constant by its name in the approx form.

    So the same facts in both forms, and a control, have the same values.
    """
    shapes = {**layout.expected(parsed), **unbuilt(recipe, parsed)}
    derived = {name: recipe.row.constant_name(*at) for name, at in forms.stored(recipe).items()}
    return {
        name: fill(recipe, derived.get(name, name), shape).to(stored_dtype(recipe, name))
        for name, shape in shapes.items()
    }


def unbuilt(recipe: Recipe, parsed: Config) -> dict[str, tuple[int, ...]]:
    """What a checkpoint carries and a decoder does not build: MTP layers, a vision tower."""
    model, family = parsed.model, parsed.model.family
    hidden, shapes = model.hidden_size, dict[str, tuple[int, ...]]()
    for index in range(model.num_layers, model.num_layers + mtp_layers(recipe)):
        prefix = family.layer_prefix(index)
        shapes |= dict(layout.layer(parsed, index))
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"{prefix}.shared_head.norm.weight"] = (hidden,)
        shapes[f"{prefix}.shared_head.head.weight"] = (model.vocab_size, hidden)
        shapes[f"{prefix}.embed_tokens.weight"] = (model.vocab_size, hidden)
    shapes |= dict.fromkeys(layout.unbuilt_constants(parsed), (hidden,))
    return shapes | (VISION if is_multimodal(recipe) else {})


VISION = {"model.visual.blocks.0.attn.qkv.weight": (12, 4), "model.visual.norm.weight": (4,)}
"""Stands for a vision tower: tensors that a text decoder never reads."""


def mtp_layers(recipe: Recipe) -> int:
    """MTP layers that are stored behind the decoder's."""
    return int(recipe.fields.get("num_nextn_predict_layers", 0))


def is_multimodal(recipe: Recipe) -> bool:
    """Whether the decoder is the text part of a larger model, and its sizes in ``text_config``."""
    return recipe.row.root != "model"


def stored_dtype(recipe: Recipe, name: str) -> torch.dtype:
    """Float32 for corrections of routers, as models publish them; the recipe's for all others."""
    correction = recipe.row.correction_bias
    dtype: torch.dtype = getattr(torch, recipe.stored)
    return torch.float32 if correction and name.endswith(correction) else dtype


def fill(recipe: Recipe, name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor in float32; its role decides the scale."""
    if "norm" in name:
        return torch.from_numpy(generator.around_one(recipe.seed, name, shape))
    part = role(recipe, name)
    exponent = EXPONENTS[part] + (recipe.loudness if part in ("down", "constant") else 0)
    seed = constant_seed(recipe, name) if part == "constant" else recipe.seed
    return torch.from_numpy(generator.uniform(seed, name, shape, exponent))


def role(recipe: Recipe, name: str) -> str:
    """Which line of ``EXPONENTS`` a tensor has."""
    path, family = name.split("."), recipe.row
    roles = {
        "embed_tokens": "embedding",
        "lm_head": "head",
        family.down: "down",
        family.constant: "constant",
    }
    return next((roles[part] for part in path if part in roles), "other")


def constant_seed(recipe: Recipe, name: str) -> int:
    """The seed of one constant: the recipe's own, unless it is re-seeded."""
    for place, seed in recipe.constant_seeds.items():
        if name == recipe.row.constant_name(*forms.place(place)):
            return seed
    return recipe.seed


def side_files(recipe: Recipe) -> Mapping[str, Any]:
    """A generation config and a trivial word-level tokenizer, one word per id."""
    vocabulary = {f"t{token}": token for token in range(recipe.vocab_size)}
    return {
        "generation_config.json": {"eos_token_id": 0, "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        },
    }
