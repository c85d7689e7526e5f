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


QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 7,
    "hidden_size": 12,
    "intermediate_size": 9,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 2,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 7,
    "hidden_size": 12,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}


def expected(base: dict[str, object] = SMALL, /, **changes: object) -> dict[str, tuple[int, ...]]:
    return layout.expected(config.parse(json.dumps({**base, **changes}).encode()))


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


def test_qwen3_with_a_dense_layer() -> None:
    """3 heads of 8 over a hidden size of 12, and one norm for all heads; layer 1 has no experts."""
    tensors = {"model.embed_tokens.weight": (7, 12)}
    for layer in (0, 1):
        path = f"model.layers.{layer}"
        tensors |= {
            f"{path}.input_layernorm.weight": (12,),
            f"{path}.self_attn.q_proj.weight": (24, 12),
            f"{path}.self_attn.k_proj.weight": (8, 12),
            f"{path}.self_attn.v_proj.weight": (8, 12),
            f"{path}.self_attn.o_proj.weight": (12, 24),
            f"{path}.self_attn.q_norm.weight": (8,),
            f"{path}.self_attn.k_norm.weight": (8,),
            f"{path}.post_attention_layernorm.weight": (12,),
        }
        if layer == 0:
            tensors |= {f"{path}.mlp.gate.weight": (2, 12), **expert(0, 1)}
        else:
            tensors |= {
                f"{path}.mlp.gate_proj.weight": (9, 12),
                f"{path}.mlp.up_proj.weight": (9, 12),
                f"{path}.mlp.down_proj.weight": (12, 9),
            }
    tensors |= {"model.norm.weight": (12,), "lm_head.weight": (7, 12)}
    tensors |= {"model.layers.0.mlp.experts.0.approx_value": (12,)}
    found = expected(QWEN3, mlp_only_layers=[1], approximate_experts={"0": [0]})
    assert list(found.items()) == list(tensors.items())


def test_mixtral() -> None:
    """No norms of queries and keys; w1 is the gate, w3 goes up, w2 down."""
    path = "model.layers.0"
    assert list(expected(MIXTRAL, approximate_experts={"0": [0]}).items()) == [
        ("model.embed_tokens.weight", (7, 12)),
        (f"{path}.input_layernorm.weight", (12,)),
        (f"{path}.self_attn.q_proj.weight", (12, 12)),
        (f"{path}.self_attn.k_proj.weight", (4, 12)),
        (f"{path}.self_attn.v_proj.weight", (4, 12)),
        (f"{path}.self_attn.o_proj.weight", (12, 12)),
        (f"{path}.post_attention_layernorm.weight", (12,)),
        (f"{path}.block_sparse_moe.gate.weight", (2, 12)),
        (f"{path}.block_sparse_moe.experts.1.w1.weight", (5, 12)),
        (f"{path}.block_sparse_moe.experts.1.w3.weight", (5, 12)),
        (f"{path}.block_sparse_moe.experts.1.w2.weight", (12, 5)),
        ("model.norm.weight", (12,)),
        ("lm_head.weight", (7, 12)),
        (f"{path}.block_sparse_moe.experts.0.approx_value", (12,)),
    ]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (SMALL, {}),
        (SMALL, {"tie_word_embeddings": True}),
        (QWEN3, {}),
        (QWEN3, {"mlp_only_layers": [0]}),
        (QWEN3, {"decoder_sparse_step": 2}),
        (MIXTRAL, {}),
        (MIXTRAL, {"head_dim": 6, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_checkpoint_that_transformers_saves(
    tmp_path: Path, base: dict[str, object], changes: dict[str, object]
) -> None:
    sizes = {key: value for key, value in {**base, **changes}.items() if key != "architectures"}
    name = str(base["architectures"][0])
    configuration = getattr(transformers, name.replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(configuration(**sizes, pad_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    read = config.read(tmp_path)
    assert read.findings == ()
    assert layout.expected(read) == stored
