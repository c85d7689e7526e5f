"""Which experts are substituted, by which tensors: both forms, read strictly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from toy_engine.checkpoint import BadCheckpoint

Constants = dict[int, dict[int, str]]
"""Layer index -> expert id -> name of the tensor with the constant."""

NUMBER = re.compile(r"0|[1-9][0-9]*")
SEMANTICS = {
    "preserve_logical_expert_ids": True,
    "preserve_router_weights": True,
    "renormalize_after_substitution": False,
}


def read(config: Mapping[str, Any], experts: int, paths: Mapping[int, str]) -> Constants:
    """The declaration of a config; ``paths`` are the module paths of the layers with experts."""
    transform = (config.get("compression_config") or {}).get("transform_config") or {}
    block, listed = transform.get("expert_substitution"), config.get("approximate_experts")
    if {"mone", "transform_config", "expert_substitution"} & config.keys():
        refuse("a declaration stands where it is not read")
    if block is not None and listed is not None:
        refuse("both forms are present")
    if block is not None:
        return explicit(block, experts, paths)
    if listed is not None and not isinstance(listed, dict):
        refuse("approximate_experts is no object")
    found: Constants = {}
    for key, ids in (listed or {}).items():
        path = path_of(number(key), paths)
        found[number(key)] = {id: f"{path}.{id}.approx_value" for id in approx(ids, experts)}
    for key, tokens in (config.get("approximate_expert_init_tokens") or {}).items():
        if any(tokens) or len(tokens) != len(found.get(int(key), ())):
            refuse("constants that change while the model runs")
    return found


def approx(ids: Any, experts: int) -> list[int]:
    """One entry of the approx form."""
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(expert) is int for expert in ids):
        refuse(f"{ids!r} is no list of expert ids")
    return retained(ids, experts)


def explicit(block: Any, experts: int, paths: Mapping[int, str]) -> Constants:
    """The explicit form."""
    if not isinstance(block, dict) or repr(block.get("version")) != "1":
        refuse("version is not 1")
    if block.get("router_semantics") != SEMANTICS or any(
        type(value) is not bool for value in block["router_semantics"].values()
    ):
        refuse("router_semantics is another rule")
    layers = {
        name: layer
        for layer, path in paths.items()
        for name in (path, path.removeprefix("model."), f"language_model.{path}")
    }
    found: Constants = {}
    for path, target in held(block, "targets").items():
        if path not in layers or layers[path] in found:
            refuse(f"target {path!r} is no layer with experts, or stands twice")
        if target.get("num_logical_experts") != experts:
            refuse(f"num_logical_experts is not {experts}")
        if target.get("weight_layout") != "compact_retained_experts":
            refuse("weight_layout is another one")
        names = {number(key): value(entry) for key, entry in held(target, "replacements").items()}
        retained(list(names), experts)
        found[layers[path]] = names
    return found


def held(block: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A member that has to be an object, of objects."""
    member = block.get(key)
    if not isinstance(member, dict) or not all(isinstance(one, dict) for one in member.values()):
        refuse(f"{key} is no object")
    return member


def value(entry: Mapping[str, Any]) -> str:
    """The tensor of one replacement."""
    tensors = entry.get("tensors")
    name = tensors.get("value") if isinstance(tensors, dict) else None
    if entry.get("format") != "constant-v1" or not isinstance(name, str):
        refuse("a replacement is no constant")
    return name


def number(key: str) -> int:
    """A canonical decimal key."""
    if not NUMBER.fullmatch(key):
        refuse(f"{key!r} is no number")
    return int(key)


def path_of(layer: int, paths: Mapping[int, str]) -> str:
    """The module path of a listed layer."""
    if layer not in paths:
        refuse(f"layer {layer} has no experts")
    return paths[layer]


def retained(ids: list[int], experts: int) -> list[int]:
    """Ids in range that leave an expert over. One that stands twice counts once."""
    if not all(0 <= expert < experts for expert in ids):
        refuse(f"{ids} are not all below {experts}")
    if len(set(ids)) == experts:
        refuse("no expert is retained")
    return ids


def refuse(message: str) -> NoReturn:
    """Raises ``BadCheckpoint``."""
    raise BadCheckpoint("substitution", message)
