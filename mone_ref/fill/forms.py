"""How a recipe declares its substitution, and under which names it stores the constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mone_ref import explicit
from mone_ref.declaration import APPROX
from mone_ref.fill.recipe import Recipe

Place = tuple[int, int]
"""(layer, logical expert)"""


def declaration(recipe: Recipe) -> Mapping[str, Any]:
    """The members of config.json that declare the substitution; none in a control."""
    if recipe.is_plain:
        return {}
    if recipe.form == "approx":
        return {APPROX: {layer: list(ids) for layer, ids in recipe.substitution.items()}}
    compression, transform, block = explicit.PATH
    return {compression: {transform: {block: _block(recipe)}}}


def _block(recipe: Recipe) -> dict[str, Any]:
    """The explicit form (FMT-6)."""
    names = constant_names(recipe)
    return {
        "version": explicit.VERSION,
        "router_semantics": explicit.ROUTER_SEMANTICS,
        "targets": {
            recipe.row.experts_path(int(layer)): {
                "num_logical_experts": recipe.num_experts,
                "weight_layout": explicit.WEIGHT_LAYOUT,
                "replacements": {
                    str(expert): {
                        "format": explicit.FORMAT,
                        "tensors": {"value": names[int(layer), expert]},
                    }
                    for expert in ids
                },
            }
            for layer, ids in recipe.substitution.items()
        },
    }


def constant_names(recipe: Recipe) -> dict[Place, str]:
    """The name under which each substituted expert finds its constant."""
    return {at: _name(recipe, source(recipe, at)) for at in places(recipe)}


def stored(recipe: Recipe) -> dict[str, Place]:
    """Name of each stored constant -> the place whose value it holds."""
    sources = {source(recipe, at): None for at in places(recipe)}  # ordered, each once
    return {_name(recipe, at): at for at in sources}


def source(recipe: Recipe, at: Place) -> Place:
    """The place whose constant is used at another one: the first of its group, or itself."""
    for group in recipe.shared_constants:
        members = [place(member) for member in group]
        if at in members:
            return members[0]
    return at


def _name(recipe: Recipe, at: Place) -> str:
    layer, expert = at
    if recipe.form == "approx":
        return recipe.row.constant_name(layer, expert)
    if recipe.constant_prefix:
        return f"{recipe.constant_prefix}.{layer}.{expert}"
    block = recipe.row.experts_path(layer).rpartition(".")[0]
    return f"{block}.expert_replacements.{expert}.value"


def places(recipe: Recipe) -> list[Place]:
    """Every substituted expert, in the order of the recipe."""
    return [(int(layer), expert) for layer, ids in recipe.substitution.items() for expert in ids]


def place(text: str) -> Place:
    """``1.5`` of a recipe: expert 5 of layer 1."""
    layer, expert = text.split(".")
    return int(layer), int(expert)
