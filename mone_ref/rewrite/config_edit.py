"""config.json of the output: the source's document with the fewest changes that make it true."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mone_ref import explicit
from mone_ref.declaration import APPROX
from mone_ref.dialects import INIT_TOKENS
from mone_ref.fields import TEXT_CONFIG
from mone_ref.rewrite.settings import COUNT_KEYS, MTP_KEYS, NOT_MODELS, TOP_K_KEYS

Document = dict[str, Any]


def encode(document: Mapping[str, Any]) -> bytes:
    """As text, keys in their order; a lone surrogate stays the escape that it was."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def with_counts(document: Mapping[str, Any], count: int, top_k: int | None) -> Document:
    """Another number of experts, and of routes, under every name and in every holder (E01-E03).

    A list with one number per layer stays a list, with 0 or null for layers without experts.
    ``top_k`` None leaves the routes alone.
    """

    def edit(holder: Document) -> None:
        for key in COUNT_KEYS:
            _replace(holder, key, count)
        if top_k is not None:
            for key in TOP_K_KEYS:
                _replace(holder, key, top_k)

    return _edited(document, edit)


def without_mtp(document: Mapping[str, Any]) -> Document:
    """No MTP layers, in every holder."""

    def edit(holder: Document) -> None:
        for key in MTP_KEYS:
            _replace(holder, key, 0)

    return _edited(document, edit)


def with_approx(document: Mapping[str, Any], listed: Mapping[int, tuple[int, ...]]) -> Document:
    """The approx form, in the text config where there is one, else at the top (FMT-2, R12)."""
    edited = copy.deepcopy(dict(document))
    text = edited.get(TEXT_CONFIG)
    holder = text if isinstance(text, dict) else edited
    holder[APPROX] = {str(layer): list(ids) for layer, ids in listed.items()}
    return edited


def with_explicit(
    document: Mapping[str, Any], targets: Mapping[str, tuple[int, Mapping[int, str]]]
) -> Document:
    """The explicit form at the top level (FMT-6, FMT-16).

    ``targets`` maps the path of a layer's experts to its logical experts and constant names.
    """
    edited = copy.deepcopy(dict(document))
    node = edited
    for key in explicit.PATH[:-1]:
        node[key] = dict(node[key]) if isinstance(node.get(key), dict) else {}
        node = node[key]
    node[explicit.PATH[-1]] = {
        "version": explicit.VERSION,
        "router_semantics": dict(explicit.ROUTER_SEMANTICS),
        "targets": {
            path: {
                "num_logical_experts": count,
                "weight_layout": explicit.WEIGHT_LAYOUT,
                "replacements": {
                    str(expert): {"format": explicit.FORMAT, "tensors": {"value": name}}
                    for expert, name in constants.items()
                },
            }
            for path, (count, constants) in targets.items()
        },
    }
    return edited


def without_declaration(document: Mapping[str, Any]) -> Document:
    """A config without either form, and without objects that held nothing else."""
    edited = copy.deepcopy(dict(document))
    for holder in (edited, edited.get(TEXT_CONFIG)):
        if isinstance(holder, dict):
            holder.pop(APPROX, None)
            holder.pop(INIT_TOKENS, None)
    _remove(edited, explicit.PATH)
    return edited


def _remove(holder: Document, path: Sequence[str]) -> None:
    """Remove the member at the end of a path, and every object on the way that is then empty."""
    key, *rest = path
    if not rest:
        holder.pop(key, None)
    elif isinstance(holder.get(key), dict) and holder[key]:
        _remove(holder[key], rest)
        if not holder[key]:
            del holder[key]


def _edited(document: Mapping[str, Any], edit: Callable[[Document], None]) -> Document:
    """A copy with every holder edited."""
    edited = copy.deepcopy(dict(document))
    waiting = [edited]
    while waiting:
        holder = waiting.pop()
        edit(holder)
        waiting += [
            value
            for key, value in holder.items()
            if isinstance(value, dict) and key not in NOT_MODELS
        ]
    return edited


def _replace(holder: Document, key: str, number: int) -> None:
    value = holder.get(key)
    if isinstance(value, list):
        holder[key] = [number if before else before for before in value]
    elif value is not None:
        holder[key] = number
