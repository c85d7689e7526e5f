"""The dialect of mode-pd: the approx form under custom classes, for which stock names stand in.

Its checkpoints have the tensors of the approx form. Only config.json keeps engines from loading
them: a model type of its own, and a custom class in place of the stock architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mone_ref import families
from mone_ref.errors import Code, Phase, Problem, show
from mone_ref.fields import ROOT
from mone_ref.rewrite.config_edit import Document
from mone_ref.strict_json import child

SUFFIX = "_compressed"
"""Its model types are the stock ones with this ending: ``olmoe_compressed``."""

ARCHITECTURES = {"OlmoneForCausalLM": "olmoe"}
"""Custom class -> stock model type; the other families kept the names of their classes."""

CODE = ".py"
"""Ending of files with the custom classes."""


def model_type(document: Mapping[str, Any]) -> str | None:
    """The stock model type of a config in this dialect; None for every other config."""
    written = document.get("model_type")
    if isinstance(written, str) and written.endswith(SUFFIX):
        return written.removesuffix(SUFFIX)
    named = document.get("architectures")
    custom = [name for name in ARCHITECTURES if isinstance(named, list) and name in named]
    return ARCHITECTURES[custom[0]] if custom else None


def unknown(document: Mapping[str, Any]) -> list[Problem]:
    """A model of this dialect of which the stock architecture is not known."""
    base = model_type(document)
    if base is None or families.find([], base):
        return []
    known = ", ".join(f"{name}{SUFFIX}" for row in families.FAMILIES for name in row.model_types)
    found = f"the dialect of mode-pd with {show(document.get('model_type'))}"
    where = child(ROOT, "model_type")
    return [Problem(Code.DIALECT, Phase.PARSE, where, found, f"one of {known}", clause="FMT-26")]


def stock(document: Mapping[str, Any]) -> Document:
    """The config with the names of the stock model, and without ``auto_map``.

    A config that is not in this dialect stays as it is.
    """
    base = model_type(document)
    family = families.find([], base)
    if base is None or family is None:
        return dict(document)
    names = {"architectures": list(family.architectures), "model_type": base}
    kept = {key: value for key, value in document.items() if key != "auto_map"}
    return {**kept, **names}
