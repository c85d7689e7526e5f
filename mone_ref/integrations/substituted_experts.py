"""A transformers experts module that holds retained experts only.

transformers keeps the experts of a layer in two stacked parameters and computes them
with functions of its own (eager, batched_mm, grouped_mm). ``substitute`` narrows both
stacks to the retained rows and rewrites the routes on their way in; the arithmetic
stays transformers'.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from mone_ref.config import LayerSubstitution

if TYPE_CHECKING:
    Base = nn.Module
else:
    Base = object

STACKS = ("gate_up_proj", "down_proj")
"""The parameters of an experts module: ``[R, 2I, H]``, gate above up, and ``[R, H, I]``."""

COMPUTE_SENTINEL = ("eager", "batched_mm")
"""Functions that clamp a row that no expert has to the last one, or cannot count it."""

EAGER_SKIPS_SENTINEL = Version("5.18")
"""First transformers whose eager loop skips such a row, as grouped_mm does."""


class SubstitutedExperts(Base):
    """Mixed into a model's own experts class by ``substitute``.

    ``num_experts`` is the number R of physical rows. ``constants`` ``[S, H]`` ascending by
    logical id. ``row_of`` and ``constant_of`` ``[E]`` take a logical id to its row or its
    constant; R and S stand for none.
    """

    config: Any
    num_experts: int
    eager_skips_sentinel: bool
    substitution: LayerSubstitution
    constants: nn.Parameter
    row_of: Tensor
    constant_of: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` and logical routes ``[T, K]`` -> retained sum + constant sum (SEM-1)."""
        rows = look_up(self.row_of, top_k_index, self.num_experts)  # [T, K]
        absent = rows == self.num_experts  # [T, K]
        weights = top_k_weights.masked_fill(absent, 0)  # [T, K]
        retained: Tensor = super().forward(hidden_states, self.served(rows, absent), weights)
        retained = retained.masked_fill(absent.all(dim=1, keepdim=True), 0)  # [T, H]
        constants = self.constant_sum(top_k_weights, top_k_index)  # [T, H]
        return (retained + constants).to(retained.dtype)

    def served(self, rows: Tensor, absent: Tensor) -> Tensor:
        """Rows ``[T, K]`` that a function of transformers may be asked for.

        The sentinel R stands for no expert and costs nothing where it is skipped. Elsewhere
        a zero-weight route goes to a row that its token needs anyway, so that no other row
        is multiplied by 0 (EXEC-3, SEM-5).
        """
        function = self.config._experts_implementation
        if function not in COMPUTE_SENTINEL or (function == "eager" and self.eager_skips_sentinel):
            return rows
        needed = rows.amin(dim=1, keepdim=True).clamp(max=self.num_experts - 1)  # [T, 1]
        return torch.where(absent, needed, rows)

    def constant_sum(self, weights: Tensor, ids: Tensor) -> Tensor:
        """Sum of ``w * v`` over substituted routes, ``[T, H]`` in float32 or wider (SEM-3).

        One route of every token at a time, element by element: no matrix unit may round it.
        """
        wide = torch.promote_types(
            torch.promote_types(weights.dtype, self.constants.dtype), torch.float32
        )
        none = len(self.substitution.substituted)
        places = look_up(self.constant_of, ids, none)  # [T, K]
        paid = weights.to(wide).masked_fill(places == none, 0)  # [T, K]
        places = places.masked_fill(places == none, 0)
        total = torch.zeros(len(ids), self.constants.shape[1], dtype=wide, device=ids.device)
        for slot in range(ids.shape[1]):
            values = self.constants[places[:, slot]]  # [T, H]
            total = total + paid[:, slot, None] * values
        return total


def look_up(table: Tensor, ids: Tensor, none: int) -> Tensor:
    """``table[ids]``, and ``none`` for ids outside ``[0, E)`` (SEM-8)."""
    outside = (ids < 0) | (ids >= len(table))
    return table[ids.clamp(0, len(table) - 1)].masked_fill(outside, none)


def substitute(module: Any, substitution: LayerSubstitution) -> None:
    """Narrow an experts module to its retained rows, in place; nothing is read or filled.

    New parameters are empty, on the device and in the dtype of the old ones (``meta``
    while transformers builds a model), and so are the tables: all are in ``state_dict``
    and wait to be loaded (``tables``).
    """
    rows, hidden = len(substitution.retained), module.down_proj.shape[1]
    for name in STACKS:
        old = getattr(module, name)
        setattr(module, name, nn.Parameter(old.new_empty(rows, *old.shape[1:])))
    module.constants = nn.Parameter(
        module.down_proj.new_empty(len(substitution.substituted), hidden)
    )
    for name, table in tables(substitution).items():
        module.register_buffer(name, torch.empty_like(table, device=module.down_proj.device))
    module.num_experts = rows
    module._is_expert_parallel = True  # makes grouped_mm expect the sentinel
    module.eager_skips_sentinel = Version(version("transformers")) >= EAGER_SKIPS_SENTINEL
    module.substitution = substitution
    module.__class__ = _mixed(module.__class__)


def tables(substitution: LayerSubstitution) -> dict[str, Tensor]:
    """``row_of`` and ``constant_of`` of a layer, ``[E]`` int64."""
    retained, substituted = substitution.retained, substitution.substituted
    rows = torch.full((substitution.num_logical,), len(retained))
    rows[list(retained)] = torch.arange(len(retained))
    constants = torch.full((substitution.num_logical,), len(substituted))
    constants[list(substituted)] = torch.arange(len(substituted))
    return {"row_of": rows, "constant_of": constants}


@cache
def _mixed(experts: type[Any]) -> type[Any]:
    """The experts class of a model with ``SubstitutedExperts`` before it."""
    return type(f"Substituted{experts.__name__}", (SubstitutedExperts, experts), {})
