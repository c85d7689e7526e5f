"""An engine in a process of its own, behind the same surface: any command that speaks the protocol.

The process is kept from load to load. One that crashed, hung or broke the protocol is ended
with all its descendants, and the next request gets a new one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mone_ref.backend import (
    Backend,
    BackendInfo,
    Generation,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Scores,
    Session,
)
from mone_ref.backends import BackendError
from mone_ref.backends.conversation import Conversation, Tensors, only_ok
from mone_ref.errors import show
from mone_ref.protocol import forms
from mone_ref.protocol.failures import ProtocolError
from mone_ref.protocol.messages import Message

START_LIMIT = 120.0
"""Seconds for the handshake, in which an engine imports what it needs."""


def isolated(name: str, limit: float = START_LIMIT) -> ProcessBackend:
    """A Python backend, by the name it has here, in a process of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "mone_ref.backends.worker", name]
    return ProcessBackend(command, limit, os.environ | {"PYTHONPATH": paths})


def commanded(command: str, limit: float = START_LIMIT) -> ProcessBackend:
    """An engine that is a command. Raises ``BackendError`` when it is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BackendError(f"--backend-cmd {show(command)}: {error}") from error
    if not words:
        raise BackendError(f"--backend-cmd {show(command)}: expected a command")
    if shutil.which(words[0]) is None:
        raise BackendError(f"--backend-cmd: there is no program {show(words[0])}")
    return ProcessBackend(words, limit, os.environ)


class ProcessBackend(Backend):
    """The engine of one command line."""

    def __init__(
        self, command: Sequence[str], limit: float, environment: Mapping[str, str]
    ) -> None:
        self._command, self._limit = tuple(command), limit
        self._environment = dict(environment)
        self._current: Conversation | None = None
        self._first: Message | None = None
        self.abilities = frozenset()

    def describe(self) -> BackendInfo:
        """Who answered the handshake. Raises ``OSError`` when the command cannot be run."""
        self._conversation()
        assert self._first is not None
        return forms.info_from_json(self._first["engine"])

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load in the process; raises what the engine raised there."""
        conversation = self._conversation()
        fields = {
            "checkpoint": str(Path(checkpoint).absolute()),
            "options": forms.options_to_json(options),
        }
        return conversation.ask(
            "load", lambda answer, _: ProcessSession(conversation, answer), fields
        )

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """Build a layer in the process; raises what the engine raised there."""
        conversation = self._conversation()
        fields = {"layer": forms.layer_to_json(layer)}
        return conversation.ask(
            "build_layer",
            lambda answer, _: ProcessLayer(conversation, answer),
            fields,
            given=tensors,
        )

    def close(self) -> None:
        """Stop the process. Raises what the engine raised while it closed."""
        if self._current is not None:
            self._current.stop()

    def _conversation(self) -> Conversation:
        """The process that runs, or a new one, which must be the same engine."""
        if self._current is not None and not self._current.over:
            return self._current
        self._current = Conversation(self._command, self._environment)
        answer = self._current.start(self._limit)
        answer.pop("seq")
        if self._first is None:
            self._first = answer
            self.abilities = frozenset(answer.get("abilities", ()))
            for name in set(forms.FILES) & answer.keys():
                setattr(self, name, Path(answer[name]))
        elif answer != self._first:
            raise ProtocolError("start: after a restart the engine describes itself differently")
        return self._current


class ProcessSession(Session):
    """One checkpoint that is loaded in the process."""

    def __init__(self, conversation: Conversation, answer: Message) -> None:
        self._conversation = conversation
        self._session = {"session": answer["session"]}
        self.abilities = frozenset(answer.get("abilities", ()))

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Score in the process."""
        return self._conversation.ask(
            "score",
            lambda _, tensors: forms.scores_from_tensors(tensors, len(prompts)),
            self._session | {"prompts": prompts},
        )

    def close(self) -> None:
        """Close in the process; where that has ended, nothing is left to close."""
        if not self._conversation.over:
            self._conversation.ask("close", only_ok, self._session)

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Continue in the process."""

        def read(answer: Message, tensors: Tensors) -> list[Generation]:
            tokens, scores = answer["tokens"], forms.scores_from_tensors(tensors, len(prompts))
            if len(tokens) != len(prompts):
                raise ProtocolError(f"{len(tokens)} answers for {len(prompts)} prompts")
            return [Generation(*pair) for pair in zip(tokens, scores, strict=True)]

        fields: dict[str, Any] = {"prompts": prompts, "steps": steps}
        return self._conversation.ask("generate", read, self._session | fields)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Update in the process."""
        self._conversation.ask("update", only_ok, self._session, given=tensors)

    def reload(self, checkpoint: Path) -> None:
        """Reload in the process."""
        fields = self._session | {"checkpoint": str(Path(checkpoint).absolute())}
        self._conversation.ask("reload", only_ok, fields)

    def expert_rows(self) -> dict[int, int]:
        """Rows in the process."""

        def read(answer: Message, _: Tensors) -> dict[int, int]:
            rows = answer["rows"]
            if not isinstance(rows, dict):
                raise ProtocolError("one number of rows for a whole checkpoint")
            return {int(layer): count for layer, count in rows.items()}

        return self._conversation.ask("expert_rows", read, self._session)

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Trace in the process."""
        return self._conversation.ask(
            "trace",
            lambda _, tensors: forms.traces_from_tensors(tensors, len(prompts)),
            self._session | {"prompts": prompts},
        )


class ProcessLayer(LayerSession):
    """One layer that is built in the process, until nobody here holds it."""

    def __init__(self, conversation: Conversation, answer: Message) -> None:
        self._conversation = conversation
        self._session = {"session": answer["session"]}
        self.abilities = frozenset(answer["abilities"])
        self.in_place = answer.get("in_place", False)
        end = weakref.finalize(self, conversation.forget, answer["session"])
        end.atexit = False

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Call in the process."""
        return self._call("forward", hidden_states, router_logits)[0]

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Call in the process."""
        return self._call("forward_routed", hidden_states, topk_weights, topk_ids)[0]

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call in the process."""
        weights, rows, constants = self._call("rewrite_routes", topk_weights, topk_ids)
        return weights, rows, constants

    def expert_rows(self) -> int:
        """Rows in the process."""

        def read(answer: Message, _: Tensors) -> int:
            if not isinstance(answer["rows"], int):
                raise ProtocolError("rows by layer for a single layer")
            return answer["rows"]

        return self._conversation.ask("expert_rows", read, self._session)

    def _call(self, method: str, *arguments: Tensor) -> list[Tensor]:
        """Ask, and let arguments that were changed in the process be changed here too."""
        given = dict(zip(forms.ARGUMENTS[method], arguments, strict=True))

        def read(_: Message, tensors: Tensors) -> list[Tensor]:
            results = set(forms.RESULTS[method])
            changed = {f"{forms.CHANGED}{name}": value for name, value in given.items()}
            forms.expect_names(tensors, results, results | changed.keys())
            for name in changed.keys() & tensors.keys():
                put_back(name, changed[name], tensors[name])
            return [tensors[name] for name in forms.RESULTS[method]]

        return self._conversation.ask(method, read, self._session, given=given)


def put_back(name: str, argument: Tensor, now: Tensor) -> None:
    """Write what an argument holds now into it. Raises ``ProtocolError`` for another form."""
    if now.dtype != argument.dtype or now.shape != argument.shape:
        raise ProtocolError(f"{name} has another dtype or shape than what was given")
    argument.copy_(now)
