"""The optional methods of a session, each called once in the plainest way.

Every function returns one phrase about what came back, and raises ``TypeError`` when
that is not what ``mone_ref.backend`` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from mone_ref import config
from mone_ref.backend import Session
from mone_ref.errors import Phase, show

TRACED = re.compile(r"layers\.\d+\.\w+")


@dataclass(frozen=True)
class Asked:
    """A session of a substituted checkpoint, and prompts for it."""

    session: Session
    prompts: Sequence[Sequence[int]]
    checkpoint: Path


def expert_rows(asked: Asked) -> str:
    """Layer index to number of rows."""
    rows = asked.session.expert_rows()
    numbers = [*rows, *rows.values()] if isinstance(rows, Mapping) else [None]
    check(all(type(number) is int for number in numbers), rows, "a dict of layer index to rows")
    return f"rows per layer: {dict(rows)}"


def trace(asked: Asked) -> str:
    """One dict of tensors per prompt."""
    traces = asked.session.trace([list(prompt) for prompt in asked.prompts])
    whole = listed(traces, asked.prompts, dict) and all(
        TRACED.fullmatch(str(name)) and isinstance(tensor, Tensor)
        for one in traces
        for name, tensor in one.items()
    )
    check(whole, traces, "per prompt a dict of layers.{L}.NAME to tensors")
    return f"{len(traces[0])} tensors for each prompt"


def update(asked: Asked) -> str:
    """A constant replaced by itself."""
    layers = config.read(asked.checkpoint).substitution.layers
    name = next(iter(next(iter(layers.values())).constants.values()))
    with safe_open(asked.checkpoint / "model.safetensors", framework="pt") as file:
        asked.session.update({name: file.get_tensor(name)})
    return f"{name}, with the value that it has"


def reload(asked: Asked) -> str:
    """The checkpoint that is loaded already."""
    asked.session.reload(asked.checkpoint)
    return "the same checkpoint"


CALLS: Mapping[str, tuple[Phase, Callable[[Asked], str]]] = {
    "expert_rows": (Phase.LOAD, expert_rows),
    "trace": (Phase.RUN, trace),
    "update": (Phase.UPDATE, update),
    "reload": (Phase.RELOAD, reload),
}
"""By name: the phase of an engine's life, and the call."""


def listed(given: Any, prompts: Sequence[Sequence[int]], kind: type) -> bool:
    """Whether something is a list with one object of a kind for each prompt."""
    return (
        isinstance(given, list)
        and len(given) == len(prompts)
        and all(isinstance(one, kind) for one in given)
    )


def check(whole: bool, given: object, expected: str) -> None:
    """Raises ``TypeError`` that names what came back."""
    if not whole:
        raise TypeError(f"returned {show(given)}, expected {expected}")
