"""How a fault is planted: by replacing module attributes, which the oracle calls by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, cast
from unittest import mock


@dataclass(frozen=True)
class Patch:
    """One step of the oracle, ``module.name``, and what stands in for it.

    A replacement keeps nothing between two calls: what it does follows from its arguments.
    """

    module: str
    name: str
    replacement: Callable[..., Any]

    @property
    def step(self) -> str:
        """The full name of the step."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Fault:
    """A mistake an engine could make.

    ``sentence`` says what a wrong engine does, ``clauses`` what it breaks, ``stage`` the first
    phase at which it can show, ``group`` the part of an engine it sits in, ``dtypes`` those at
    which a case can see it. ``equivalent`` is the reason why no case can, where none can.
    ``looks_like`` is the id of the fault whose answers this one shares by nature.
    """

    id: str
    sentence: str
    clauses: tuple[str, ...]
    stage: str
    patches: tuple[Patch, ...]
    group: str
    dtypes: tuple[str, ...] = ("float32",)
    equivalent: str = ""
    looks_like: str = ""


def fault(
    id: str,
    sentence: str,
    clauses: str | tuple[str, ...],
    *patches: Patch,
    stage: str,
    group: str,
    dtypes: tuple[str, ...] = ("float32",),
    equivalent: str = "",
    looks_like: str = "",
) -> Fault:
    """A ``Fault`` in the order in which one reads it; most break one clause."""
    broken = (clauses,) if isinstance(clauses, str) else clauses
    return Fault(id, sentence, broken, stage, patches, group, dtypes, equivalent, looks_like)


@dataclass
class Planted:
    """What happened to a fault while it was planted: calls per replaced step."""

    calls: dict[str, int] = field(default_factory=dict)


class StaleFault(Exception):
    """A fault whose target is gone or has another signature."""


@contextmanager
def planted(fault: Fault) -> Iterator[Planted]:
    """Plant a fault for the time of a ``with`` block. Raises ``StaleFault``."""
    witness = Planted()
    with ExitStack() as stack:
        for patch in fault.patches:
            module = importlib.import_module(patch.module)
            replacement = counted(patch, target(fault, patch), witness)
            stack.enter_context(mock.patch.object(module, patch.name, replacement))
        yield witness


def target(fault: Fault, patch: Patch) -> Callable[..., Any]:
    """The step that a patch replaces, with the signature it must share."""
    step = getattr(importlib.import_module(patch.module), patch.name, None)
    if not callable(step):
        raise StaleFault(f"{fault.id}: {patch.module} has no step {patch.name}")
    wanted, given = signature(step), signature(patch.replacement)
    if wanted != given:
        raise StaleFault(f"{fault.id}: {patch.name}{wanted} is replaced by one that takes {given}")
    return cast("Callable[..., Any]", step)


@cache
def signature(step: Callable[..., Any]) -> inspect.Signature:
    """As ``inspect.signature``; a matrix plants the same few hundred steps thousands of times."""
    return inspect.signature(step)


def counted(patch: Patch, step: Callable[..., Any], witness: Planted) -> Callable[..., Any]:
    """The replacement, counting its calls under the step's name."""
    witness.calls[patch.step] = 0

    @wraps(step)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        witness.calls[patch.step] += 1
        return patch.replacement(*args, **kwargs)

    return replaced
