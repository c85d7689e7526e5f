"""The float64 oracle against stock transformers, on plain checkpoints that transformers saved."""

from pathlib import Path

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import mone_ref
from mone_ref.fill.golden import budget
from mone_ref.fill.variants import UNIT_ROUNDOFF, variants

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97]
MULTIPLIER = 3  # the number rule (SPEC, Numbers)


def save_plain(directory: Path, **changes: object) -> OlmoeForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    model = OlmoeForCausalLM(OlmoeConfig(**(sizes | changes))).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": True},
        {"tie_word_embeddings": True},
        {"clip_qkv": 0.5},
        {"num_key_value_heads": 3, "rope_theta": 500.0},
        {"num_experts_per_tok": 6},
    ],
    ids=["plain", "normalised", "tied", "clipped", "full-heads", "all-experts"],
)
def test_float64_oracle_and_transformers_float32_agree(tmp_path, changes):
    stock = save_plain(tmp_path, **changes)
    oracle = mone_ref.load(tmp_path, torch.float64)
    truth = oracle.score([PROMPT])[0]  # [T, V]
    with torch.no_grad():
        theirs = stock(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)  # [T, V]

    runs = torch.stack([run.model.score([PROMPT])[0] for run in variants(tmp_path, "float32")])
    token, top = budget(oracle.logits(PROMPT), truth, runs, UNIT_ROUNDOFF["float32"])
    error = theirs - truth
    assert (error.square().mean(-1).sqrt() <= MULTIPLIER * token).all()
    assert error.abs().max() <= MULTIPLIER * top


def test_the_bound_above_can_fail(tmp_path):
    save_plain(tmp_path)
    other = save_plain(tmp_path / "other", norm_topk_prob=True)
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
    # A product over fewer rows may block its sums differently, by a few units of roundoff.
    assert (whole[:5] - part).abs().max() <= 1e3 * torch.finfo(torch.float64).eps


def test_prompts_are_checked(approx):
    model = mone_ref.load(approx)
    for prompt in ([], [0, 10**6], [-1]):
        with pytest.raises(ValueError, match="token ids"):
            model.score([prompt])
