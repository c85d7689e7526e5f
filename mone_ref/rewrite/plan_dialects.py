"""Plans and keep lists of other tools, as documents of ``plan.schema.json``.

Only where the file alone says what it means: a shape that needs a guess is refused. All of
them prune, except the list of mode-pd, which names the experts that constants replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = 1


class Unread(ValueError):
    """A document that is no plan of any known shape; the message says what was found."""


def to_document(value: Any) -> Any:
    """The document itself, or the one that a plan of another tool stands for.

    Raises ``Unread`` for a known shape with parts that cannot be meant.
    """
    if isinstance(value, list):
        raise Unread("a list: an order of experts needs a count, see 'mone-ref plan from-scores'")
    if not isinstance(value, dict):
        return value
    if "layer_keep_ids" in value:
        return _moe_watcher(value)
    if "approximate_experts" in value:
        return _mode_pd(value)
    if "keep" in value and "layers" in value:
        return _mtplx(value)
    return value


def _moe_watcher(value: Mapping[str, Any]) -> dict[str, Any]:
    """MoE-Watcher: one list per layer, by position; top-k beside it."""
    document = _prune(_by_position(value["layer_keep_ids"], "layer_keep_ids"))
    if value.get("target_topk") is not None:
        document["top_k"] = value["target_topk"]
    named = [str(value[key]) for key in ("strategy", "score", "notes") if value.get(key)]
    return {**document, "provenance": "; ".join(["a plan of MoE-Watcher", *named])}


def _mtplx(value: Mapping[str, Any]) -> dict[str, Any]:
    """MTPLX: ``{k, layers, keep, mtp_keep}``; ``k`` is how many experts each layer keeps."""
    layers, keep = value["layers"], value["keep"]
    if isinstance(keep, dict):
        document = _prune({str(key): ids for key, ids in keep.items()})
    elif isinstance(layers, list) and isinstance(keep, list) and len(layers) == len(keep):
        named = [str(layer) for layer in layers]
        if len(set(named)) < len(named):
            raise Unread("a layer that stands in layers twice")
        document = _prune(dict(zip(named, keep, strict=True)))
    else:
        document = _prune(_by_position(keep, "keep"))
    if any(isinstance(ids, list) and len(ids) != value.get("k") for ids in _lists(document)):
        raise Unread("lists of another length than k")
    if value.get("mtp_keep") is not None:
        raise Unread("mtp_keep, which does not name its layer: write a plan of version 1")
    return {**document, "provenance": "a keep list of MTPLX"}


def _mode_pd(value: Mapping[str, Any]) -> dict[str, Any]:
    """The list in a config of mode-pd: layer -> experts that constants replace."""
    listed = value["approximate_experts"]
    if not isinstance(listed, dict):
        raise Unread("approximate_experts that is no object")
    layers = {str(key): {"substitute": ids} for key, ids in listed.items() if ids != []}
    provenance = "an approximate_experts list"
    document = {"version": VERSION, "kind": "substitute", "layers": layers}
    constants = {"constants": value["constants"]} if "constants" in value else {}
    return {**document, **constants, "provenance": provenance}


def _prune(layers: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: {"keep": ids} for key, ids in layers.items()}
    return {"version": VERSION, "kind": "prune", "layers": kept}


def _by_position(value: Any, key: str) -> dict[str, Any]:
    """Lists by position; null and the empty list stand for a layer without experts."""
    if isinstance(value, dict):
        return {str(layer): ids for layer, ids in value.items()}
    if not isinstance(value, list):
        raise Unread(f"{key} that is neither an array nor an object")
    return {str(layer): ids for layer, ids in enumerate(value) if ids not in (None, [])}


def _lists(document: Mapping[str, Any]) -> list[Any]:
    return [layer["keep"] for layer in document["layers"].values()]
