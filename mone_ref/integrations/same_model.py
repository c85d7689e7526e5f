"""One config, two readers: what was checked must be what transformers builds."""

from __future__ import annotations

from typing import Any

from mone_ref.config import ModelConfig
from mone_ref.errors import Code, Phase, Problem, Rejected, show
from mone_ref.families import QkNorm


def check(config: Any, model: ModelConfig) -> None:
    """Refuse a config that transformers reads as another model than the one that was checked.

    It knows fewer spellings, and fills what it does not find with defaults of its own.
    Raises ``Rejected`` (``CONFIG_MODEL``).
    """
    family = model.family
    read: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        family.intermediate_key: model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        family.count_keys[0]: model.num_experts,
        family.top_k_keys[0]: model.top_k,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    optional = {
        "head_dim": model.head_dim,
        "norm_topk_prob": model.router.normalise,
        "clip_qkv": model.clip_qkv,
        "routed_scaling_factor": model.router.scaling_factor,
        "shared_expert_intermediate_size": model.shared_intermediate_size,
        "n_shared_experts": model.shared_intermediate_size // model.intermediate_size,
        "use_qk_norm": model.qk_norm is QkNorm.HEAD,
        "rope_interleave": model.rope.neighbours,
        **_groups(model),
        family.attention_bias: model.attention_bias,
    }
    read |= {key: value for key, value in optional.items() if key in family.reads}
    found = {key: getattr(config, key, None) for key in read} | {
        "rope_theta": config.rope_parameters["rope_theta"]
    }
    if "head_dim" in found:
        found["head_dim"] = found["head_dim"] or config.hidden_size // config.num_attention_heads
    problems = [
        Problem(
            Code.MODEL_FIELD_CONFLICT,
            Phase.INIT,
            f"$.{key}",
            f"{show(found[key])} as transformers reads it",
            show(value),
        )
        for key, value in read.items()
        if found[key] != value
    ]
    if problems:
        raise Rejected(problems)


def _groups(model: ModelConfig) -> dict[str, Any]:
    """Groups as transformers has to read them; without any, what their keys say is not read."""
    groups = model.router.groups
    if groups is None:
        return {} if model.family.latent else {"n_group": 1}
    return {"n_group": groups.count, "topk_group": groups.chosen}
