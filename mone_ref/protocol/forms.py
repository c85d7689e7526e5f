"""The objects of the plug-in surface as parts of messages, and the names of tensors in files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from mone_ref.backend import Backend, BackendInfo, LayerSpec, LoadOptions, Scores
from mone_ref.protocol.failures import ProtocolError

Json = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

# -- what the engine is, what it is asked for


def info_to_json(info: BackendInfo) -> dict[str, Any]:
    """An engine's description of itself."""
    plain = {"compute": dict(info.compute), "components": dict(info.components)}
    lists = {
        "features": sorted(info.features),
        "workarounds": list(info.workarounds),
        "parallel": sorted(info.parallel),
    }
    return {"name": info.name, "version": info.version, "device": info.device, **plain, **lists}


def info_from_json(engine: Json) -> BackendInfo:
    """The same, read; only what has a default may lack."""
    return BackendInfo(
        name=engine["name"],
        version=engine["version"],
        device=engine["device"],
        compute=engine["compute"],
        features=frozenset(engine.get("features", ())),
        components=engine.get("components", {}),
        workarounds=tuple(engine.get("workarounds", ())),
        parallel=frozenset(engine.get("parallel", ())),
    )


FILES = ("error_map", "expectations")
"""Files that an adapter brings along, by absolute path."""


def files_to_json(backend: Backend) -> dict[str, str]:
    """The files of an adapter. Raises ``TypeError`` for what is no path."""
    found = {name: getattr(backend, name) for name in FILES}
    return {name: os.path.abspath(path) for name, path in found.items() if path is not None}


def options_to_json(options: LoadOptions) -> dict[str, Any]:
    """How a checkpoint is to be loaded."""
    plain = {"features": sorted(options.features), "engine_args": dict(options.engine_args)}
    return asdict(options) | plain


def options_from_json(options: Json) -> LoadOptions:
    """The same, read."""
    return LoadOptions(**{**options, "features": frozenset(options["features"])})


def layer_to_json(layer: LayerSpec) -> dict[str, Any]:
    """One MoE layer; layer indices become text, as JSON wants it."""
    declared = {str(index): list(ids) for index, ids in layer.declared.items()}
    groups = list(layer.groups) if layer.groups else None
    return asdict(layer) | {"declared": declared, "groups": groups, "tp": list(layer.tp)}


def layer_from_json(layer: Json) -> LayerSpec:
    """The same, read."""
    declared = {int(index): tuple(ids) for index, ids in layer["declared"].items()}
    groups = tuple(layer["groups"]) if layer["groups"] else None
    return LayerSpec(**{**layer, "declared": declared, "groups": groups, "tp": tuple(layer["tp"])})


# -- answers in tensor files


def scores_to_tensors(answers: Sequence[Scores]) -> dict[str, Tensor]:
    """``logprobs.0``, ``ids.0``, ``logprobs.1``, ...: one pair per prompt, ids where there are."""
    tensors = {}
    for index, scores in enumerate(answers):
        tensors[f"logprobs.{index}"] = scores.logprobs
        if scores.ids is not None:
            tensors[f"ids.{index}"] = scores.ids
    return tensors


def scores_from_tensors(tensors: Tensors, count: int) -> list[Scores]:
    """Scores of ``count`` prompts. Raises ``ProtocolError`` when there are others."""
    prompts = range(count)
    answered = sum(name.startswith("logprobs.") for name in tensors)
    if answered != count:
        raise ProtocolError(f"{answered} answers for {count} prompts")
    needed = {f"logprobs.{index}" for index in prompts}
    expect_names(tensors, needed, needed | {f"ids.{index}" for index in prompts})
    return [Scores(tensors[f"logprobs.{index}"], tensors.get(f"ids.{index}")) for index in prompts]


def traces_to_tensors(traces: Sequence[Tensors]) -> dict[str, Tensor]:
    """``0.layers.1.router_ids``: the prompt, then the name of the intermediate."""
    return {f"{i}.{name}": value for i, trace in enumerate(traces) for name, value in trace.items()}


def traces_from_tensors(tensors: Tensors, count: int) -> list[dict[str, Tensor]]:
    """Traces of ``count`` prompts. Raises ``ProtocolError`` for a name of none of them."""
    traces: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, value in tensors.items():
        prompt, _, name = key.partition(".")
        if not name or prompt not in map(str, range(count)):
            raise ProtocolError(f"tensor {key!r} belongs to none of {count} prompts")
        traces[int(prompt)][name] = value
    return traces


def expect_names(tensors: Tensors, needed: set[str], allowed: set[str]) -> None:
    """Raises ``ProtocolError`` for a tensor that lacks, or that nobody asked for."""
    missing, foreign = sorted(needed - tensors.keys()), sorted(tensors.keys() - allowed)
    if missing:
        raise ProtocolError(f"no tensor {missing[0]!r} in the answer")
    if foreign:
        raise ProtocolError(f"an unexpected tensor {foreign[0]!r} in the answer")


# -- calls of a layer

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "forward": ("hidden_states", "router_logits"),
    "forward_routed": ("hidden_states", "topk_weights", "topk_ids"),
    "rewrite_routes": ("topk_weights", "topk_ids"),
}
"""Tensors that a layer's call is given."""

RESULTS: dict[str, tuple[str, ...]] = {
    "forward": ("output",),
    "forward_routed": ("output",),
    "rewrite_routes": ("weights", "rows", "constants"),
}
"""Tensors that it answers with."""

CHANGED = "changed."
"""Before the name of an argument that the call changed in place: what it holds now."""
