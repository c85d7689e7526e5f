"""What the vLLM adapter says before it asks vLLM: read from config.json, broken ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mone_ref.backends import vllm_limits
from mone_ref.suite import data

FIXTURES = data.root() / "fixtures"
LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.fixture(autouse=True)
def _a_plain_machine(monkeypatch):
    monkeypatch.setattr(vllm_limits, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_limits, "has_amx", lambda: False)


def written(directory: Path, document: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize(
    ("fixture", "reason"),
    [
        ("minimax-approx", "vLLM's CPU router has no sigmoid without groups"),
        ("deepseek2-tiny", "vLLM's CPU kernels of latent attention hold 576 elements, not 44"),
        ("deepseek3-explicit-plain", "vLLM's CPU kernels of latent attention hold 576"),
    ],
)
def test_what_cannot_run_on_a_cpu(fixture: str, reason: str):
    checkpoint = FIXTURES / fixture / "checkpoint"
    assert vllm_limits.unavailable(checkpoint, "float32", cuda=False).startswith(reason)
    assert vllm_limits.unavailable(checkpoint, "float32", cuda=True) == ""


@pytest.mark.parametrize("fixture", ["olmoe-approx", "deepseek2-approx", "glm4-approx", "qwen3-vl"])
def test_what_may_run(fixture: str):
    assert vllm_limits.unavailable(FIXTURES / fixture / "checkpoint", "float32", cuda=False) == ""


@pytest.mark.parametrize(
    ("head", "dtype", "reason"),
    [
        (32, "bfloat16", ""),
        (32, "float32", "vLLM's AMX kernels of latent attention have no right answers in float32"),
        (32, "float16", "vLLM's AMX kernels of latent attention have no right answers in float16"),
        (16, "bfloat16", "vLLM's AMX kernels take no 16 input features, which this latent"),
    ],
)
def test_latent_attention_on_amx(head: int, dtype: str, reason: str, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_limits, "has_amx", lambda: True)
    checkpoint = written(tmp_path, {**LATENT, "qk_nope_head_dim": head})
    found = vllm_limits.unavailable(checkpoint, dtype, cuda=False)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)
    assert vllm_limits.unavailable(checkpoint, dtype, cuda=True) == ""
    glm = FIXTURES / "glm4-approx" / "checkpoint"
    assert vllm_limits.unavailable(glm, dtype, cuda=False) == ""


@pytest.mark.parametrize("cuda", [False, True])
def test_qwen3_vl_needs_torchvision(cuda: bool, monkeypatch):
    monkeypatch.setattr(vllm_limits, "find_spec", lambda name: None)
    reason = vllm_limits.unavailable(FIXTURES / "qwen3-vl" / "checkpoint", "float32", cuda)
    assert reason == "vLLM imports torchvision for Qwen3-VL, and it is not installed"
    assert vllm_limits.unavailable(FIXTURES / "olmoe-approx" / "checkpoint", "float32", cuda) == ""


def test_only_qwen3_vl_has_arguments_of_its_own():
    assert vllm_limits.arguments(FIXTURES / "qwen3-vl" / "checkpoint") == {
        "language_model_only": True
    }
    assert vllm_limits.arguments(FIXTURES / "olmoe-approx" / "checkpoint") == {}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"architectures": None},
        {"architectures": "MiniMaxM2ForCausalLM"},
        LATENT,
        {**LATENT, "kv_lora_rank": None},
        {**LATENT, "qk_rope_head_dim": "64"},
    ],
    ids=str,
)
def test_whatever_else_a_config_says_is_left_to_the_engine(document: Any, tmp_path):
    assert vllm_limits.unavailable(written(tmp_path, document), "float32", cuda=False) == ""


def test_a_missing_config_is_left_to_the_engine(tmp_path):
    assert vllm_limits.unavailable(tmp_path, "float32", cuda=False) == ""
    (tmp_path / "config.json").write_bytes(b"\xff{")
    assert vllm_limits.unavailable(tmp_path, "float32", cuda=False) == ""
