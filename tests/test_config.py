"""config.json: what is read, what is refused, where, and under which clause."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from handmade import ABSENT
from hypothesis import given, settings
from hypothesis import strategies as st

from mone_ref import config
from mone_ref.errors import Code, Phase, Rejected, Severity
from mone_ref.families import QkNorm

# Two layers of eight experts. `cfg(a=1)` replaces a field, `cfg(a=None)` is JSON null.
BASE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def cfg(base: dict[str, Any] = BASE, /, **changes: Any) -> bytes:
    merged = {**base, **changes}
    return json.dumps({k: v for k, v in merged.items() if v is not ABSENT}).encode()


def errors(text: bytes) -> list[tuple[Code, str, str]]:
    with pytest.raises(Rejected) as caught:
        config.parse(text)
    assert {problem.phase for problem in caught.value.problems} == {Phase.PARSE}
    return [(p.code, p.where, p.clause) for p in caught.value.problems]


def listed(text: bytes) -> dict[int, tuple[int, ...]]:
    layers = config.parse(text).substitution.layers
    return {layer: entry.listed for layer, entry in layers.items()}


def findings(text: bytes) -> list[tuple[Severity, Code, str, str]]:
    return [(p.severity, p.code, p.where, p.clause) for p in config.parse(text).findings]


# -- the model


def test_defaults() -> None:
    model = config.parse(cfg(num_key_value_heads=None)).model
    assert (model.vocab_size, model.hidden_size, model.intermediate_size) == (128, 96, 40)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 3, 3, 32)
    assert (model.num_experts, model.top_k) == (8, 2)
    assert (model.router.scoring, model.router.normalise) == ("softmax", False)
    assert (model.rms_norm_eps, model.rope.theta, model.clip_qkv) == (1e-5, 10000.0, None)
    assert (model.tie_word_embeddings, model.stored_dtype) == (False, "float32")
    assert model.family.name == "olmoe"


@pytest.mark.parametrize(
    ("value", "read"), [(4096, 4096), (None, None), (0, None), (True, None), ("64", None)], ids=str
)
def test_the_longest_sequence_is_read_and_never_an_error(value: Any, read: int | None) -> None:
    parsed = config.parse(cfg(max_position_embeddings=value))
    assert parsed.model.max_positions == read
    assert parsed.findings == ()


def test_every_field() -> None:
    text = cfg(
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_theta=500000,
        clip_qkv=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = config.parse(text).model
    assert model.num_kv_heads == 1
    assert model.router.normalise is True
    assert (model.rms_norm_eps, model.rope.theta, model.clip_qkv) == (1e-6, 500000.0, 8.0)
    assert (model.tie_word_embeddings, model.stored_dtype) == (True, "bfloat16")


def test_published_config() -> None:
    """The config of OLMoE-1B-7B-0924, as written by transformers 4."""
    published = {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    }  # fmt: skip
    read = config.parse(json.dumps(published).encode())
    assert read.findings == ()
    assert read.substitution.form == "none"
    assert (read.model.head_dim, read.model.stored_dtype) == (128, "bfloat16")


def test_defaults_of_qwen3() -> None:
    model = config.parse(cfg(QWEN3)).model
    assert (model.family.name, model.qk_norm) == ("qwen3_moe", QkNorm.HEAD)
    assert (model.intermediate_size, model.head_dim) == (40, 48)
    assert (model.router.normalise, model.rms_norm_eps, model.rope.theta) == (False, 1e-6, 10000.0)
    assert (model.moe_layers, model.dense_layers) == ([0, 1, 2, 3], frozenset())


def test_defaults_of_mixtral() -> None:
    model = config.parse(cfg(MIXTRAL)).model
    assert (model.family.name, model.qk_norm) == ("mixtral", QkNorm.NONE)
    assert (model.num_experts, model.intermediate_size, model.head_dim) == (8, 40, 32)
    assert (model.router.normalise, model.rms_norm_eps, model.rope.theta) == (True, 1e-5, 1e6)
    assert model.moe_layers == [0, 1]


def test_published_config_of_qwen3() -> None:
    """The config of Qwen3-30B-A3B, as written by transformers 4."""
    published = {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    read = config.parse(json.dumps(published).encode())
    assert read.findings == ()
    assert (read.model.head_dim, read.model.intermediate_size) == (128, 768)
    assert (read.model.router.normalise, read.model.rope.theta) == (True, 1e6)


def test_published_config_of_mixtral() -> None:
    """The config of Mixtral-8x7B-v0.1, as written by transformers 4."""
    published = {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    }  # fmt: skip
    read = config.parse(json.dumps(published).encode())
    assert read.findings == ()
    assert (read.model.head_dim, read.model.num_experts) == (128, 8)


@pytest.mark.parametrize(
    ("changes", "moe", "dense_size"),
    [
        ({"decoder_sparse_step": 2}, [1, 3], 72),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1], 72),
        ({"mlp_only_layers": [0, 2, 2, 99]}, [1, 3], 72),
        ({"decoder_sparse_step": 3}, [2], 72),
        ({"decoder_sparse_step": 5}, [], 72),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, [0, 1, 2, 3], 0),
        ({"mlp_only_layers": [4], "intermediate_size": ABSENT}, [0, 1, 2, 3], 0),
    ],
    ids=str,
)
def test_layers_with_experts(changes: dict[str, Any], moe: list[int], dense_size: int) -> None:
    model = config.parse(cfg(QWEN3, **changes)).model
    assert model.moe_layers == moe
    assert model.dense_layers == frozenset(range(4)) - set(moe)
    assert model.dense_intermediate_size == dense_size


@pytest.mark.parametrize(
    ("base", "head_dim"), [(QWEN3, 30), (MIXTRAL, 64)], ids=["qwen3", "mixtral"]
)
def test_heads_of_their_own_size(base: dict[str, Any], head_dim: int) -> None:
    model = config.parse(cfg(base, head_dim=head_dim)).model
    assert model.head_dim == head_dim
    # Then nothing has to divide the hidden size.
    assert config.parse(cfg(base, head_dim=head_dim, hidden_size=97)).model.hidden_size == 97


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 500000}, 5e5),
        ({"rope_parameters": {}}, 1e4),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 1}}, 1e4),
        ({"rope_scaling": {"rope_type": None}, "rope_theta": 5e5}, 5e5),
    ],
)
def test_rope(changes: dict[str, Any], theta: float) -> None:
    assert config.parse(cfg(**changes)).model.rope.theta == theta


def test_family_by_model_type() -> None:
    for architectures in (ABSENT, None, []):
        assert config.parse(cfg(architectures=architectures)).model.family.name == "olmoe"


def test_fields_under_text_config() -> None:
    """Either holder counts, field by field, and equal copies are fine."""
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    outer = {"architectures": BASE["architectures"], "hidden_size": 96, "dtype": "float16"}
    read = config.parse(json.dumps({**outer, "text_config": text}).encode())
    assert read.model.hidden_size == 96
    assert read.model.stored_dtype == "float16"
    assert read.findings == ()


TYPES = ["x", True, [], {}, -1, 0, 1.5]
SIZES = [key for key, value in BASE.items() if isinstance(value, int)]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [*TYPES, 2**31, 10**400], ids=str)
def test_sizes_are_positive_integers(key: str, value: Any) -> None:
    assert errors(cfg(**{key: value}))[0][:2] == (Code.MODEL_FIELD, f"$.{key}")


@pytest.mark.parametrize("key", [key for key in SIZES if key != "num_key_value_heads"])
def test_sizes_are_required(key: str) -> None:
    for missing in (ABSENT, None):
        assert [(code, where) for code, where, _ in errors(cfg(**{key: missing}))] == [
            (Code.MODEL_FIELD, f"$.{key}")
        ]


BAD_MODEL: list[tuple[dict[str, Any], Code, str, str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, Code.UNKNOWN_FAMILY, "$.architectures", ""),
    ({"architectures": None, "model_type": None}, Code.UNKNOWN_FAMILY, "$.architectures", ""),
    ({"architectures": "OlmoeForCausalLM"}, Code.MODEL_FIELD, "$.architectures", ""),
    ({"model_type": 1}, Code.MODEL_FIELD, "$.model_type", ""),
    ({"model_type": "llama"}, Code.MODEL_FIELD_CONFLICT, "$.model_type", ""),
    ({"text_config": []}, Code.MODEL_FIELD, "$.text_config", ""),
    # Sizes that do not fit together.
    ({"hidden_size": 97}, Code.MODEL_FIELD, "$.hidden_size", ""),
    ({"hidden_size": 99}, Code.MODEL_FIELD, "$.hidden_size", ""),  # three heads of 33
    ({"num_key_value_heads": 2}, Code.MODEL_FIELD, "$.num_key_value_heads", ""),
    ({"num_experts_per_tok": 9}, Code.MODEL_FIELD, "$.num_experts_per_tok", ""),
    ({"num_experts": 2**17 + 1}, Code.MODEL_FIELD, "$.num_experts", ""),
    ({"num_hidden_layers": 2**15 + 1}, Code.MODEL_FIELD, "$.num_experts", ""),
    ({"head_dim": 16}, Code.MODEL_FEATURE, "$.head_dim", ""),
    ({"head_dim": 32.0}, Code.MODEL_FEATURE, "$.head_dim", ""),
    # Two holders of one field.
    ({"num_local_experts": 128}, Code.MODEL_FIELD_CONFLICT, "$.num_experts", "FMT-1"),
    ({"text_config": {"moe_num_experts": 6}}, Code.MODEL_FIELD_CONFLICT,
     "$.text_config.moe_num_experts", "FMT-1"),
    ({"text_config": {"hidden_size": 48}}, Code.MODEL_FIELD_CONFLICT,
     "$.text_config.hidden_size", ""),
    ({"dtype": "float32", "torch_dtype": "float16"}, Code.MODEL_FIELD_CONFLICT, "$.dtype", ""),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, Code.MODEL_FIELD_CONFLICT,
     "$.rope_theta", ""),
    # true equals 1 in Python only.
    ({"num_hidden_layers": True, "text_config": {"num_hidden_layers": 1}},
     Code.MODEL_FIELD_CONFLICT, "$.text_config.num_hidden_layers", ""),
    # Values.
    *(({"norm_topk_prob": value}, Code.MODEL_FIELD, "$.norm_topk_prob", "") for value in (0, "x")),
    *(({"tie_word_embeddings": value}, Code.MODEL_FIELD, "$.tie_word_embeddings", "")
      for value in (1, "false")),
    *(({key: value}, Code.MODEL_FIELD, f"$.{key}", "")
      for key in ("rms_norm_eps", "rope_theta", "clip_qkv")
      for value in (0, -1.0, True, "1", [], 10**400)),
    *(({"dtype": value}, Code.MODEL_FIELD, "$.dtype", "") for value in ("float8_e4m3fn", 1)),
    ({"rope_parameters": 1e4}, Code.MODEL_FIELD, "$.rope_parameters", ""),
    ({"rope_parameters": {"rope_theta": "x"}}, Code.MODEL_FIELD,
     "$.rope_parameters.rope_theta", ""),
    # What is not computed.
    ({"rope_scaling": {"type": "yarn"}}, Code.MODEL_FEATURE, "$.rope_scaling.type", ""),
    ({"rope_parameters": {"rope_type": "llama3"}}, Code.MODEL_FEATURE,
     "$.rope_parameters.rope_type", ""),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, Code.MODEL_FEATURE,
     "$.rope_parameters.partial_rotary_factor", ""),
    ({"hidden_act": "gelu"}, Code.MODEL_FEATURE, "$.hidden_act", ""),
    ({"attention_bias": True}, Code.MODEL_FEATURE, "$.attention_bias", ""),
    ({"attention_bias": 0}, Code.MODEL_FEATURE, "$.attention_bias", ""),
    ({"sliding_window": 4096}, Code.MODEL_FEATURE, "$.sliding_window", ""),
    ({"n_shared_experts": 1}, Code.MODEL_FEATURE, "$.n_shared_experts", ""),
    ({"routed_scaling_factor": 2.5}, Code.MODEL_FEATURE, "$.routed_scaling_factor", ""),
    ({"quantization_config": {}}, Code.MODEL_FEATURE, "$.quantization_config", "CAP-8"),
    ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, Code.MODEL_FEATURE,
     "$.text_config.quantization_config", "CAP-8"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, Code.MODEL_FEATURE,
     "$.compression_config.quant_method", "CAP-8"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "where", "clause"), BAD_MODEL, ids=str)
def test_bad_model(changes: dict[str, Any], code: Code, where: str, clause: str) -> None:
    assert errors(cfg(**changes)) == [(code, where, clause)]


BAD_FAMILIES: list[tuple[dict[str, Any], dict[str, Any], Code, str, str]] = [
    (QWEN3, {"head_dim": 31}, Code.MODEL_FIELD, "$.head_dim", ""),
    (QWEN3, {"head_dim": "32"}, Code.MODEL_FIELD, "$.head_dim", ""),
    (QWEN3, {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 32},
     Code.MODEL_FIELD, "$.num_key_value_heads", ""),
    # transformers reads 4 key-value heads where a Qwen3 config names none.
    (QWEN3, {"num_key_value_heads": ABSENT}, Code.MODEL_FIELD, "$.num_key_value_heads", ""),
    (QWEN3, {"moe_intermediate_size": ABSENT}, Code.MODEL_FIELD, "$.moe_intermediate_size", ""),
    (QWEN3, {"mlp_only_layers": [1], "intermediate_size": ABSENT}, Code.MODEL_FIELD,
     "$.intermediate_size", ""),
    (QWEN3, {"mlp_only_layers": 1}, Code.MODEL_FIELD, "$.mlp_only_layers", ""),
    (QWEN3, {"mlp_only_layers": [1.0]}, Code.MODEL_FIELD, "$.mlp_only_layers", ""),
    (QWEN3, {"mlp_only_layers": [True]}, Code.MODEL_FIELD, "$.mlp_only_layers", ""),
    (QWEN3, {"decoder_sparse_step": 0}, Code.MODEL_FIELD, "$.decoder_sparse_step", ""),
    (QWEN3, {"text_config": {"mlp_only_layers": [1]}, "mlp_only_layers": []},
     Code.MODEL_FIELD_CONFLICT, "$.text_config.mlp_only_layers", ""),
    (QWEN3, {"attention_bias": True}, Code.MODEL_FEATURE, "$.attention_bias", ""),
    (QWEN3, {"use_sliding_window": True}, Code.MODEL_FEATURE, "$.use_sliding_window", ""),
    (QWEN3, {"sliding_window": 4096}, Code.MODEL_FEATURE, "$.sliding_window", ""),
    (QWEN3, {"clip_qkv": 8}, Code.MODEL_FEATURE, "$.clip_qkv", ""),
    (QWEN3, {"shared_expert_intermediate_size": 64}, Code.MODEL_FEATURE,
     "$.shared_expert_intermediate_size", ""),
    (MIXTRAL, {"norm_topk_prob": False}, Code.MODEL_FEATURE, "$.norm_topk_prob", ""),
    (MIXTRAL, {"mlp_only_layers": [0]}, Code.MODEL_FEATURE, "$.mlp_only_layers", ""),
    (MIXTRAL, {"decoder_sparse_step": 2}, Code.MODEL_FEATURE, "$.decoder_sparse_step", ""),
    (MIXTRAL, {"sliding_window": 4096}, Code.MODEL_FEATURE, "$.sliding_window", ""),
    (MIXTRAL, {"num_local_experts": ABSENT}, Code.MODEL_FIELD, "$.num_local_experts", "FMT-1"),
    (MIXTRAL, {"num_experts": 9}, Code.MODEL_FIELD_CONFLICT, "$.num_local_experts", "FMT-1"),
    # A layer without experts substitutes none.
    (QWEN3, {"mlp_only_layers": [1], "approximate_experts": {"1": [0]}}, Code.LAYER_NOT_MOE,
     '$.approximate_experts["1"]', "FMT-25"),
    (QWEN3, {"decoder_sparse_step": 2, "approximate_experts": {"0": []}}, Code.LAYER_NOT_MOE,
     '$.approximate_experts["0"]', "FMT-25"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "code", "where", "clause"), BAD_FAMILIES, ids=str)
def test_bad_model_of_another_family(
    base: dict[str, Any], changes: dict[str, Any], code: Code, where: str, clause: str
) -> None:
    assert errors(cfg(base, **changes)) == [(code, where, clause)]


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (QWEN3, {"decoder_sparse_step": 2, "approximate_experts": {"1": [0], "3": [7]}}),
        (QWEN3, {"norm_topk_prob": True, "use_sliding_window": False, "head_dim": None}),
        (QWEN3, {"num_experts": ABSENT, "num_local_experts": 8}),  # as transformers 5 writes it
        (MIXTRAL, {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    ],
    ids=str,
)
def test_twins_of_another_family(base: dict[str, Any], changes: dict[str, Any]) -> None:
    assert config.parse(cfg(base, **changes)).findings == ()


def test_a_hostile_number_of_layers_is_refused_at_once() -> None:
    huge = {"num_hidden_layers": 2**31 - 1, "mlp_only_layers": [0]}
    assert errors(cfg(QWEN3, **huge))[0][:2] == (Code.MODEL_FIELD, "$.num_experts")


def test_constants_of_mixtral_stand_beside_its_experts() -> None:
    entry = config.parse(cfg(MIXTRAL, approximate_experts={"1": [3]})).substitution.layers[1]
    assert entry.constants == {3: "model.layers.1.block_sparse_moe.experts.3.approx_value"}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": ABSENT, "num_local_experts": 8},
        {"num_local_experts": 8, "n_routed_experts": 8},
        {"text_config": {}},
        {"head_dim": 32, "attention_bias": False, "hidden_act": "silu", "sliding_window": None},
        {"n_shared_experts": 0, "routed_scaling_factor": 1, "first_k_dense_replace": 0},
        {"quantization_config": None, "compression_config": {"producer": {"name": "x"}}},
        {"num_experts": 2**17},
        {"num_experts_per_tok": 8},
        {"torch_dtype": "float16", "dtype": "float16"},
    ],
    ids=str,
)
def test_twins_that_are_accepted(changes: dict[str, Any]) -> None:
    assert config.parse(cfg(**changes)).findings == ()


# -- the declaration


def test_list_keeps_its_order_and_names_its_constants() -> None:
    read = config.parse(cfg(approximate_experts={"1": [7, 0, 2], "0": [1, 5]}))
    assert read.findings == ()
    assert read.substitution.form == "approx"
    assert list(read.substitution.layers) == [0, 1]
    entry = read.substitution.layers[1]
    assert (entry.layer, entry.num_logical) == (1, 8)
    assert entry.listed == (7, 0, 2)
    assert entry.substituted == (0, 2, 7)
    assert entry.retained == (1, 3, 4, 5, 6)
    assert list(entry.constants.items()) == [
        (0, "model.layers.1.mlp.experts.0.approx_value"),
        (2, "model.layers.1.mlp.experts.2.approx_value"),
        (7, "model.layers.1.mlp.experts.7.approx_value"),
    ]
    plain = read.substitution.layer(5, 8)
    assert (plain.listed, plain.retained) == ((), (0, 1, 2, 3, 4, 5, 6, 7))


@pytest.mark.parametrize("empty", [None, {}, {"0": []}, {"0": None, "1": []}], ids=str)
def test_nothing_declared(empty: Any) -> None:
    declared = {"approximate_experts": empty}
    for text in (cfg(), cfg(**declared), cfg(text_config=declared)):
        read = config.parse(text)
        assert read.substitution == config.Substitution("none", {})
        assert read.findings == ()


def test_fewer_retained_than_top_k() -> None:
    """FMT-18: seven of eight substituted with two routes per token."""
    text = cfg(approximate_experts={"0": [0, 1, 2, 3, 4, 5, 6], "1": None})
    assert listed(text) == {0: (0, 1, 2, 3, 4, 5, 6)}


BAD_LISTS: list[tuple[Any, Code, str, str]] = [
    *((value, Code.NOT_A_MAPPING, "", "FMT-20") for value in ([[], [1]], [1], "1", 0, False)),
    *(({key: [1]}, Code.LAYER_KEY, f'["{key}"]', "FMT-21")
      for key in ("01", " 1", "1 ", "+1", "-1", "1.0", "1e0", "0x1", "", "1_0",
                  "model.layers.1.mlp")),
    ({"layer": [1]}, Code.LAYER_KEY, ".layer", "FMT-21"),
    ({"\u0661": [1]}, Code.LAYER_KEY, '["\\u0661"]', "FMT-21"),  # an Arabic digit one
    *(({"1": value}, Code.NOT_A_LIST, '["1"]', "FMT-20") for value in ("14", 1, {}, True)),
    *(({"1": [0, value]}, Code.ID_TYPE, '["1"][1]', "FMT-20")
      for value in (True, 1.0, 1.9, "3", None, [1])),
    ({"1": [4, 1, 4]}, Code.ID_DUPLICATE, '["1"][2]', "FMT-20"),
    *(({"1": [value]}, Code.ID_RANGE, '["1"][0]', "FMT-20") for value in (-1, 8, 10**400)),
    ({"1": [7, 6, 5, 4, 3, 2, 1, 0]}, Code.ALL_SUBSTITUTED, '["1"]', "FMT-17"),
    ({"2": [1]}, Code.LAYER_NOT_MOE, '["2"]', "FMT-25"),
    ({"1000000000": []}, Code.LAYER_NOT_MOE, '["1000000000"]', "FMT-25"),
    ({"9" * 5000: [1]}, Code.LAYER_NOT_MOE, f'["{"9" * 60}..."]', "FMT-25"),
]  # fmt: skip


@pytest.mark.parametrize("holder", ["$", "$.text_config"])
@pytest.mark.parametrize(("value", "code", "below", "clause"), BAD_LISTS, ids=lambda v: str(v)[:40])
def test_bad_list(holder: str, value: Any, code: Code, below: str, clause: str) -> None:
    declared = {"approximate_experts": value}
    text = cfg(**declared) if holder == "$" else cfg(text_config=declared)
    assert errors(text) == [(code, f"{holder}.approximate_experts{below}", clause)]


def test_repeated_keys() -> None:
    text = cfg(approximate_experts={"1": [1]}).decode()
    twice = text.replace('{"1": [1]}', '{"1": [1], "1": [4]}').encode()
    assert errors(twice) == [(Code.JSON_DUPLICATE_KEY, '$.approximate_experts["1"]', "FMT-22")]
    twice = text.replace('"vocab_size": 128', '"vocab_size": 128, "vocab_size": 128').encode()
    assert errors(twice) == [(Code.JSON_DUPLICATE_KEY, "$.vocab_size", "FMT-22")]


# -- placement and other forms

LIST = {"1": [1, 4], "0": [2]}
EXPLICIT = {
    "transform_config": {
        "expert_substitution": {
            "version": 1,
            "router_semantics": {
                "preserve_logical_expert_ids": True,
                "preserve_router_weights": True,
                "renormalize_after_substitution": False,
            },
            "targets": {},
        }
    }
}
TARGETS = {
    "model.layers.0.mlp.experts": {
        "num_logical_experts": 8,
        "weight_layout": "compact_retained_experts",
        "replacements": {"2": {"format": "constant-v1", "tensors": {"value": "novice"}}},
    }
}
EXPLICIT_PATH = "compression_config.transform_config.expert_substitution"


def test_either_placement() -> None:
    for text in (cfg(approximate_experts=LIST), cfg(text_config={"approximate_experts": LIST})):
        assert listed(text) == {0: (2,), 1: (1, 4)}
        assert findings(text) == []


@pytest.mark.parametrize("other", [LIST, {"0": [2], "1": [4, 1]}, {**LIST, "2": [], "1": [1, 4]}])
def test_equal_copies_are_noted(other: Any) -> None:
    text = cfg(
        num_hidden_layers=3, approximate_experts=LIST, text_config={"approximate_experts": other}
    )
    assert listed(text).keys() == {0, 1}
    assert findings(text) == [
        (Severity.NOTE, Code.PLACEMENT_COPY, "$.text_config.approximate_experts", "FMT-15")
    ]


@pytest.mark.parametrize("other", [{"1": [1], "0": [2]}, {"1": [1, 4]}, {}, {"0": [1, 4]}])
def test_different_copies(other: Any) -> None:
    """An empty list in one place would hide the other one, so it counts as different."""
    text = cfg(approximate_experts=LIST, text_config={"approximate_experts": other})
    assert errors(text) == [
        (Code.PLACEMENT_CONFLICT, "$.text_config.approximate_experts", "FMT-15")
    ]


@pytest.mark.parametrize(
    ("approx", "targets", "clause"),
    [
        (LIST, TARGETS, "FMT-13"),
        ({}, TARGETS, "FMT-30"),
        ({"1": []}, TARGETS, "FMT-30"),
        (LIST, {}, "FMT-30"),
        ({}, {}, "FMT-30"),
    ],
)
@pytest.mark.parametrize("in_text", [False, True])
def test_both_forms(approx: Any, targets: Any, clause: str, in_text: bool) -> None:
    """Also when one of them declares nothing: two truths, whichever is read."""
    declared = {"approximate_experts": approx}
    changes = {"text_config": declared} if in_text else declared
    block = EXPLICIT["transform_config"]["expert_substitution"] | {"targets": targets}
    explicit = {"transform_config": {"expert_substitution": block}}
    with pytest.raises(Rejected) as caught:
        config.parse(cfg(compression_config=explicit, **changes))
    (problem,) = caught.value.problems
    assert (problem.code, problem.clause) == (Code.BOTH_FORMS, clause)
    holder = "$.text_config" if in_text else "$"
    assert problem.found == f"{holder}.approximate_experts and $.{EXPLICIT_PATH}"


def test_null_is_no_second_form() -> None:
    read = config.parse(cfg(approximate_experts=None, compression_config=EXPLICIT))
    assert (read.substitution, read.findings) == (config.Substitution("none", {}), ())


def test_explicit_form_is_null() -> None:
    for compression in (None, {}, {"transform_config": None}, {"transform_config": {}}):
        assert listed(cfg(approximate_experts=LIST, compression_config=compression)) == {
            0: (2,),
            1: (1, 4),
        }


@pytest.mark.parametrize(
    ("changes", "code", "where", "clause"),
    [
        ({"text_config": {"compression_config": EXPLICIT}}, Code.MISPLACED,
         f"$.text_config.{EXPLICIT_PATH}", "FMT-16"),
        ({"text_config": {"compression_config": {"transform_config": {"expert_substitution": 1}}}},
         Code.MISPLACED, f"$.text_config.{EXPLICIT_PATH}", "FMT-16"),
        (EXPLICIT, Code.MISPLACED, "$.transform_config.expert_substitution", "FMT-16"),
        ({"compression_config": EXPLICIT["transform_config"]}, Code.MISPLACED,
         "$.compression_config.expert_substitution", "FMT-16"),
        (EXPLICIT["transform_config"], Code.MISPLACED, "$.expert_substitution", "FMT-16"),
        ({"llm_config": {"compression_config": EXPLICIT}}, Code.MISPLACED,
         f"$.llm_config.{EXPLICIT_PATH}", "FMT-16"),
        ({"llm_config": {"approximate_experts": LIST}}, Code.MISPLACED,
         "$.llm_config.approximate_experts", "FMT-3"),
        ({"compression_config": []}, Code.EXPLICIT_FORM, "$.compression_config", "FMT-20"),
        ({"compression_config": {"transform_config": 1}}, Code.EXPLICIT_FORM,
         "$.compression_config.transform_config", "FMT-20"),
        ({"mone": {"version": 1, "experts_by_layer": LIST}}, Code.DIALECT, "$.mone", "FMT-26"),
        ({"text_config": {"mone": {}}}, Code.DIALECT, "$.text_config.mone", "FMT-26"),
    ],
)  # fmt: skip
def test_declarations_that_are_not_read(
    changes: dict[str, Any], code: Code, where: str, clause: str
) -> None:
    assert errors(cfg(**changes)) == [(code, where, clause)]


@pytest.mark.parametrize(
    ("counts", "code", "below"),
    [
        ({"1": [128, 0], "0": [0]}, Code.EVOLVING, '["1"]'),
        ({"1": [0, -1], "0": [0]}, Code.EVOLVING, '["1"]'),
        ({"1": [0], "0": [0]}, Code.DIALECT, '["1"]'),
        ({"1": [0, 0]}, Code.DIALECT, '["0"]'),
        ({"1": [0, 0], "0": [0], "01": [0]}, Code.DIALECT, '["01"]'),
        ({"1": [0, False], "0": [0]}, Code.DIALECT, '["1"]'),
        ({"1": 0, "0": [0]}, Code.DIALECT, '["1"]'),
        ([0, 0, 0], Code.DIALECT, ""),
    ],
)
def test_evolving_constants(counts: Any, code: Code, below: str) -> None:
    text = cfg(approximate_experts=LIST, approximate_expert_init_tokens=counts)
    assert errors(text) == [(code, f"$.approximate_expert_init_tokens{below}", "FMT-26")]


def test_init_tokens_of_zero_are_noted() -> None:
    counts = {"0": [0], "1": [0, 0]}
    text = cfg(approximate_experts=LIST, approximate_expert_init_tokens=counts)
    assert listed(text) == {0: (2,), 1: (1, 4)}
    assert findings(text) == [
        (Severity.NOTE, Code.DIALECT, "$.approximate_expert_init_tokens", "FMT-26")
    ]


@pytest.mark.parametrize(
    "key",
    ["approximate_expert", "approximated_experts", "approx_experts", "approximateExperts",
     "Approximate_Experts", "aproximate_experts", "expert_substitution",
     "approximate_experts_init_tokens"],
)  # fmt: skip
def test_near_misses_are_warned_about(key: str) -> None:
    warning = (Severity.WARNING, Code.UNKNOWN_KEY, f"$.{key}", "FMT-23")
    assert findings(cfg(**{key: LIST})) == [warning]


@pytest.mark.parametrize(
    "key", ["num_experts_total", "expert_interval", "experts_implementation", "x" * 10**5, "", "é"]
)
def test_other_unknown_keys_are_ignored(key: str) -> None:
    assert findings(cfg(**{key: LIST})) == []


# -- the whole file


def test_every_error_at_once() -> None:
    text = cfg(
        vocab_size=0,
        dtype="int4",
        attention_bias=True,
        approximate_experts={"1": [True, 9, 3, 3], "01": [1], "5": [1], "0": "1"},
        mone={},
    )
    assert errors(text) == [
        (Code.MODEL_FIELD, "$.vocab_size", ""),
        (Code.MODEL_FEATURE, "$.attention_bias", ""),
        (Code.MODEL_FIELD, "$.dtype", ""),
        (Code.ID_TYPE, '$.approximate_experts["1"][0]', "FMT-20"),
        (Code.ID_RANGE, '$.approximate_experts["1"][1]', "FMT-20"),
        (Code.ID_DUPLICATE, '$.approximate_experts["1"][3]', "FMT-20"),
        (Code.LAYER_KEY, '$.approximate_experts["01"]', "FMT-21"),
        (Code.LAYER_NOT_MOE, '$.approximate_experts["5"]', "FMT-25"),
        (Code.NOT_A_LIST, '$.approximate_experts["0"]', "FMT-20"),
        (Code.DIALECT, "$.mone", "FMT-26"),
    ]


def test_list_of_an_unknown_family_is_still_read() -> None:
    """Without an expert count, what needs none is checked."""
    text = cfg(architectures=["Other"], approximate_experts={"1": [-1, 999, 1.0], "x": []})
    assert errors(text) == [
        (Code.UNKNOWN_FAMILY, "$.architectures", ""),
        (Code.ID_RANGE, '$.approximate_experts["1"][0]', "FMT-20"),
        (Code.ID_TYPE, '$.approximate_experts["1"][2]', "FMT-20"),
        (Code.LAYER_KEY, "$.approximate_experts.x", "FMT-21"),
    ]


@pytest.mark.parametrize("text", [b"", b"{", b"\xef\xbb\xbf{}", b"\xff", b"NaN", b"[" * 10**5])
def test_not_json(text: bytes) -> None:
    assert errors(text) == [(Code.JSON_SYNTAX, "$", "")]


@pytest.mark.parametrize("text", [b"[]", b"1", b"null", b'"x"'])
def test_not_an_object(text: bytes) -> None:
    assert errors(text) == [(Code.JSON_NOT_OBJECT, "$", "")]


def test_messages_name_the_file() -> None:
    with pytest.raises(Rejected, match=r"\(parse\) other\.json: \$: found "):
        config.parse(b"", file="other.json")


# -- arbitrary input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
ZEROS = {"0": [0], "1": [0, 0]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FULL: dict[str, Any] = {
    **BASE,
    "approximate_experts": LIST,
    "approximate_expert_init_tokens": ZEROS,
    "compression_config": {"transform_config": {}},
    "rope_parameters": ROPE,
    "clip_qkv": 8.0,
    "dtype": "bfloat16",
    "text_config": {**BASE, "approximate_experts": LIST, "rope_scaling": ROPE},
}


def paths(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every member of every object and array below ``node``."""
    if not isinstance(node, dict | list):
        return [path]
    members = node.items() if isinstance(node, dict) else enumerate(node)
    below = [found for key, value in members for found in paths(value, (*path, key))]
    return [path, *below] if path else below


def spliced(path: tuple[str | int, ...], value: Any) -> bytes:
    copy = json.loads(json.dumps(FULL))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(copy).encode()


def accepted_or_rejected(text: bytes) -> None:
    """Only ``Rejected``, with errors that can be printed; what is accepted is in range."""
    try:
        read = config.parse(text)
    except Rejected as error:
        rejected = error
    else:
        assert all(p.severity is not Severity.ERROR for p in read.findings)
        for layer, entry in read.substitution.layers.items():
            assert 0 <= layer < read.model.num_layers
            assert entry.retained
            assert entry.listed
            assert len({*entry.listed, *entry.retained}) == read.model.num_experts
        return
    assert all(p.severity is Severity.ERROR for p in rejected.problems)
    assert all(p.where.startswith("$") and p.expected for p in rejected.problems)
    message = str(rejected).replace("\n", "")
    assert message.isascii()
    assert message.isprintable()


def test_the_full_config_is_accepted() -> None:
    assert listed(json.dumps(FULL).encode()) == {0: (2,), 1: (1, 4)}


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_documents(text: bytes) -> None:
    accepted_or_rejected(text)


@settings(max_examples=400)
@given(st.sampled_from(paths(FULL)), JSON)
def test_arbitrary_json_in_every_field(path: tuple[str | int, ...], value: Any) -> None:
    accepted_or_rejected(spliced(path, value))


@given(st.integers(0, 10**6).flatmap(lambda at: st.tuples(st.just(at), st.binary(max_size=3))))
def test_damaged_bytes(damage: tuple[int, bytes]) -> None:
    text, (at, patch) = json.dumps(FULL).encode(), damage
    at %= len(text)
    accepted_or_rejected(text[:at] + patch + text[at + len(patch) :])


@given(
    st.dictionaries(st.integers(0, 1), st.lists(st.integers(0, 7), unique=True, max_size=7)),
    st.booleans(),
)
def test_every_sound_list_is_read_as_written(ids: dict[int, list[int]], in_text: bool) -> None:
    declared = {"approximate_experts": {str(layer): listed for layer, listed in ids.items()}}
    text = cfg(text_config=declared) if in_text else cfg(**declared)
    assert listed(text) == {layer: tuple(ids[layer]) for layer in ids if ids[layer]}


# -- the file


def refusal(directory: Path) -> Code:
    with pytest.raises(Rejected) as caught:
        config.read(directory)
    (problem,) = caught.value.problems
    assert problem.phase is Phase.PARSE
    return problem.code


def test_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(cfg(approximate_experts=LIST))
    stored, parsed = config.read(tmp_path), config.parse(cfg(approximate_experts=LIST))
    assert (stored.model, stored.substitution) == (parsed.model, parsed.substitution)
    assert stored.findings == parsed.findings


def test_nothing_to_read(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") is Code.NOT_A_CHECKPOINT
    assert refusal(tmp_path / "\0") is Code.NOT_A_CHECKPOINT
    assert refusal(tmp_path) is Code.NO_CONFIG
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") is Code.NOT_A_CHECKPOINT
    assert refusal(tmp_path / ("x" * 5000)) is Code.UNREADABLE
    (tmp_path / "config.json").mkdir()
    assert refusal(tmp_path) is Code.UNREADABLE


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert refusal(tmp_path) is Code.UNREADABLE


def test_size_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.write(cfg())
        file.write(b" " * (config.MAX_BYTES - file.tell()))
    assert config.read(tmp_path).model.num_experts == 8
    with (tmp_path / "config.json").open("ab") as file:
        file.write(b" ")
    assert refusal(tmp_path) is Code.UNREADABLE
