"""The float64 oracle against stock transformers, on plain checkpoints that transformers saved."""

from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
FAMILIES: dict[str, tuple[type, type, dict[str, object]]] = {
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"intermediate_size": 20, "num_experts": 6}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"moe_intermediate_size": 20, "intermediate_size": 28, "num_experts": 6, "head_dim": 12},
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"intermediate_size": 20, "num_local_experts": 6},
    ),
}


def save_plain(directory: Path, family: str = "olmoe", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config_class, sizes = FAMILIES[family]
    model = model_class(config_class(**(SIZES | sizes | changes))).eval()
    with torch.no_grad():  # transformers starts every norm at one, which would hide it
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
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
