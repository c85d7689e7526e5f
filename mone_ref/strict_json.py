"""Bytes -> JSON, with nothing repaired and nothing dropped (FMT-22).

``json`` alone accepts NaN, turns 1e999 into infinity and keeps the last of two
equal keys, so two tools can read two different things from one file. Used for
config.json, safetensors headers and the shard index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Deepest accepted nesting. Real files need less than ten; readers may recurse."""

MAX_KEY = 60
"""Longest part of a key that is shown in a path."""


class StrictJsonError(ValueError):
    """The bytes are not JSON; the message says why and, where known, where."""


@dataclass(frozen=True)
class Parsed:
    """A JSON value, and the path of every key that its object holds more than once.

    ``value`` holds the last of equal keys. A repeated key inside a value that a
    later equal key replaced is not listed; the replaced key is.
    """

    value: Any
    duplicates: tuple[str, ...]


def parse(data: bytes) -> Parsed:
    """Parse one JSON document; raises ``StrictJsonError``.

    Refused: other encodings than UTF-8 without a byte order mark, NaN and infinity
    (also by overflow), integers beyond Python's digit limit, nesting beyond
    ``MAX_DEPTH``, anything after the document.
    """
    repeating: list[tuple[dict[str, Any], list[str]]] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            repeating.append((built, repeated_keys(pairs)))
        return built

    value = _loads(data, build)
    _check_depth(value)
    if not repeating:
        return Parsed(value, ())
    keys = {id(built): repeated for built, repeated in repeating}
    paths = [
        child(path, key) for path, node in _containers(value) for key in keys.get(id(node), [])
    ]
    return Parsed(value, tuple(paths))


def child(path: str, key: str | int) -> str:
    """JSON path of a member: ``$.a``, ``$["0"]``, ``$[0]``; safe to print, long keys cut."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if len(key) > MAX_KEY:
        key = f"{key[:MAX_KEY]}..."
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        return f"{path}.{key}"
    return f"{path}[{json.dumps(key)}]"


def _loads(data: bytes, build: Any) -> Any:
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=build,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"byte {error.start} is not UTF-8 ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise StrictJsonError(f"nested deeper than {MAX_DEPTH} levels") from None
    except StrictJsonError:
        raise
    except ValueError:  # the only one left: an integer beyond sys.get_int_max_str_digits()
        raise StrictJsonError("an integer has too many digits") from None


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise StrictJsonError("a number is beyond the range of float64")
    return number


def repeated_keys(pairs: list[tuple[str, Any]]) -> list[str]:
    """Keys that one object holds more than once, each listed once."""
    seen: set[str] = set()
    repeated: dict[str, None] = {}  # ordered, each key once
    for key, _ in pairs:
        if key in seen:
            repeated[key] = None
        seen.add(key)
    return list(repeated)


def _check_depth(value: Any) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise StrictJsonError(f"nested deeper than {MAX_DEPTH} levels")
        level = [
            item
            for node in level
            for item in (node.values() if type(node) is dict else node)
            if type(item) is dict or type(item) is list  # a header has 10^6 leaves: be quick
        ]


def _containers(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Every object and array with its path, in document order; depth is bounded."""
    if not isinstance(value, dict | list):
        return
    yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _containers(item, child(path, key))
