"""Architectures that vLLM 0.33 cannot run here, substituted or not, and what others need.

Known before vLLM is asked, from config.json alone. What is not listed is vLLM's to say.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mone_ref.backends import architectures

LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MULTIMODAL = "Qwen3VLMoeForConditionalGeneration"
CPU_LATENT_SIZE = 576
"""Width of what the CPU kernels of latent attention cache per token: 512 + 64."""
AMX_FEATURES = 32
"""Input features of a weight that is packed for AMX are a multiple of this."""


def unavailable(checkpoint: Path, dtype: str, cuda: bool) -> str:
    """Why this checkpoint's architecture has no way to run here; empty where it may have."""
    document = architectures.read(checkpoint)
    named = architectures.named(document)
    if MULTIMODAL in named and find_spec("torchvision") is None:
        return "vLLM imports torchvision for Qwen3-VL, and it is not installed"
    if cuda:
        return ""
    if "MiniMaxM2ForCausalLM" in named:
        return "vLLM's CPU router has no sigmoid without groups, which MiniMax-M2 needs"
    latent = set(LATENT) & set(named)
    size = cached_size(document)
    if latent and size not in (0, CPU_LATENT_SIZE):
        return f"vLLM's CPU kernels of latent attention hold {CPU_LATENT_SIZE} elements, not {size}"
    return latent_on_amx(document, dtype) if latent and has_amx() else ""


def latent_on_amx(document: dict[str, Any], dtype: str) -> str:
    """What the AMX kernels of latent attention cannot do.

    Measured on plain models: float32 is refused ("expect weight to be bfloat16, float16, ..."),
    float16 is 3 nats off, and a head of 16 is refused ("invalid weight input features 16").
    """
    if dtype != "bfloat16":
        return f"vLLM's AMX kernels of latent attention have no right answers in {dtype}"
    plain = document.get("qk_nope_head_dim")
    if isinstance(plain, int) and plain % AMX_FEATURES:
        return f"vLLM's AMX kernels take no {plain} input features, which this latent attention has"
    return ""


def has_amx() -> bool:
    """Whether vLLM packs weights for AMX on this CPU."""
    return bool(torch.cpu._is_amx_tile_supported())


def arguments(checkpoint: Path) -> dict[str, Any]:
    """Engine arguments without which this checkpoint's architecture does not start."""
    if MULTIMODAL in architectures.named(architectures.read(checkpoint)):
        return {"language_model_only": True}  # its processor of images wants a tokenizer
    return {}


def cached_size(document: dict[str, Any]) -> int:
    """Elements that latent attention caches per token; 0 where the config does not say."""
    sizes = [document.get(key) for key in ("kv_lora_rank", "qk_rope_head_dim")]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) if len(known) == len(sizes) else 0
