"""Engines that can be judged: built in, installed by others, or named by their class."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from mone_ref.backend import Backend
from mone_ref.errors import show

if TYPE_CHECKING:
    from mone_ref.suite.run import Settings

GROUP = "mone_ref.backends"
DEFAULT = "reference"
BUILT_IN = {
    "grouped": "mone_ref.backends.grouped:GroupedBackend",
    "reference": "mone_ref.backends.reference:ReferenceBackend",
    "server": "mone_ref.backends.server:ServerBackend",
    "transformers": "mone_ref.backends.transformers:TransformersBackend",
    "vllm": "mone_ref.backends.vllm:VllmBackend",
}


class BackendError(ValueError):
    """A backend that cannot be found, imported or made."""


def chosen(settings: Settings) -> Backend:
    """The backend of a run. Raises ``BackendError``, ``OptionError``."""
    check_alone(settings)
    if settings.backend_cmd or settings.isolate:
        from mone_ref.backends import process

        if settings.isolate:
            return process.isolated(settings.backend, settings.call_limit)
        return process.commanded(settings.backend_cmd, settings.call_limit)
    if not settings.serve_cmd:
        return find(settings.backend)
    if settings.backend != "server":
        raise BackendError(f"--serve-cmd is for --backend=server, not {show(settings.backend)}")
    from mone_ref.backends.server import ServerBackend

    return ServerBackend(settings.serve_cmd, settings.engine_args, settings.call_limit)


def check_alone(settings: Settings) -> None:
    """A command is an engine of its own, in a process already. Raises ``BackendError``."""
    given = {
        "--backend-cmd": settings.backend_cmd,
        "--serve-cmd": settings.serve_cmd,
        "--isolate": settings.isolate,
        "--backend": settings.backend if settings.backend_cmd else "",
    }
    flags = [flag for flag, value in given.items() if value]
    if len(flags) > 1:
        raise BackendError(f"{flags[0]} and {flags[1]} exclude each other")
    if settings.isolate and settings.backend == "server":
        raise BackendError("--isolate: a server runs in a process of its own already")


def find(name: str) -> Backend:
    """The backend called ``name``: built in, an entry point, or ``module:Class``.

    Modules are also found in the current directory, where an engine's own repository
    keeps its adapter. Raises ``BackendError``.
    """
    target = targets().get(name, name)
    module, _, attribute = target.partition(":")
    if target != name and not (module and attribute):
        raise BackendError(f"backend {name}: its entry point is {show(target)}, not module:Class")
    if not module or not attribute:
        known = ", ".join(sorted(targets()))
        raise BackendError(f"no backend {show(name)}: known are {known}, or name a module:Class")
    if target == name and "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = EntryPoint(name, target, GROUP).load()()
    except (Exception, SystemExit) as error:
        raise BackendError(f"backend {name} cannot be made: {reason(error)}") from error
    if not isinstance(made, Backend):
        raise BackendError(f"{target} makes no mone_ref.backend.Backend but {type(made).__name__}")
    return made


def targets() -> dict[str, str]:
    """Every known name and its ``module:Class``; built-in names cannot be taken over.

    Raises ``BackendError`` when two packages give one name to different classes.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            both = f"{found[point.name]} and {point.value}"
            raise BackendError(f"two installed packages name a backend {point.name}: {both}")
    return found | BUILT_IN


def reason(error: BaseException) -> str:
    """Why an import or a constructor failed, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
