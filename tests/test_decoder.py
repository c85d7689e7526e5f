"""The float64 oracle against stock transformers, on plain checkpoints that transformers saved."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import mone_ref
from mone_ref.fill.fixture import GOLDEN_TOLERANCE
from mone_ref.fill.golden import budget
from mone_ref.fill.variants import UNIT_ROUNDOFF, variants
from mone_ref.suite.compare import MULTIPLIER

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97]


SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
EXPERTS = {"moe_intermediate_size": 20, "intermediate_size": 28}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = {
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
FAMILIES: dict[str, dict[str, object]] = {
    "olmoe": {"intermediate_size": 20, "num_experts": 6},
    "qwen3_moe": {**EXPERTS, "num_experts": 6, "head_dim": 12},
    "mixtral": {"intermediate_size": 20, "num_local_experts": 6},
    "qwen2_moe": {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 24},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 6, "head_dim": 12, "first_k_dense_replace": 1},
    "deepseek_v2": {**EXPERTS, **LATENT, "n_routed_experts": 6, "q_lora_rank": None},
    "deepseek_v3": {**EXPERTS, **LATENT, **GROUPS, "q_lora_rank": 18, "first_k_dense_replace": 1},
    "minimax_m2": {"intermediate_size": 20, "num_local_experts": 6, "head_dim": 12},
}


def save_plain(directory: Path, family: str = "olmoe", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = deepcopy(SIZES | FAMILIES[family] | changes)  # transformers writes into them
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # transformers starts norms at one, the others at zero: it hides them
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.uniform_(-0.3, 0.3)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmoe", {}),
        ("olmoe", {"norm_topk_prob": True}),
        ("olmoe", {"tie_word_embeddings": True}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("olmoe", {"num_key_value_heads": 3, "rope_theta": 500.0}),
        ("olmoe", {"num_experts_per_tok": 6}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True, "num_key_value_heads": 3}),
        ("qwen3_moe", {"head_dim": 32, "rms_norm_eps": 1e-2}),
        ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]}),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen3_moe", {"num_hidden_layers": 2, "decoder_sparse_step": 3}),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
        ("mixtral", {}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 6, "num_key_value_heads": 3}),
        ("mixtral", {"head_dim": 24, "rope_theta": 500.0}),
        ("mixtral", {"tie_word_embeddings": True}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True, "mlp_only_layers": [0]}),
        ("glm4_moe", {"routed_scaling_factor": 2.5}),
        ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 3}),
        ("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 0, "head_dim": 16}),
        ("glm4_moe", {**GROUPS, "n_shared_experts": 2, "num_experts_per_tok": 3}),
        ("deepseek_v2", {"n_shared_experts": 1, "routed_scaling_factor": 4.0}),
        ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": 18}),
        ("deepseek_v2", {"rope_parameters": YARN, "first_k_dense_replace": 1}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None, "norm_topk_prob": False, "topk_group": 4}),
        ("deepseek_v3", {"rope_parameters": YARN, "num_hidden_layers": 3}),
        ("deepseek_v3", {"rope_interleave": False, "routed_scaling_factor": 1.0}),
        ("minimax_m2", {}),
        ("minimax_m2", {"rotary_dim": 6, "num_key_value_heads": 3, "num_experts_per_tok": 3}),
    ],
    ids=str,
)
def test_float64_oracle_and_transformers_float32_agree(tmp_path, family, changes):
    stock = save_plain(tmp_path, family, **changes)
    oracle = mone_ref.load(tmp_path, torch.float64)
    truth = oracle.score([PROMPT])[0]  # [T, V]
    with torch.no_grad():
        theirs = stock(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)  # [T, V]

    runs = torch.stack([run.model.score([PROMPT])[0] for run in variants(tmp_path, "float32")])
    token, top = budget(oracle.logits(PROMPT), truth, runs, UNIT_ROUNDOFF["float32"])
    error = theirs - truth
    assert (error.square().mean(-1).sqrt() <= MULTIPLIER * token).all()
    assert error.abs().max() <= MULTIPLIER * top


@pytest.mark.parametrize(
    ("family", "misreading"),
    [
        ("olmoe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"rms_norm_eps": 1e-2}),
        ("mixtral", {"rope_theta": 1e4}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("glm4_moe", {"routed_scaling_factor": 2.5}),
        ("deepseek_v2", {"routed_scaling_factor": 2.0}),
        ("deepseek_v3", {"topk_group": 1}),
        ("minimax_m2", {"rotary_dim": 6}),
    ],
    ids=str,
)
def test_the_bound_above_can_fail(tmp_path, family, misreading):
    save_plain(tmp_path, family)
    other = save_plain(tmp_path / "other", family, **misreading)
    oracle = mone_ref.load(tmp_path, torch.float64)
    truth = oracle.score([PROMPT])[0]
    with torch.no_grad():
        theirs = other(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    runs = torch.stack([run.model.score([PROMPT])[0] for run in variants(tmp_path, "float32")])
    token, _ = budget(oracle.logits(PROMPT), truth, runs, UNIT_ROUNDOFF["float32"])
    assert ((theirs - truth).square().mean(-1).sqrt() > MULTIPLIER * token).any()


def test_later_tokens_never_change_earlier_rows(approx):
    model = mone_ref.load(approx, torch.float64)
    whole = model.score([PROMPT])[0]
    part = model.score([PROMPT[:5]])[0]
    # A product over fewer rows may block its sums differently, as another kernel does.
    assert (whole[:5] - part).abs().max() <= GOLDEN_TOLERANCE * whole.abs().max()


def test_prompts_are_checked(approx):
    model = mone_ref.load(approx)
    for prompt in ([], [0, 10**6], [-1]):
        with pytest.raises(ValueError, match="token ids"):
            model.score([prompt])
