"""What several rules ask of a config and a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from mone_ref import layout
from mone_ref.checkpoint import Checkpoint, TensorEntry, dtypes
from mone_ref.config import Config
from mone_ref.tensor_names import ExpertTensor, expert_tensor, layer_index

HEAD = "lm_head.weight"


def declaration_place(config: Config) -> str:
    """Where a config lists its substituted experts."""
    return "the targets" if config.substitution.form == "explicit" else "approximate_experts"


def stored_constants(config: Config, checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """Stored constants of listed experts, shared ones once."""
    for name in layout.constants(config):
        entry = checkpoint.tensors.get(name)
        if entry and not is_models_own(config, name):
            yield entry


def readable_constants(config: Config, checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """Those whose values mean something: of the right shape and a float type."""
    for entry in stored_constants(config, checkpoint):
        if entry.shape == (config.model.hidden_size,) and entry.dtype in dtypes.FLOATS:
            yield entry


def is_listed(config: Config, layer: int, expert: int | None) -> bool:
    """Whether the list names an expert of a layer."""
    entry = config.substitution.layers.get(layer)
    return entry is not None and expert in entry.constants


def is_built(config: Config, name: str) -> bool:
    """False only for names of the decoder stack past its last layer."""
    layer = layer_index(config.model.family, name)
    return layer is None or layer < config.model.num_layers


def expert_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[ExpertTensor]:
    """Tensors below the experts of the layers that are built, without declared constants."""
    declared = layout.constants(config)
    for name in checkpoint.tensors:
        if name in declared:
            continue
        tensor = expert_tensor(config.model.family, name)
        if tensor and tensor.layer < config.model.num_layers:
            yield tensor


def stray_constants(config: Config, checkpoint: Checkpoint) -> dict[tuple[int, int], str]:
    """(layer, expert) -> name of every constant by name that is not declared."""
    return {
        (tensor.layer, tensor.expert): tensor.name
        for tensor in expert_tensors(config, checkpoint)
        if tensor.is_constant and tensor.expert is not None
    }


def fused_layers(config: Config, checkpoint: Checkpoint) -> dict[int, list[str]]:
    """Layer -> its fused tensors; those of a substituted expert alone are leftovers."""
    fused: dict[int, list[str]] = defaultdict(list)
    for tensor in expert_tensors(config, checkpoint):
        if tensor.is_fused and not is_listed(config, tensor.layer, tensor.expert):
            fused[tensor.layer].append(tensor.name)
    return fused


def is_models_own(config: Config, name: str) -> bool:
    """Whether the model has a tensor of this name, in this configuration or its untied sibling."""
    return name == HEAD or name in layout.of_model(config)
