"""Tensors of a checkpoint under the names of a model's parameters, and back.

transformers indexes every value of a state dict with ``[...]`` at the moment it wants
the tensor, which is how it reads safetensors slices. ``Rows`` answers the same way with
a whole stack, each part read from the file straight into its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mone_ref import layout
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import Config, LayerSubstitution
from mone_ref.errors import show
from mone_ref.integrations import substituted_experts


class Shards:
    """The weight files of a checked checkpoint, each opened once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._open = cache(self._open_shard)

    def slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        return self._shard(name).get_slice(name)

    def read(self, name: str) -> Tensor:
        """A tensor as stored; on the CPU a view of the mapped file."""
        tensor: Tensor = self._shard(name).get_tensor(name)
        return tensor

    def _shard(self, name: str) -> Any:
        return self._open(self.checkpoint.tensors[name].file)

    def _open_shard(self, file: str) -> Any:
        return safe_open(self.checkpoint.directory / file, framework="pt")


class Rows:
    """Rows of one stacked parameter, each made of the named tensors one below the other."""

    def __init__(
        self,
        shards: Shards,
        names: Sequence[Sequence[str]],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.shards = shards
        self.names = names
        self.shape = (len(names), *row_shape)
        self.dtype = dtype

    def __getitem__(self, key: EllipsisType) -> Tensor:
        """The whole stack, in the dtype of the model."""
        stack = torch.empty(self.shape, dtype=self.dtype)
        for row, names in zip(stack, self.names, strict=True):
            for place, name in zip(row.chunk(len(names)), names, strict=True):
                place.copy_(self.shards.read(name))
        return stack


def parameters(config: Config, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """What a model with substituted experts loads: parameter names -> values to index.

    Exactly the tensors that the config calls for: a leftover expert (LOAD-2) or a constant
    of a layer that is not built (LOAD-4) is never read.
    """
    shards, family = Shards(checkpoint), config.model.family
    below_experts = tuple(f"{family.experts_path(layer)}." for layer in config.model.moe_layers)
    values = {
        name: shards.slice(name)
        for name in layout.of_model(config)
        if not name.startswith(below_experts)
    }
    for layer in config.model.moe_layers:
        substitution = config.substitution.layer(layer, config.model.num_experts)
        values |= _experts(config, shards, substitution, dtype)
    return values


def _experts(
    config: Config, shards: Shards, layer: LayerSubstitution, dtype: torch.dtype
) -> dict[str, Any]:
    """Parameters and tables of one layer's experts; each row by logical id (LOAD-1, EXEC-2)."""
    model, family = config.model, config.model.family
    hidden, inner = model.hidden_size, model.intermediate_size

    def names(*projections: str) -> list[list[str]]:
        return [
            [family.projection_name(layer.layer, expert, part) for part in projections]
            for expert in layer.retained
        ]

    gate_up, down = substituted_experts.STACKS
    values: dict[str, Any] = {
        gate_up: Rows(shards, names(family.gate, family.up), (2 * inner, hidden), dtype),
        down: Rows(shards, names(family.down), (hidden, inner), dtype),
    }
    if layer.substituted:
        constants = [[layer.constants[expert]] for expert in layer.substituted]
        values["constants"] = Rows(shards, constants, (hidden,), dtype)
        values |= substituted_experts.tables(layer)
    return {f"{family.experts_path(layer.layer)}.{name}": value for name, value in values.items()}


def stored(
    config: Config, paths: Mapping[int, str], state_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of ``parameters``: the state dict of a model -> tensors of its checkpoint.

    ``paths`` are the experts modules of the model by layer. Nothing is copied: an expert's
    matrices are views of its rows. Raises ``ValueError`` when a constant that experts share
    has become several.
    """
    tensors = dict(state_dict)
    constants: dict[str, Tensor] = {}
    for layer, path in paths.items():
        substitution = config.substitution.layer(layer, config.model.num_experts)
        below = f"{path}."
        stacks = {
            name.removeprefix(below): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(below)
        }
        tensors |= _unstacked(config, substitution, stacks)
        for place, expert in enumerate(substitution.substituted):
            name, value = substitution.constants[expert], stacks["constants"][place]
            if not torch.equal(constants.setdefault(name, value), value):
                raise ValueError(f"experts no longer share one constant {show(name)}")
        block, _, _ = path.rpartition(".")
        stored_block, _, _ = config.model.family.experts_path(layer).rpartition(".")
        for name in [name for name in tensors if name.startswith(f"{block}.")]:
            tensors[stored_block + name.removeprefix(block)] = tensors.pop(name)
    return tensors | constants


def _unstacked(
    config: Config, layer: LayerSubstitution, stacks: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """One layer's retained experts under their logical names."""
    family = config.model.family
    gate_up, down = (stacks[name] for name in substituted_experts.STACKS)
    for row, expert in enumerate(layer.retained):
        gate, up = gate_up[row].chunk(2)  # [I, H], [I, H]
        for projection, tensor in zip(family.projections, (gate, up, down[row]), strict=True):
            yield family.projection_name(layer.layer, expert, projection), tensor
