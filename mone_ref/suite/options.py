"""Options of a run, for pytest and for the command's help alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "--backend": {
        "metavar": "NAME",
        "help": "the engine: a built-in or installed name, or module:Class (default: reference)",
    },
    "--isolate": {
        "action": "store_true",
        "help": "run the engine in a process of its own: crashes and hangs end a case, not the run",
    },
    "--backend-cmd": {
        "metavar": "COMMAND",
        "help": "the engine is a command that speaks the protocol of docs/protocol.md",
    },
    "--serve-cmd": {
        "metavar": "COMMAND",
        "help": "for --backend=server: starts a completions server; holds {checkpoint} and {port}",
    },
    "--dtype": {
        "metavar": "DTYPE",
        "action": "append",
        "help": "judge at this dtype (repeatable; default: every dtype of the engine)",
    },
    "--case": {
        "metavar": "ID",
        "action": "append",
        "help": "run this case, or all that match a pattern such as 'load/*' (repeatable)",
    },
    "--fixtures": {
        "metavar": "DIR",
        "help": "judge on your own fixtures (mone-ref fixtures fill), not by the suite's cases",
    },
    "--smoke": {
        "action": "store_true",
        "help": "judge the adapter in a few seconds, before the suite judges the engine",
    },
    "--engine-arg": {
        "metavar": "KEY=VALUE",
        "action": "append",
        "help": "hand this to the engine verbatim; JSON values are decoded (repeatable)",
    },
    "--error-map": {
        "metavar": "FILE",
        "help": "patterns that tell the engine's refusals apart (default: the adapter's own file)",
    },
    "--expectations": {
        "metavar": "FILE",
        "help": "declared deviations (default: the adapter's own file)",
    },
    "--write-expectations": {
        "metavar": "FILE",
        "help": "write declarations that agree with this run; each needs a reason before use",
    },
    "--report": {"metavar": "FILE", "help": "write the report, as JSON lines"},
    "--markdown": {"metavar": "FILE", "help": "write a summary for a CI job"},
    "--no-diagnosis": {
        "action": "store_false",
        "dest": "diagnosis",
        "help": "do not look for the known mistake behind each undeclared failure",
    },
    "--call-limit": {
        "metavar": "SECONDS",
        "type": float,
        "default": 120.0,
        "help": "longest time for one call into the engine (default: 120)",
    },
    "--case-limit": {
        "metavar": "SECONDS",
        "type": float,
        "default": 1800.0,
        "help": "longest time for all calls of one case (default: 1800)",
    },
}

WITH_VALUE = tuple(flag for flag, option in OPTIONS.items() if "metavar" in option)

RENAMED = {"--fixtures": "--own-fixtures"}
"""What pytest calls an option that has the name of one of its own."""

PROGRESS = "MONE_REF_PROGRESS"
"""Environment variable: the file in which a run names the case it is at, then ``DONE``."""
DONE = "done"


class OptionError(ValueError):
    """An option with a value that cannot be used."""


def check_value(flag: str, value: Any) -> None:
    """An empty value, such as an unset variable of a script leaves, is not the default.

    Raises ``OptionError``.
    """
    if value == "" or (isinstance(value, list) and "" in value):
        raise OptionError(f"{flag}: found an empty value, expected {OPTIONS[flag]['metavar']}")


def engine_args(texts: Iterable[str]) -> dict[str, Any]:
    """``k=v`` pairs; a value that is JSON is decoded, any other is text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise OptionError(f"--engine-arg {text}: expected KEY=VALUE")
        if key in found:
            raise OptionError(f"--engine-arg {key} stands twice")
        found[key] = decoded(value)
    return found


def decoded(text: str) -> Any:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
