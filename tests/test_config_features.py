"""config.json of families with shared experts, corrections, groups, latent attention, MTP layers
and a text config: what is read, what is refused, and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from decimals import right
from handmade import ABSENT

from mone_ref import config
from mone_ref.config import Config
from mone_ref.errors import Code, Rejected, Severity
from mone_ref.families import FAMILIES, Groups, QkNorm, RouterRule
from mone_ref.model_config import Latent, ModelConfig
from mone_ref.rope_config import Rope

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_experts_per_tok": 3,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 40, "intermediate_size": 72}
ROUTED = {**EXPERTS, "n_routed_experts": 8}
LATENT = {
    "kv_lora_rank": 28,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
}
# No optional key, except where a family's own default does not fit eight experts.
MINIMAL: dict[str, dict[str, Any]] = {
    "olmoe": {**SIZES, "intermediate_size": 40, "num_experts": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 8},
    "mixtral": {**SIZES, "intermediate_size": 40, "num_local_experts": 8},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 56},
    "glm4_moe": ROUTED,
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2},
    "minimax_m2": {**SIZES, "intermediate_size": 40, "num_local_experts": 8, "head_dim": 32},
    "qwen3_vl_moe": {**EXPERTS, "num_experts": 8},
}
ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}


def text(family: str, /, **changes: Any) -> bytes:
    document = {"architectures": [ARCHITECTURES[family]], **MINIMAL[family], **changes}
    return json.dumps({k: v for k, v in document.items() if v is not ABSENT}).encode()


def read(family: str, /, **changes: Any) -> Config:
    return config.parse(text(family, **changes))


def model(family: str, /, **changes: Any) -> ModelConfig:
    return read(family, **changes).model


def errors(family: str, /, **changes: Any) -> list[tuple[Code, str]]:
    """Codes and places of a rejection."""
    with pytest.raises(Rejected) as caught:
        read(family, **changes)
    return [(problem.code, problem.where) for problem in caught.value.problems]


def test_every_family_is_here():
    assert MINIMAL.keys() == ARCHITECTURES.keys()


# Routers


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("olmoe", RouterRule("softmax", False)),
        ("qwen3_moe", RouterRule("softmax", False)),
        ("mixtral", RouterRule("softmax", True)),
        ("qwen2_moe", RouterRule("softmax", False)),
        ("glm4_moe", RouterRule("sigmoid", True)),
        ("deepseek_v2", RouterRule("softmax", False)),
        ("deepseek_v3", RouterRule("sigmoid", True, 2.5, Groups(4, 2, best=2))),
        ("minimax_m2", RouterRule("sigmoid", True)),
        ("qwen3_vl_moe", RouterRule("softmax", False)),
    ],
)
def test_what_absent_keys_mean(family: str, rule: RouterRule):
    assert model(family).router == rule


def test_the_groups_of_deepseek_v3_are_eight_of_which_four():
    read = model("deepseek_v3", n_routed_experts=16, n_group=ABSENT, topk_group=ABSENT)
    assert read.router.groups == Groups(8, 4, best=2)


@pytest.mark.parametrize(
    ("family", "changes", "rule"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, RouterRule("softmax", True)),
        (
            "glm4_moe",
            {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1},
            RouterRule("sigmoid", False, 2.5, Groups(2, 1, best=2)),
        ),
        ("glm4_moe", {"n_group": 1, "topk_group": 1}, RouterRule("sigmoid", True)),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 4},
            RouterRule("softmax", False, 1.0, Groups(8, 4, best=1)),
        ),
        (
            "deepseek_v2",
            {"topk_method": "greedy", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 16},
            RouterRule("softmax", False, 16.0),
        ),
        ("deepseek_v2", {"n_group": 8, "topk_group": 4}, RouterRule("softmax", False)),
        (
            "deepseek_v3",
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": False},
            RouterRule("sigmoid", False, 2.5, Groups(4, 2, best=2)),
        ),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}, RouterRule("sigmoid", True, 2.5)),
        ("minimax_m2", {"scoring_func": "sigmoid"}, RouterRule("sigmoid", True)),
    ],
    ids=str,
)
def test_routers(family: str, changes: dict[str, Any], rule: RouterRule):
    assert model(family, **changes).router == rule


@pytest.mark.parametrize(
    ("family", "changes", "code", "where"),
    [
        # B11: equal groups, two experts where a group stands by two, room for every route
        ("deepseek_v3", {"n_group": 3}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v3", {"n_group": 8}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v3", {"topk_group": 5}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v3", {"topk_group": 1}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v3", {"n_group": 0}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v3", {"topk_group": "2"}, Code.MODEL_FIELD, "$.topk_group"),
        ("deepseek_v3", {"n_group": ABSENT}, Code.MODEL_FIELD, "$.n_group"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, Code.MODEL_FIELD, "$.n_group"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, Code.MODEL_FEATURE, "$.topk_method"),
        ("deepseek_v3", {"topk_method": "greedy"}, Code.MODEL_FEATURE, "$.topk_method"),
        ("deepseek_v3", {"topk_method": 1}, Code.MODEL_FEATURE, "$.topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, Code.MODEL_FEATURE, "$.scoring_func"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, Code.MODEL_FEATURE, "$.scoring_func"),
        ("minimax_m2", {"scoring_func": "softmax"}, Code.MODEL_FEATURE, "$.scoring_func"),
        ("minimax_m2", {"norm_topk_prob": False}, Code.MODEL_FEATURE, "$.norm_topk_prob"),
        ("glm4_moe", {"routed_scaling_factor": 0}, Code.MODEL_FIELD, "$.routed_scaling_factor"),
        ("glm4_moe", {"routed_scaling_factor": "2"}, Code.MODEL_FIELD, "$.routed_scaling_factor"),
        ("qwen2_moe", {"n_group": 2}, Code.MODEL_FEATURE, "$.n_group"),
    ],
    ids=str,
)
def test_bad_routers(family: str, changes: dict[str, Any], code: Code, where: str):
    assert errors(family, **changes) == [(code, where)]


def test_a_factor_that_no_family_member_reads_is_a_limit():
    assert errors("minimax_m2", routed_scaling_factor=2.5) == [
        (Code.MODEL_FEATURE, "$.routed_scaling_factor")
    ]


def test_a_group_may_be_substituted_whole():
    listed = read("deepseek_v3", first_k_dense_replace=1, approximate_experts={"1": [0, 1]})
    assert listed.substitution.layers[1].substituted == (0, 1)


# Shared experts and dense layers


@pytest.mark.parametrize(
    ("family", "changes", "size"),
    [
        ("olmoe", {}, 0),
        ("qwen2_moe", {}, 56),
        ("glm4_moe", {}, 40),
        ("glm4_moe", {"n_shared_experts": 3}, 120),
        ("glm4_moe", {"n_shared_experts": 0}, 0),
        ("deepseek_v2", {}, 80),
        ("deepseek_v3", {}, 40),
        ("minimax_m2", {}, 0),
    ],
    ids=str,
)
def test_shared_experts(family: str, changes: dict[str, Any], size: int):
    assert model(family, **changes).shared_intermediate_size == size


@pytest.mark.parametrize(
    ("family", "changes", "dense"),
    [
        ("glm4_moe", {}, {0}),
        ("glm4_moe", {"first_k_dense_replace": 0}, set()),
        ("deepseek_v2", {}, set()),
        ("deepseek_v2", {"first_k_dense_replace": 2}, {0, 1}),
        ("deepseek_v3", {}, {0, 1, 2}),
        ("deepseek_v3", {"first_k_dense_replace": 9}, {0, 1, 2}),
        ("qwen2_moe", {"mlp_only_layers": [1]}, {1}),
        ("minimax_m2", {}, set()),
    ],
    ids=str,
)
def test_dense_layers(family: str, changes: dict[str, Any], dense: set[int]):
    assert model(family, **changes).dense_layers == dense


@pytest.mark.parametrize(
    ("family", "changes", "code", "where"),
    [
        ("qwen2_moe", {"shared_expert_intermediate_size": ABSENT}, Code.MODEL_FIELD, None),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"n_shared_experts": -1}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"n_shared_experts": True}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"first_k_dense_replace": 1.0}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"intermediate_size": ABSENT}, Code.MODEL_FIELD, None),
        ("minimax_m2", {"n_shared_experts": 1}, Code.MODEL_FEATURE, None),
        ("minimax_m2", {"first_k_dense_replace": 1}, Code.MODEL_FEATURE, None),
        ("glm4_moe", {"shared_expert_intermediate_size": 8}, Code.MODEL_FEATURE, None),
    ],
    ids=str,
)
def test_bad_counts(family: str, changes: dict[str, Any], code: Code, where: str | None):
    assert errors(family, **changes) == [(code, where or f"$.{next(iter(changes))}")]


def test_a_dense_layer_is_not_substituted():
    assert errors("glm4_moe", approximate_experts={"0": [1]}) == [
        (Code.LAYER_NOT_MOE, '$.approximate_experts["0"]')
    ]


# Attention


@pytest.mark.parametrize(
    ("family", "changes", "biased", "norm"),
    [
        ("qwen2_moe", {}, True, QkNorm.NONE),
        ("qwen2_moe", {"qkv_bias": False}, False, QkNorm.NONE),
        ("glm4_moe", {}, False, QkNorm.NONE),
        ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}, True, QkNorm.HEAD),
        ("deepseek_v2", {}, False, QkNorm.NONE),
        ("minimax_m2", {}, False, QkNorm.PROJECTION),
    ],
    ids=str,
)
def test_biases_and_norms(family: str, changes: dict[str, Any], biased: bool, norm: QkNorm):
    found = model(family, **changes)
    assert (found.attention_bias, found.qk_norm) == (biased, norm)


def test_latent_attention():
    found = model("deepseek_v2")
    assert found.latent == Latent(query_rank=20, rank=28, plain=24, rotated=16, value=12)
    assert found.head_dim == 40
    assert found.rope == Rope(1e4, 16, neighbours=True)


@pytest.mark.parametrize("absent", [None, ABSENT], ids=["null", "absent"])
def test_queries_may_have_no_latent(absent: Any):
    found = model("deepseek_v3", q_lora_rank=absent).latent
    assert found is not None
    assert found.query_rank == 0


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"])
@pytest.mark.parametrize("value", [ABSENT, 0, -1, 1.5, "64"], ids=str)
def test_latent_sizes_are_required(key: str, value: Any):
    assert errors("deepseek_v3", **{key: value}) == [(Code.MODEL_FIELD, f"$.{key}")]


@pytest.mark.parametrize(
    ("family", "changes", "where"),
    [
        ("deepseek_v3", {"v_head_dim": ABSENT}, "$.v_head_dim"),
        ("deepseek_v3", {"q_lora_rank": 0}, "$.q_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 15}, "$.qk_rope_head_dim"),
        ("qwen2_moe", {"qkv_bias": 1}, "$.qkv_bias"),
        ("glm4_moe", {"use_qk_norm": "yes"}, "$.use_qk_norm"),
        ("deepseek_v3", {"rope_interleave": 0}, "$.rope_interleave"),
    ],
    ids=str,
)
def test_bad_attention(family: str, changes: dict[str, Any], where: str):
    assert errors(family, **changes) == [(Code.MODEL_FIELD, where)]


# Rotary embeddings


@pytest.mark.parametrize(
    ("family", "changes", "rope"),
    [
        ("glm4_moe", {"head_dim": 32}, Rope(1e4, 16)),
        ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 1.0}, Rope(1e4, 32)),
        (
            "glm4_moe",
            {"head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10}},
            Rope(10, 8),
        ),
        ("minimax_m2", {}, Rope(5e6, 32)),
        ("minimax_m2", {"rotary_dim": 12}, Rope(5e6, 12)),
        ("minimax_m2", {"rotary_dim": 12, "partial_rotary_factor": 0.375}, Rope(5e6, 12)),
        ("deepseek_v3", {}, Rope(1e4, 16, neighbours=True)),
        ("deepseek_v3", {"rope_interleave": False}, Rope(1e4, 16)),
        (
            "qwen3_vl_moe",
            {"head_dim": 32, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}},
            Rope(5e5, 32),
        ),
    ],
    ids=str,
)
def test_which_part_of_a_head_is_rotated(family: str, changes: dict[str, Any], rope: Rope):
    assert model(family, **changes).rope == rope


@pytest.mark.parametrize(
    ("family", "changes", "code", "where"),
    [
        ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 0.3}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 1.5}, Code.MODEL_FIELD, None),
        ("glm4_moe", {"head_dim": 32, "partial_rotary_factor": 0}, Code.MODEL_FIELD, None),
        ("minimax_m2", {"rotary_dim": 7}, Code.MODEL_FIELD, "$.rotary_dim"),
        ("minimax_m2", {"rotary_dim": 34}, Code.MODEL_FIELD, "$.rotary_dim"),
        (
            "minimax_m2",
            {"rotary_dim": 12, "partial_rotary_factor": 0.5},
            Code.MODEL_FIELD,
            "$.rotary_dim",
        ),
        ("glm4_moe", {"rotary_dim": 16}, Code.MODEL_FEATURE, "$.rotary_dim"),
        (
            "glm4_moe",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            Code.MODEL_FEATURE,
            "$.rope_scaling.type",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 4}},
            Code.MODEL_FEATURE,
            "$.rope_scaling.type",
        ),
    ],
    ids=str,
)
def test_bad_rotary_parts(family: str, changes: dict[str, Any], code: Code, where: str | None):
    assert errors(family, **changes) == [(code, where or "$.partial_rotary_factor")]


STRETCHED = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def test_yarn_as_published():
    """DeepSeek-V2: both scales are 0.707, which cancel in the table."""
    published = {"beta_fast": 16, "beta_slow": 2, "mscale": 0.707, "mscale_all_dim": 0.707}
    yarn = model("deepseek_v2", rope_scaling=STRETCHED | published).rope.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original, yarn.beta_fast, yarn.beta_slow) == (40, 4096, 16, 2)
    assert yarn.table_scale == 1.0
    assert right("1.589626", yarn.score_scale)  # (1 + 0.0707 ln 40)^2


def test_what_yarn_leaves_out():
    yarn = model("deepseek_v3", rope_scaling=STRETCHED).rope.yarn
    assert yarn is not None
    assert (yarn.beta_fast, yarn.beta_slow, yarn.score_scale) == (32, 1, 1)
    assert right("1.368888", yarn.table_scale)  # 1 + 0.1 ln 40


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [ABSENT, 0, "4"], ids=str)
def test_yarn_needs_its_numbers(key: str, value: Any):
    block = {k: v for k, v in {**STRETCHED, key: value}.items() if v is not ABSENT}
    assert errors("deepseek_v3", rope_scaling=block) == [
        (Code.MODEL_FIELD, f"$.rope_scaling.{key}")
    ]


# MTP layers


def test_an_mtp_layer_is_meant_by_its_own_index():
    found = read(
        "glm4_moe", num_nextn_predict_layers=2, approximate_experts={"1": [5], "4": [2, 0]}
    ).substitution
    assert found.layers.keys() == {1}
    assert found.unbuilt[4].constants == {
        0: "model.layers.4.mlp.experts.0.approx_value",
        2: "model.layers.4.mlp.experts.2.approx_value",
    }


@pytest.mark.parametrize(
    ("family", "count", "layer"),
    [("glm4_moe", ABSENT, 3), ("glm4_moe", 0, 3), ("deepseek_v3", 1, 4)],
    ids=["none said", "none", "one past the last"],
)
def test_a_layer_past_the_mtp_layers_is_refused(family: str, count: Any, layer: int):
    changes = {"num_nextn_predict_layers": count, "approximate_experts": {str(layer): [1]}}
    assert errors(family, **changes) == [(Code.LAYER_NOT_MOE, f'$.approximate_experts["{layer}"]')]


def test_a_family_without_mtp_layers_has_none():
    assert errors("minimax_m2", num_nextn_predict_layers=1) == [
        (Code.MODEL_FEATURE, "$.num_nextn_predict_layers")
    ]


# A text config


def multimodal(**changes: Any) -> bytes:
    inner = {**MINIMAL["qwen3_vl_moe"], "model_type": "qwen3_vl_moe_text"}
    inside = changes.pop("inside", {})
    document = {
        "architectures": [ARCHITECTURES["qwen3_vl_moe"]],
        "model_type": "qwen3_vl_moe",
        "text_config": inner | inside,
    }
    return json.dumps(document | changes).encode()


LIST = {"1": [3, 0]}


def test_names_have_the_outer_prefix():
    found = config.parse(multimodal(inside={"approximate_experts": LIST}))
    assert found.model.hidden_size == 96
    assert found.substitution.layers[1].constants == {
        0: "model.language_model.layers.1.mlp.experts.0.approx_value",
        3: "model.language_model.layers.1.mlp.experts.3.approx_value",
    }
    assert found.findings == ()


def test_a_list_above_the_text_config():
    inside = config.parse(multimodal(inside={"approximate_experts": LIST}))
    above = config.parse(multimodal(approximate_experts=LIST))
    assert above.substitution == inside.substitution


def test_equal_lists_in_both_places():
    found = config.parse(
        multimodal(inside={"approximate_experts": LIST}, approximate_experts={"1": [0, 3]})
    )
    assert found.substitution.layers[1].substituted == (0, 3)
    assert [(p.severity, p.code) for p in found.findings] == [(Severity.NOTE, Code.PLACEMENT_COPY)]


def test_different_lists_in_both_places():
    with pytest.raises(Rejected) as caught:
        config.parse(
            multimodal(inside={"approximate_experts": LIST}, approximate_experts={"1": [0]})
        )
    (problem,) = caught.value.problems
    assert (problem.code, problem.clause) == (Code.PLACEMENT_CONFLICT, "FMT-15")


# Architectures that this format cannot substitute


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Llama4ForCausalLM", "weighs the input of an expert"),
        ("Llama4ForConditionalGeneration", "weighs the input of an expert"),
        ("GptOssForCausalLM", "stores experts in a layout of its own"),
    ],
)
def test_an_architecture_is_refused_with_its_reason(architecture: str, reason: str):
    with pytest.raises(Rejected) as caught:
        config.parse(json.dumps({"architectures": [architecture]}).encode())
    (problem,) = caught.value.problems
    assert problem.code is Code.UNKNOWN_FAMILY
    assert problem.found.startswith(reason)
