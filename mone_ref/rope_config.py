"""The rotary part of config.json: which part of a head is rotated, and by which angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mone_ref.errors import Code, show
from mone_ref.families import Family
from mone_ref.fields import Fields, Found, same
from mone_ref.strict_json import child

PLAIN: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "partial_rotary_factor": (1.0,),
}
"""Members of ``rope_parameters`` and ``rope_scaling``, with the values that change nothing."""


@dataclass(frozen=True)
class Yarn:
    """Angles stretched for a longer context: YaRN (arXiv 2309.00071), with DeepSeek's scales.

    ``original`` is the context length of pre-training. ``table_scale`` multiplies cosines and
    sines, ``score_scale`` attention scores.
    """

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    table_scale: float
    score_scale: float


@dataclass(frozen=True)
class Rope:
    """``size`` leading elements of a head are rotated, in pairs.

    Pairs are ``(i, i + size/2)``, or neighbours ``(2i, 2i + 1)`` where ``neighbours`` is set.
    """

    theta: float
    size: int
    neighbours: bool = False
    yarn: Yarn | None = None


def read(fields: Fields, family: Family, head_dim: int) -> Rope:
    """The rotary embedding of heads of ``head_dim``; problems go to ``fields``."""
    members = _members(fields)
    theta = fields.positive(fields.agree([*fields.find("rope_theta"), *members("rope_theta")]))
    size = _read_size(fields, family, members, head_dim)
    yarn = _read_yarn(fields, members) if "rope_scaling" in family.reads else None
    _check_plain(fields, family, members)
    neighbours = family.latent
    if "rope_interleave" in family.reads:
        neighbours = fields.flag("rope_interleave", True)
    return Rope(family.rope_theta_default if theta is None else theta, size, neighbours, yarn)


class _members:
    """Looks a member up in both blocks that may hold it."""

    def __init__(self, fields: Fields) -> None:
        self.blocks = []
        for block in fields.find("rope_parameters", "rope_scaling"):
            if isinstance(block.value, dict):
                self.blocks.append(block)
            else:
                fields.wrong(block, "a JSON object")

    def __call__(self, *keys: str) -> list[Found]:
        return [
            Found(child(block.path, key), block.value[key])
            for block in self.blocks
            for key in keys
            if block.value.get(key) is not None
        ]


def _read_size(fields: Fields, family: Family, members: _members, head_dim: int) -> int:
    """How much of a head is rotated: all, a factor of it, or ``rotary_dim`` elements."""
    if "partial_rotary_factor" not in family.reads:
        return head_dim
    named = fields.size("rotary_dim") if fields.find("rotary_dim") else None
    given = [*fields.find("partial_rotary_factor"), *members("partial_rotary_factor")]
    factor = fields.positive(fields.agree(given))
    if factor is None:
        factor = named / head_dim if named else float(family.defaults["partial_rotary_factor"])
    size = int(head_dim * factor)
    if named not in (None, size) or size % 2 or not 0 < size <= head_dim:
        where = (fields.find("rotary_dim") or given or [Found("$.partial_rotary_factor", None)])[0]
        expected = f"an even part of a head of {head_dim}"
        fields.report(Code.MODEL_FIELD, where.path, f"{named or size} elements", expected)
        return head_dim
    return size


def _check_plain(fields: Fields, family: Family, members: _members) -> None:
    """Refuse angles that are not computed here."""
    for key, plain in PLAIN.items():
        if key in family.reads:
            continue
        accepted = (*plain, "yarn") if "rope_scaling" in family.reads else plain
        for found in members(key):
            if not any(same(found.value, value) for value in accepted):
                expected = " or ".join(map(show, accepted))
                fields.limit(found, f"{expected}: other rotary embeddings are not computed")


def _read_yarn(fields: Fields, members: _members) -> Yarn | None:
    """The stretch, where the type says so."""
    if not any(found.value == "yarn" for found in members("rope_type", "type")):
        return None

    def number(key: str, default: float | None = None) -> float:
        found = fields.agree(members(key))
        if found is None and default is None:
            fields.report(Code.MODEL_FIELD, f"$.rope_scaling.{key}", "nothing", "a number")
        value = fields.positive(found)
        return value if value is not None else default or 1.0

    factor, all_dim = number("factor"), fields.agree(members("mscale_all_dim"))
    scores = log_scale(factor, number("mscale_all_dim")) if all_dim and all_dim.value else 1.0
    table = log_scale(factor, number("mscale", 1.0)) / scores
    return Yarn(
        factor=factor,
        original=int(number("original_max_position_embeddings")),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        table_scale=number("attention_factor", table),
        score_scale=scores**2,
    )


def log_scale(factor: float, weight: float) -> float:
    """How much attention sharpens for a context ``factor`` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
