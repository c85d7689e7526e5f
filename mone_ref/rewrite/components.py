"""Which part of a model a tensor belongs to, and the bytes of each part."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mone_ref.checkpoint import TensorEntry
from mone_ref.rewrite import names
from mone_ref.rewrite.blueprint import OutputTensor
from mone_ref.rewrite.structure import MoeLayer, Structure
from mone_ref.rules.generic import CONSTANT


class Component(StrEnum):
    """Parts of a model, each tensor in exactly one; an MTP layer is one with all it holds."""

    EXPERTS = "experts"
    CONSTANTS = "constants"
    SHARED = "shared"
    ROUTER = "router"
    ATTENTION = "attention"
    EMBEDDINGS = "embeddings"
    MTP = "mtp"
    OTHER = "other"


class Classifier(dict[str, Component]):
    """Name -> component of a tensor, in a checkpoint or in what is made of it.

    Each name is looked at once: a model has 10^5, and most of those of an output are the source's.
    """

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self._structure = structure
        self._known: dict[str, Component] = {}
        for layer in structure.layers:
            self._known.update((entry.name, Component.SHARED) for entry in layer.shared)
            self._known.update((entry.name, Component.ROUTER) for entry in layer.row_tensors)
            self._known.update((entry.name, Component.EXPERTS) for entry in layer.fused)
        if structure.config is not None:
            for one in structure.config.substitution.layers.values():
                self._known.update((name, Component.CONSTANTS) for name in one.constants.values())
        self._blocks: dict[str, bool] = {}  # block of experts -> whether it is of an MTP layer
        for layer in structure.layers:
            self._add_experts(layer)

    def _add_experts(self, layer: MoeLayer) -> None:
        """Nearly all names, known without looking; a constant may be named like one of them."""
        is_mtp = self._structure.is_mtp(f"{layer.block}.")
        experts = [entry.name for stored in layer.experts.values() for entry in stored]
        self.update(dict.fromkeys(experts, Component.MTP if is_mtp else Component.EXPERTS))
        for name in self._known.keys() & experts:
            del self[name]

    def __missing__(self, name: str) -> Component:
        self[name] = component = self._component(name)
        return component

    def _component(self, name: str) -> Component:
        parts = names.split(name)
        if self._is_mtp(name, parts[0] if parts else name):
            return Component.MTP
        if name in self._known:
            return self._known[name]
        if names.REPLACEMENT.search(name):
            return Component.CONSTANTS
        if parts:
            is_constant = name.endswith(f".{CONSTANT}")
            return Component.CONSTANTS if is_constant else Component.EXPERTS
        if names.ATTENTION.search(name):
            return Component.ATTENTION
        if names.EMBEDDINGS.search(name) or names.HEAD.search(name):
            return Component.EMBEDDINGS
        return Component.OTHER

    def _is_mtp(self, name: str, block: str) -> bool:
        """As the structure says; asked once per block, since a model has 10^5 expert tensors."""
        if block not in self._blocks:
            self._blocks[block] = self._structure.is_mtp(name)
        return self._blocks[block]


def sizes(known: Classifier, tensors: Iterable[TensorEntry | OutputTensor]) -> dict[str, int]:
    """Component -> bytes of tensors; parts without bytes are 0."""
    total = {str(component): 0 for component in Component}
    for tensor in tensors:
        total[known[tensor.name]] += tensor.size
    return total
