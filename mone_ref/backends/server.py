"""Any engine behind an OpenAI-compatible completions server, started once per checkpoint.

The server takes token ids as prompts and returns log-probabilities of the prompt. What it
says before it is ready, and how it ends, is its refusal: its log stands in the evidence,
for the error map to judge. ``docs/server.md`` says how to judge which engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mone_ref.backend import (
    Backend,
    BackendInfo,
    Generation,
    LoadOptions,
    Scores,
    Session,
    Unavailable,
)
from mone_ref.backends import completions, server_settings
from mone_ref.backends.completions import AnswerError, Dialect, Vocabulary
from mone_ref.backends.server_http import Declined, Server, ServerError
from mone_ref.backends.server_process import ServerProcess, free_port
from mone_ref.backends.server_settings import UNKNOWN, ServerSettings
from mone_ref.suite import data

T = TypeVar("T")
S = TypeVar("S")

PATIENCE = 10.0
"""Seconds that a server has to end by itself when a session is closed."""


class NotSpoken(ServerError):
    """A server that answers in no dialect in which it was asked."""


class ServerBackend(Backend):
    """A command that serves one checkpoint; see ``docs/server.md``."""

    def __init__(
        self, command: str = "", arguments: Sequence[str] = (), call_limit: float = 120.0
    ) -> None:
        """Raises ``OptionError``. ``call_limit`` bounds each request, in seconds."""
        self.settings = server_settings.read(command, arguments)
        self.call_limit = call_limit
        words = data.root() / "conformance" / "error_maps" / f"{self.settings.engine}.toml"
        self.error_map = words if words.is_file() else None

    def describe(self) -> BackendInfo:
        """What ``--engine-arg``s say: no server can be asked before it has a checkpoint.

        An engine behind its server goes by another name than the engine in process: what
        can be judged differs, and so do declared deviations. Its words are the same.
        """
        return BackendInfo(
            name=f"{self.settings.engine}-server",
            version=self.settings.version,
            device=self.settings.device,
            compute=self.settings.compute,
            features=frozenset(self.settings.features),
            parallel=self.settings.parallel,
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Start a server and wait until it is ready; the caller bounds the time.

        Raises ``ServerError`` when it ends before, ``Crashed`` when a signal ended it.
        """
        port = free_port()
        process = ServerProcess(self.settings.words(checkpoint, port, options))
        server = Server(process, port, self.call_limit)
        try:
            with server.explained():
                server.wait_until_ready(self.settings.ready_path)
                if self.settings.version != UNKNOWN:
                    server.check_version(self.settings.version)
                return ServerSession(server, self.settings, checkpoint)
        except BaseException:
            process.stop(patience=0)
            raise


class ServerSession(Session):
    """One running server."""

    def __init__(self, server: Server, settings: ServerSettings, checkpoint: Path) -> None:
        self._server = server
        self._model = server.model()
        self._vocabulary = Vocabulary.of(checkpoint)
        self._dialects = completions.dialects(settings.dialect, settings.top, self._vocabulary.size)
        self._ways = completions.generated(settings.top, self._vocabulary.size)
        self._batches = itertools.cycle(settings.batches)

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Scores ``[T - 1, n]``.

        Several prompts are sent as one list and as concurrent requests, in turn.
        """
        return self._in_turn(self._ask, prompts)

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Tokens that the server generates, and scores ``[S, n]``; several prompts as in ``score``.

        Raises ``Unavailable`` where it shows no log-probabilities of what it generates.
        """
        try:
            return self._in_turn(partial(self._continue, steps=steps), prompts)
        except NotSpoken as error:
            raise Unavailable(f"the server does not tell how it generates: {error}") from error

    def _in_turn(
        self, ask: Callable[[list[list[int]]], list[S]], prompts: list[list[int]]
    ) -> list[S]:
        """Ask for prompts as a list, or for each at the same time."""
        with self._server.explained():
            if len(prompts) == 1 or next(self._batches) == "list":
                return ask(prompts)
            return [one for (one,) in concurrently(ask, [[ids] for ids in prompts])]

    def close(self) -> None:
        """End the server and everything it started."""
        self._server.process.stop(min(PATIENCE, self._server.limit / 2))

    def _ask(self, prompts: list[list[int]]) -> list[Scores]:
        """Scores of prompts."""
        return self._spoken(
            self._dialects,
            lambda dialect: completions.request(self._model, prompts, dialect),
            lambda answer, dialect: completions.read(answer, prompts, dialect, self._vocabulary),
        )

    def _continue(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """What follows prompts."""
        return self._spoken(
            self._ways,
            lambda way: completions.continuation_request(self._model, prompts, steps, way),
            lambda answer, way: completions.read_continuations(
                answer, prompts, way, self._vocabulary
            ),
        )

    def _spoken(
        self,
        dialects: list[Dialect],
        request: Callable[[Dialect], dict[str, Any]],
        read: Callable[[object, Dialect], T],
    ) -> T:
        """Ask in the first dialect that the server speaks, and in no other from then on.

        Raises ``NotSpoken``.
        """
        refused: dict[str, list[str]] = {}
        for dialect in tuple(dialects):
            try:
                found = read(self._server.ask("/v1/completions", request(dialect)), dialect)
            except (AnswerError, Declined) as error:
                refused.setdefault(str(error), []).append(str(dialect))
            else:
                dialects[:] = [dialect]
                return found
        raise NotSpoken("; ".join(f"{why} ({', '.join(ways)})" for why, ways in refused.items()))


def concurrently(function: Callable[[T], S], items: Sequence[T]) -> list[S]:
    """The function's value for each item, all at once. Stragglers are not waited for."""
    pool = ThreadPoolExecutor(len(items))
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
