"""What the name of a stored tensor says: layer, logical expert, and which part of it.

Names are matched whole, from the decoder stack on, so that a name of another stack
(``mtp.layers.0``, a vision tower) is never taken for one of the decoder's (LOAD-12).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from mone_ref.families import Family

INDEX = "(0|[1-9][0-9]{0,8})"  # canonical decimal, and short enough for any reader
GATE_UP = "gate_up_proj"  # gate and up projection in one tensor, in every family


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor below ``<stack>.<layer>.<experts>``.

    ``expert`` is a logical id, or None where the name has no index: a tensor of all
    experts. ``part`` is the rest of the name: ``up_proj.weight``, ``approx_value``.
    """

    family: Family
    name: str
    layer: int
    expert: int | None
    part: str

    @property
    def is_constant(self) -> bool:
        """Whether this is a constant of the approx form (FMT-5)."""
        return self.expert is not None and self.part == self.family.constant

    @property
    def is_fused(self) -> bool:
        """Whether the tensor holds several projections, or one of all experts (CAP-11)."""
        if self.expert is not None:
            return self.part.startswith(GATE_UP)
        return self.part.startswith((GATE_UP, *self.family.projections))


def expert_tensor(family: Family, name: str) -> ExpertTensor | None:
    """Read a name as one below a layer's experts; None for every other name."""
    match = _expert_pattern(family).fullmatch(name)
    if match is None:
        return None
    layer, expert, part = match.groups()
    return ExpertTensor(family, name, int(layer), None if expert is None else int(expert), part)


def layer_index(family: Family, name: str) -> int | None:
    """The decoder layer that a name belongs to; None outside the decoder stack."""
    match = _layer_pattern(family).match(name)
    return int(match[1]) if match else None


@cache
def _expert_pattern(family: Family) -> re.Pattern[str]:
    stack, experts = re.escape(family.stack), re.escape(family.experts)
    return re.compile(rf"{stack}\.{INDEX}\.{experts}\.(?:{INDEX}\.)?(.+)", re.ASCII | re.DOTALL)


@cache
def _layer_pattern(family: Family) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(family.stack)}\.{INDEX}\.", re.ASCII)
