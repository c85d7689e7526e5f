"""One MoE layer and what is handed to it, as a case writes it down: sizes and numbers, no bytes.

Values are written out, one number for every element (``fill``), or drawn from the integer
generator (``seed`` and ``exponent``: ``k * 2**exponent``, see ``generator.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from mone_ref.backend import LayerSpec
from mone_ref.families import OLMOE
from mone_ref.fill import generator

CALLS: dict[str, tuple[str, ...]] = {
    "forward": ("hidden_states", "router_logits"),
    "forward_routed": ("hidden_states", "topk_weights", "topk_ids"),
    "rewrite_routes": ("topk_weights", "topk_ids"),
    "expert_rows": (),
}
"""What each method of a ``LayerSession`` is given, in order."""

Values = Any
"""Nested lists of numbers, or one of the mappings that ``tensor`` reads."""


class LayerRecipeError(ValueError):
    """Values that do not fit the sizes of the layer."""


@dataclass(frozen=True)
class LayerRecipe:
    """One layer.

    ``substituted`` keeps the order of the config; ``others`` are the lists of other layers.
    ``tensors`` maps patterns for names below the experts' path to values; the first match
    counts. ``activation`` is the width of padded activations, 0 for none.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    substituted: tuple[int, ...]
    tensors: Mapping[str, Values]
    normalise: bool = False
    activation: int = 0
    index: int = 3
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Module path of the experts."""
        return OLMOE.experts_path(self.index)

    def spec(self, dtype: str, tp: tuple[int, int], reduced: bool) -> LayerSpec:
        """What an engine is told."""
        return LayerSpec(
            layer=self.index,
            path=self.path,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_logical_experts=self.experts,
            top_k=self.top_k,
            scoring=OLMOE.scoring,
            normalise=self.normalise,
            scaling_factor=1.0,
            scale_on_output=False,
            declared={self.index: self.substituted, **self.others},
            form="approx",
            dtype=dtype,
            device="auto",
            tp=tp,
            reduced=reduced,
            activation_size=self.activation,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer by its name below ``path``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(self.experts):
            if expert in self.substituted:
                shapes[f"{expert}.{OLMOE.constant}"] = (self.hidden,)
                continue
            shapes[f"{expert}.{OLMOE.gate}.weight"] = (self.intermediate, self.hidden)
            shapes[f"{expert}.{OLMOE.up}.weight"] = (self.intermediate, self.hidden)
            shapes[f"{expert}.{OLMOE.down}.weight"] = (self.hidden, self.intermediate)
        return shapes

    def build(self) -> dict[str, Tensor]:
        """Every tensor by its full name, in float32. Raises ``LayerRecipeError``."""
        built = {}
        for name, shape in self.shapes().items():
            given = [values for key, values in self.tensors.items() if fnmatchcase(name, key)]
            if not given:
                raise LayerRecipeError(f"no values for {name}")
            built[f"{self.path}.{name}"] = tensor(given[0], name, shape, torch.float32)
        return built

    def inputs(self, call: str, given: Mapping[str, Values], dtype: torch.dtype) -> list[Tensor]:
        """What ``call`` is given: activations and logits in ``dtype``, weights in float32.

        Raises ``LayerRecipeError``.
        """
        tokens = count_tokens(given)
        forms = {
            "hidden_states": ((tokens, self.hidden), dtype),
            "router_logits": ((tokens, self.experts), dtype),
            "topk_weights": ((tokens, self.top_k), torch.float32),
            "topk_ids": ((tokens, self.top_k), torch.int64),
        }
        return [tensor(given[name], name, *forms[name]) for name in CALLS[call]]


def count_tokens(given: Mapping[str, Values]) -> int:
    """``tokens`` where it is written, else the length of whatever is written out."""
    if "tokens" in given:
        return int(given["tokens"])
    for values in given.values():
        written = values.get("values") if isinstance(values, Mapping) else values
        if written is not None:
            return len(written)
    return 0


def tensor(values: Values, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of a shape. Raises ``LayerRecipeError`` when they have another one.

    ``{fill: x}``, ``{seed: n, exponent: e}``, ``{values: ..., dtype: d}`` or nested lists.
    """
    if isinstance(values, Mapping) and "dtype" in values:
        dtype = getattr(torch, values["dtype"])
        values = values["values"]
    if isinstance(values, Mapping) and "fill" in values:
        return torch.full(shape, values["fill"], dtype=torch.float64).to(dtype)
    if isinstance(values, Mapping):
        drawn = generator.uniform(values["seed"], name, shape, values["exponent"])
        return torch.from_numpy(drawn).to(dtype)
    made = written(values)
    if 0 in shape and made.numel() == 0:
        return made.reshape(shape).to(dtype)
    if made.shape != shape:
        raise LayerRecipeError(f"{name} has shape {list(made.shape)}, expected {list(shape)}")
    return made.to(dtype)


def written(values: Sequence[Any]) -> Tensor:
    """Numbers that are written out, in float64. Raises ``LayerRecipeError`` on ragged rows."""
    try:
        return torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise LayerRecipeError(" ".join(str(error).split())) from error
