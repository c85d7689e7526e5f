"""Requests to one server, and what it means when they fail."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from mone_ref.backend import Crashed
from mone_ref.backends.server_process import ServerProcess, by_signal, told_end
from mone_ref.backends.server_settings import HOST
from mone_ref.errors import show

POLL = 0.05
"""Seconds between two questions whether the server is ready."""

READY_PATHS = ("/health", "/v1/models")
"""Where readiness is asked by default: the first that the server knows."""

LAST_WORDS = 1.0
"""Seconds in which a server that dropped a request may turn out to have died."""

MOST_BYTES = 1 << 29
"""Longest answer that is read."""


class ServerError(RuntimeError):
    """A server that ended too soon, said no, or answered with something else than was asked."""


class Ended(ServerError):
    """A server that ended before it was ready, of its own will."""


class Declined(ServerError):
    """A request that the server does not take, as opposed to one that it fails at."""


class Server:
    """A server process and the port that it listens on.

    ``limit`` is the longest that a request may take, in seconds.
    """

    def __init__(self, process: ServerProcess, port: int, limit: float) -> None:
        self.process = process
        self.limit = limit
        self._port = port

    @contextmanager
    def explained(self) -> Iterator[None]:
        """On a failure, repeat the end of the server's log: it is the evidence.

        Raises ``Crashed`` instead of an error of the block where the process is gone.
        """
        try:
            yield
        except BaseException as error:
            dropped = isinstance(error, OSError | http.client.HTTPException)
            code = self.process.ended(LAST_WORDS if dropped else 0)
            if code is not None:
                self.process.stop(patience=0)  # the log is complete then
            sys.stderr.write(self.process.log())
            if (
                code is None
                or isinstance(error, Ended | Crashed)
                or not isinstance(error, Exception)
            ):
                raise
            raise Crashed(f"the server {told_end(code)}") from error

    def wait_until_ready(self, path: str) -> None:
        """Ask ``path``, or the usual ones, until the answer is 200.

        Raises ``Ended`` when the server ends before, ``Crashed`` when a signal ended it,
        ``ServerError`` when it answers 500.
        """
        while not self._ready((path,) if path else READY_PATHS):
            code = self.process.ended(POLL)
            if code is not None:
                told = f"the server {told_end(code)} before it was ready"
                raise Crashed(told) if by_signal(code) else Ended(told)

    def _ready(self, paths: Sequence[str]) -> bool:
        """Whether the first of some paths that the server knows answers 200."""
        for path in paths:
            try:
                status, content = self._request("GET", path)
            except (OSError, http.client.HTTPException):
                return False
            if status == HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ServerError(f"{path}: {excerpt(status, content)}")
            if status != HTTPStatus.NOT_FOUND:
                return status == HTTPStatus.OK
        return False

    def check_version(self, stated: str) -> None:
        """Raise ``ServerError`` when the server says another version of itself than was stated."""
        status, content = self._request("GET", "/version")
        match parsed(content) if status == HTTPStatus.OK else None:
            case {"version": told} if told != stated:
                raise ServerError(f"the server is version {show(told)}, --engine-arg says {stated}")

    def model(self) -> str:
        """The name under which the server offers its model. Raises ``ServerError``."""
        status, content = self._request("GET", "/v1/models")
        match parsed(content) if status == HTTPStatus.OK else None:
            case {"data": [{"id": str(name)}, *_]}:
                return name
        raise ServerError(f"/v1/models names no model: {excerpt(status, content)}")

    def ask(self, path: str, body: dict[str, Any]) -> object:
        """The document that answers a request.

        Raises ``Declined``, ``ServerError``, or what the connection raises.
        """
        status, content = self._request("POST", path, json.dumps(body).encode())
        if status == HTTPStatus.OK:
            return parsed(content)
        declined = status < HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.NOT_IMPLEMENTED
        raise (Declined if declined else ServerError)(excerpt(status, content))

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and content of one request, on a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=self.limit)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read(MOST_BYTES + 1)
        finally:
            connection.close()
        if len(content) > MOST_BYTES:
            raise ServerError(f"{path}: more than {MOST_BYTES} bytes")
        return response.status, content


def parsed(content: bytes) -> object:
    """A JSON document. Raises ``ServerError``."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{len(content)} bytes that are no JSON: {error}") from error


def excerpt(status: int, content: bytes) -> str:
    """A status and the start of what came with it."""
    return f"HTTP {status} {show(content.decode('utf-8', errors='replace'), 400)}"
