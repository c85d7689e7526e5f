"""A whole decoder around the grouped MoE layer; the prompts of a batch share every product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mone_ref.backends import grouped_experts
from mone_ref.backends.grouped_experts import GroupedLayer
from mone_ref.experts import ExpertWeights
from mone_ref.loading import Model
from mone_ref.model import decoder
from mone_ref.model.attention import rms_norm
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import exact_products, product


class GroupedModel:
    """A loaded ``Model`` on a device, with its MoE layers grouped.

    ``model`` holds the same weights: what it updates is updated here.
    """

    def __init__(self, model: Model, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        weights = model.weights
        weights.embedding, weights.norm, weights.head = (
            moved(part, self.device) for part in (weights.embedding, weights.norm, weights.head)
        )
        self.moe: dict[int, GroupedLayer] = {}
        for index, layer in enumerate(weights.layers):
            weights.layers[index] = layer = moved(layer, self.device)
            if isinstance(layer.mlp, MoeLayer):
                self.moe[index] = grouped_experts.build(layer.mlp)
                layer.mlp = self.moe[index].layer  # the stacks replace what they were made from

    def score(
        self, prompts: Sequence[Sequence[int]], record: Record = decoder.ignore
    ) -> list[Tensor]:
        """Log-probabilities ``[T, V]`` in nats of the next token, for every prompt."""
        lengths = [len(prompt) for prompt in prompts]
        with torch.inference_mode(), exact_products(), self.device:  # the device of new tensors
            tokens = torch.tensor([token for prompt in prompts for token in prompt])  # [all T]
            logits = self.logits(tokens, lengths, record)  # [all T, V]
            logprobs = decoder.log_probabilities(logits, self.model.precision)
            return list(torch.split(logprobs.cpu(), lengths))

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants; all or nothing."""
        self.model.update(tensors)

    def reload(self, path: str | Path) -> None:
        """Refuse a layerwise reload (UPD-4)."""
        self.model.reload(path)

    def expert_rows(self) -> dict[int, int]:
        """Index of each MoE layer -> rows of its stacks (EXEC-1)."""
        return {index: len(layer.gate_up) for index, layer in self.moe.items()}

    def logits(self, tokens: Tensor, lengths: list[int], record: Record) -> Tensor:
        """``decoder.logits`` of prompts one after the other: ids ``[T]`` -> ``[T, V]``.

        Attention sees each prompt by itself; all else is row by row.
        """
        weights, config = self.model.weights, self.model.config.model
        precision, eps = self.model.precision, config.rms_norm_eps
        residual = functional.embedding(tokens, weights.embedding)  # [T, H]
        for index, layer in enumerate(weights.layers):
            x = rms_norm(residual, layer.attention_norm, eps, precision)  # [T, H]
            attended = [
                decoder.attend(part, layer.attention, config, precision)
                for part in torch.split(x, lengths)
            ]  # each [T of its prompt, H]
            residual = residual + torch.cat(attended)

            x = rms_norm(residual, layer.mlp_norm, eps, precision)  # [T, H]
            named = decoder.prefixed(record, f"layers.{index}.")
            if isinstance(layer.mlp, ExpertWeights):
                y = decoder.forward_mlp(x, layer.mlp, precision, named)  # [T, H]
            else:
                y = grouped_experts.forward(x, self.moe[index], precision, named)  # [T, H]
            residual = residual + y
        x = rms_norm(residual, weights.norm, eps, precision)  # [T, H]
        return product(x, weights.head, precision)  # [T, V]


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass of weights with all its tensors, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
