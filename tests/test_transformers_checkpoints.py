"""Sound checkpoints of many architectures, as transformers saves them, give no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mone_ref import families, validate
from mone_ref.errors import Code

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
INNER = {"moe_intermediate_size": 24}
GROUPED = INNER | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HEADS = {"head_dim": 8}

# model_type -> what its config needs beyond SIZES
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": EXPERTS,
    "mixtral": LOCAL,
    "qwen2_moe": EXPERTS | INNER | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | INNER | HEADS,
    "deepseek_v2": GROUPED | LATENT,
    "deepseek_v3": GROUPED | LATENT,
    "glm4_moe": GROUPED | HEADS,
    "gpt_oss": LOCAL | HEADS,
    "phimoe": LOCAL,
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 40},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "ernie4_5_moe": INNER | {"moe_num_experts": 6, "moe_k": 2},
    "minimax": LOCAL | HEADS,
    "minimax_m2": LOCAL | HEADS,
    "lfm2_moe": EXPERTS
    | INNER
    | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "flex_olmo": EXPERTS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 6, "moe_topk": 2},
    "llama4_text": LOCAL | HEADS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48},
}


def vision_language() -> Any:
    """Qwen3-VL-MoE: the decoder beside a vision tower, its config under ``text_config``."""
    text = SIZES | EXPERTS | INNER | HEADS
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    config = transformers.Qwen3VLMoeConfig(
        text_config=text | {"rope_parameters": rope}, vision_config=vision
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def causal(model_type: str) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | MODELS[model_type]))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("shard", [None, "40KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", [*MODELS, "qwen3_vl_moe"])
def test_a_saved_model_gives_no_finding(tmp_path: Path, name: str, shard: str | None) -> None:
    torch.manual_seed(0)
    model = vision_language() if name == "qwen3_vl_moe" else causal(name)
    model.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) is (shard is not None)
    report = validate.check(tmp_path, "bfloat16", scan=True)
    vision = [problem.code for problem in report.problems]  # a note that a tower is carried
    assert vision == ([Code.UNKNOWN_TENSOR] if name == "qwen3_vl_moe" else [])
    assert not report.errors
    assert report.checkpoint is not None
    assert len(report.checkpoint.tensors) > 20
    known = families.find(model.config.architectures, model.config.model_type) is not None
    assert (report.config is not None) is known
    # The text decoder of Qwen3-VL is known, but transformers fuses its experts.
    assert (report.not_modelled == ()) is (known and name != "qwen3_vl_moe")
