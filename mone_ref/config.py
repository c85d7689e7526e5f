"""config.json -> what to build (``ModelConfig``) and what to substitute (``Substitution``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mone_ref.errors import Problem
from mone_ref.families import Family, RouterRule


@dataclass(frozen=True)
class LayerSubstitution:
    """Substituted experts of one MoE layer.

    ``listed`` keeps the order of the config; everything else is ascending
    (EXEC-2). ``constants`` maps each substituted id to the name of its tensor.
    """

    layer: int
    num_logical: int
    listed: tuple[int, ...]
    constants: Mapping[int, str]

    @property
    def substituted(self) -> tuple[int, ...]:
        """Substituted logical ids, ascending."""
        return tuple(sorted(self.listed))

    @property
    def retained(self) -> tuple[int, ...]:
        """Retained logical ids, ascending: position is the physical row (EXEC-2)."""
        return tuple(sorted(set(range(self.num_logical)) - set(self.listed)))


@dataclass(frozen=True)
class Substitution:
    """The whole declaration: layer index -> its substituted experts.

    Layers without substituted experts are absent. ``form`` is ``approx``, or
    ``none`` when nothing is substituted.
    """

    form: str
    layers: Mapping[int, LayerSubstitution]

    def layer(self, layer: int, num_logical: int) -> LayerSubstitution:
        """The entry of one MoE layer; a layer that is not listed retains every expert."""
        return self.layers.get(layer) or LayerSubstitution(layer, num_logical, (), {})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and readings of a decoder, resolved against its family's row."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    router: RouterRule
    rms_norm_eps: float
    rope_theta: float
    clip_qkv: float | None
    tie_word_embeddings: bool
    stored_dtype: str


@dataclass(frozen=True)
class Config:
    """A config that was read without an error. ``findings`` holds warnings and notes."""

    model: ModelConfig
    substitution: Substitution
    findings: tuple[Problem, ...]


def read(directory: Path) -> Config:
    """Read ``directory/config.json``; raises ``Rejected`` with every error in the file."""
    raise NotImplementedError
