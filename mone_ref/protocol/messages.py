"""One message on one line: JSON, and in both directions of the shape that the schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from mone_ref import strict_json
from mone_ref.errors import show
from mone_ref.protocol import VERSION
from mone_ref.protocol.failures import ProtocolError

Message = dict[str, Any]
SCHEMA = Path(__file__).with_name("protocol.schema.json")

OK, REFUSED, UNAVAILABLE, FAILED = "ok", "refused", "unavailable", "failed"


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a line, its end included."""
    return json.dumps(message, allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """The object on a line. Raises ``ProtocolError``."""
    try:
        parsed = strict_json.parse(line)
    except strict_json.StrictJsonError as error:
        raise ProtocolError(f"a line that is not JSON ({error}): {show(line)}") from None
    if not isinstance(parsed.value, dict) or parsed.duplicates:
        raise ProtocolError(f"a line that is no JSON object with distinct keys: {show(line)}")
    return parsed.value


def check_request(message: Message) -> None:
    """A request against the schema. Raises ``ProtocolError``."""
    check("request", message)
    check(f"request.{message['command']}", message)


def check_answer(request: Message, message: Message) -> None:
    """An answer against the request and the schema. Raises ``ProtocolError``."""
    check("answer", message)
    asked, answered = request["seq"], message["seq"]
    if answered != asked:
        again = ", which had its answer" if 0 < answered < asked else ""
        raise ProtocolError(f"an answer to request {answered}{again}; asked was {asked}")
    command, kind = request["command"], message["answer"]
    if command == "start" and kind == OK and message.get("protocol") != VERSION:
        spoken = show(message.get("protocol"))
        raise ProtocolError(f"the engine speaks protocol {spoken}, the suite {VERSION}")
    check(f"answer.{command if kind == OK else kind}", message)


def check(definition: str, message: Message) -> None:
    """A message against one definition of the schema. Raises ``ProtocolError``."""
    broken = jsonschema.exceptions.best_match(validator(definition).iter_errors(message))
    if broken is not None:
        raise ProtocolError(f"{definition}: {broken.json_path}: {show(broken.message, 200)}")


@cache
def schema() -> dict[str, Any]:
    """The schema of every message."""
    read: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return read


@cache
def validator(definition: str) -> jsonschema.Draft202012Validator:
    """Of one definition."""
    wanted = {"$ref": f"#/$defs/{definition}", "$defs": schema()["$defs"]}
    return jsonschema.Draft202012Validator(wanted)
