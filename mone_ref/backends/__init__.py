"""Engines that can be judged: built in, installed by others, or named by their class."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points

from mone_ref.backend import Backend
from mone_ref.errors import show

GROUP = "mone_ref.backends"
BUILT_IN = {
    "reference": "mone_ref.backends.reference:ReferenceBackend",
    "transformers": "mone_ref.backends.transformers:TransformersBackend",
    "vllm": "mone_ref.backends.vllm:VllmBackend",
}


class BackendError(ValueError):
    """A backend that cannot be found, imported or made."""


def find(name: str) -> Backend:
    """The backend called ``name``: built in, an entry point, or ``module:Class``.

    Modules are also found in the current directory, where an engine's own repository
    keeps its adapter. Raises ``BackendError``.
    """
    target = targets().get(name, name)
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        known = ", ".join(sorted(targets()))
        raise BackendError(f"no backend {show(name)}: known are {known}, or name a module:Class")
    if target == name and "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = EntryPoint(name, target, GROUP).load()()
    except Exception as error:
        raise BackendError(f"backend {name} cannot be made: {reason(error)}") from error
    if not isinstance(made, Backend):
        raise BackendError(f"{target} makes no mone_ref.backend.Backend but {type(made).__name__}")
    return made


def targets() -> dict[str, str]:
    """Every known name and its ``module:Class``; built-in names cannot be taken over."""
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    return found | BUILT_IN


def reason(error: Exception) -> str:
    """Why an import or a constructor failed, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
