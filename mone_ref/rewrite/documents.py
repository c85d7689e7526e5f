"""Documents of an output that are not as planned: where they differ, as a JSON path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mone_ref import strict_json
from mone_ref.checkpoint.findings import flaw, most, unreadable
from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import Code, Problem, show
from mone_ref.fields import ROOT
from mone_ref.rewrite.shard_check import Checked


def check(path: Path, name: str, expected: bytes) -> Checked:
    """One document against its planned bytes."""
    try:
        found = read_regular(path)
    except OSError as error:
        return Checked((unreadable(name, error),), "", 0)
    problems = () if found == expected else tuple(most(_differences(name, found, expected)))
    return Checked(problems, hashlib.sha256(found).hexdigest(), len(found))


def _differences(name: str, found: bytes, expected: bytes) -> Iterator[Problem]:
    try:
        parsed = strict_json.parse(found)
    except strict_json.StrictJsonError as error:
        yield flaw(Code.OUTPUT_DOCUMENT, name, ROOT, str(error), "valid JSON")
        return
    places = list(_places(ROOT, parsed.value, strict_json.parse(expected).value))
    for where, has, wants in places:
        yield flaw(Code.OUTPUT_DOCUMENT, name, where, show(has), show(wants))
    if not places:
        what = "the same values in other bytes"
        yield flaw(Code.OUTPUT_DOCUMENT, name, ROOT, what, "the planned bytes")


ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def _places(where: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Innermost values that differ: path, found, expected."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            inner = strict_json.child(where, key)
            yield from _places(inner, found.get(key, ABSENT), expected.get(key, ABSENT))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for place, pair in enumerate(zip(found, expected, strict=True)):
            yield from _places(strict_json.child(where, place), *pair)
    elif type(found) is not type(expected) or found != expected:
        yield where, found, expected
