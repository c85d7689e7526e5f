"""A second reading of substitution in transformers, wired as plainly as possible.

Nothing here is imported from mone_ref: the config is read as JSON, the list of
substituted experts and the names of tensors are worked out again. Every logical expert
is a module of its own, the substituted ones return their constant, and a layer is one
loop over all of them. Router and attention are transformers'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

# model type -> gate, up and down projection, and the block's name on disk and in the model
STORED = {
    **dict.fromkeys(
        ("olmoe", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"),
        ("gate_proj", "up_proj", "down_proj", "mlp"),
    ),
    **dict.fromkeys(("mixtral", "minimax_m2"), ("w1", "w3", "w2", "block_sparse_moe")),
}


class Constant(nn.Module):
    """A substituted expert: the same vector for every token."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), -1)


class Mlp(nn.Module):
    """A retained expert, from its three matrices."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(weight) for weight in (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(nn.functional.silu(linear(x, self.gate)) * linear(x, self.up), self.down)


class EveryExpert(nn.Module):
    """All logical experts of a layer, in the place of transformers' stacked ones."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32)
        for expert, module in enumerate(self.experts):
            for slot in range(ids.shape[1]):
                chosen = ids[:, slot] == expert
                y[chosen] += weights[chosen, slot, None].float() * module(x[chosen]).float()
        return y.to(x.dtype)


def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """A model with a full set of experts, all its tensors taken from the checkpoint."""
    document = json.loads((checkpoint / "config.json").read_text())
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith(f"model.layers.{document['num_hidden_layers']}.")  # an MTP layer
    }
    gate, up, down, block = STORED[document["model_type"]]
    config = AutoConfig.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    constants = constant_names(document, block)
    taken: set[str] = set(constants.values())
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):  # a dense layer
            continue
        experts: list[nn.Module] = []
        for expert in range(count(document)):
            path = f"model.layers.{index}.{block}.experts.{expert}"
            if (index, expert) in constants:
                experts.append(Constant(tensors[constants[index, expert]]))
                continue
            names = [f"{path}.{part}.weight" for part in (gate, up, down)]
            taken.update(names)
            experts.append(Mlp(*(tensors[name] for name in names)))
        layer.mlp.experts = EveryExpert(experts)
    rest = {
        name.replace(f".{block}.", ".mlp."): tensor
        for name, tensor in tensors.items()
        if name not in taken
    }
    lacking, unknown = model.load_state_dict(rest, strict=False, assign=True)
    model.tie_weights()  # a head that is tied was the embedding before it was assigned
    assert not unknown
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()  # is the embedding
    assert all(".mlp.experts." in name or name in tied for name in lacking)
    return model.eval()


def count(document: dict[str, Any]) -> int:
    """Number of logical experts."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(document[key] for key in keys if key in document)


def constant_names(document: dict[str, Any], block: str) -> dict[tuple[int, int], str]:
    """(layer, expert) -> the tensor that replaces it, from either form."""
    named = {
        (int(layer), expert): f"model.layers.{layer}.{block}.experts.{expert}.approx_value"
        for layer, ids in document.get("approximate_experts", {}).items()
        for expert in ids
    }
    transforms = document.get("compression_config", {}).get("transform_config", {})
    for path, target in transforms.get("expert_substitution", {}).get("targets", {}).items():
        layer = next(int(part) for part in path.split(".") if part.isdigit())
        for expert, replacement in target["replacements"].items():
            named[layer, int(expert)] = replacement["tensors"]["value"]
    return named


def score(model: Any, ids: list[int]) -> Tensor:
    """Log-probabilities ``[T, V]`` of the next token, in float32."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)
