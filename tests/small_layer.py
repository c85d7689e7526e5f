"""One MoE layer as a backend is asked to build it: its spec, and tensors from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from mone_ref.backend import LayerSpec

PATH = "model.layers.3.mlp.experts"


def spec(**changes: object) -> LayerSpec:
    """Six experts of which two are substituted; sizes that no kernel likes."""
    fields: dict[str, object] = {
        "layer": 3,
        "path": PATH,
        "hidden_size": 7,
        "intermediate_size": 5,
        "num_logical_experts": 6,
        "top_k": 2,
        "scoring": "softmax",
        "normalise": False,
        "scaling_factor": 1.0,
        "scale_on_output": False,
        "declared": {1: (0,), 3: (4, 1)},
        "form": "approx",
        "dtype": "float32",
        "device": "cpu",
    }
    return LayerSpec(**(fields | changes))  # type: ignore[arg-type]


def tensors(asked: LayerSpec, seed: int | torch.Generator = 3) -> dict[str, Tensor]:
    """Weights or a constant for every expert, as an OLMoE checkpoint names them."""
    seeded = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    hidden, inner = asked.hidden_size, asked.intermediate_size
    named: dict[str, Tensor] = {}
    for expert in range(asked.num_logical_experts):
        path = f"{asked.path}.{expert}"
        if expert in asked.declared[asked.layer]:
            named[f"{path}.approx_value"] = torch.randn(hidden, generator=seeded)
            continue
        named[f"{path}.gate_proj.weight"] = torch.randn(inner, hidden, generator=seeded)
        named[f"{path}.up_proj.weight"] = torch.randn(inner, hidden, generator=seeded)
        named[f"{path}.down_proj.weight"] = torch.randn(hidden, inner, generator=seeded)
    return named
