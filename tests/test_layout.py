"""The expected tensors, against a hand-written list and against a real checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from mone_ref import config, layout

SMALL = {
    "architectures": ["OlmoeForCausalLM"],
    "vocab_size": 7,
    "hidden_size": 12,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


def expected(**changes: object) -> dict[str, tuple[int, ...]]:
    return layout.expected(config.parse(json.dumps({**SMALL, **changes}).encode()))


def attention(layer: int) -> dict[str, tuple[int, ...]]:
    """3 heads of 4 over a hidden size of 12, one key-value head."""
    return {
        f"model.layers.{layer}.input_layernorm.weight": (12,),
        f"model.layers.{layer}.self_attn.q_proj.weight": (12, 12),
        f"model.layers.{layer}.self_attn.k_proj.weight": (4, 12),
        f"model.layers.{layer}.self_attn.v_proj.weight": (4, 12),
        f"model.layers.{layer}.self_attn.o_proj.weight": (12, 12),
        f"model.layers.{layer}.self_attn.q_norm.weight": (12,),
        f"model.layers.{layer}.self_attn.k_norm.weight": (4,),
        f"model.layers.{layer}.post_attention_layernorm.weight": (12,),
        f"model.layers.{layer}.mlp.gate.weight": (3, 12),
    }


def expert(layer: int, number: int) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{layer}.mlp.experts.{number}.gate_proj.weight": (5, 12),
        f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight": (5, 12),
        f"model.layers.{layer}.mlp.experts.{number}.down_proj.weight": (12, 5),
    }


def test_substituted_layer() -> None:
    """Layer 1 keeps expert 1 under its own number; the ids are listed out of order."""
    tensors = {
        "model.embed_tokens.weight": (7, 12),
        **attention(0), **expert(0, 0), **expert(0, 1), **expert(0, 2),
        **attention(1), **expert(1, 1),
        "model.norm.weight": (12,),
        "lm_head.weight": (7, 12),
        "model.layers.1.mlp.experts.0.approx_value": (12,),
        "model.layers.1.mlp.experts.2.approx_value": (12,),
    }  # fmt: skip
    found = expected(approximate_experts={"1": [2, 0]})
    assert list(found.items()) == list(tensors.items())


def test_tied_embedding_has_no_head() -> None:
    untied, tied = expected(), expected(tie_word_embeddings=True)
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert tied.keys() < untied.keys()


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_that_transformers_saves(tmp_path: Path, tied: bool) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "architectures"}
    model = transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**sizes, tie_word_embeddings=tied, pad_token_id=1, eos_token_id=2)
    )
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    read = config.read(tmp_path)
    assert read.findings == ()
    assert layout.expected(read) == stored
