"""Typed look-up of config fields, wherever a config holds them.

A multimodal config keeps its decoder's fields under ``text_config``, and may
repeat some at the top level. Both holders are read, and must agree. Problems are
collected, so that one reading shows them all; a field with a problem reads as None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mone_ref.errors import Code, Phase, Problem, Severity, only_errors, show
from mone_ref.strict_json import child

ROOT = "$"
TEXT_CONFIG = "text_config"

MAX_SIZE = 2**31 - 1
"""Largest accepted size: engines index with 32-bit integers."""


@dataclass(frozen=True)
class Found:
    """A value that is not null, and its JSON path."""

    path: str
    value: Any


class Fields:
    """The holders of a config, ``text_config`` first, and the problems found in them."""

    def __init__(self, top: Mapping[str, Any], file: str) -> None:
        """``top`` is the config's object; ``file`` its name in messages."""
        self.file = file
        self.problems: list[Problem] = []
        self.limits: list[Problem] = []
        self.holders: list[tuple[str, Mapping[str, Any]]] = [(ROOT, top)]
        text = top.get(TEXT_CONFIG)
        if isinstance(text, dict):
            self.holders.insert(0, (child(ROOT, TEXT_CONFIG), text))
        elif text is not None:
            self.wrong(Found(child(ROOT, TEXT_CONFIG), text), "a JSON object")

    @property
    def errors(self) -> list[Problem]:
        """Problems that stop a load."""
        return only_errors(self.problems)

    def report(
        self,
        code: Code,
        where: str,
        found: str,
        expected: str,
        clause: str = "",
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Record one problem of config.json, which is noticed at parse."""
        self.problems.append(
            Problem(code, Phase.PARSE, where, found, expected, self.file, severity, clause)
        )

    def limit(self, found: Found, expected: str) -> None:
        """Record what is not computed here, and leaves names and shapes of tensors as they are."""
        code, where = Code.MODEL_FEATURE, found.path
        self.limits.append(
            Problem(code, Phase.PARSE, where, show(found.value), expected, self.file)
        )

    def wrong(self, found: Found, expected: str) -> None:
        """Record a model field with a wrong value."""
        self.report(Code.MODEL_FIELD, found.path, show(found.value), expected)

    def find(self, *keys: str) -> list[Found]:
        """Every value that is not null under any of ``keys``, in any holder."""
        return [
            Found(child(path, key), holder[key])
            for path, holder in self.holders
            for key in keys
            if holder.get(key) is not None
        ]

    def agree(self, found: Sequence[Found], clause: str = "") -> Found | None:
        """The first of several places that must hold one value; None when there is none."""
        for other in found[1:]:
            if not same(found[0].value, other.value):
                both = f"{show(found[0].value)} here and {show(other.value)} at {other.path}"
                self.report(Code.MODEL_FIELD_CONFLICT, found[0].path, both, "one value", clause)
        return found[0] if found else None

    def size(self, *keys: str, default: int | None = None, clause: str = "") -> int | None:
        """A positive integer below 2^31; without a default it must be present."""
        found = self.agree(self.find(*keys), clause)
        if found is None:
            if default is None:
                expected = f"a positive integer under {' or '.join(keys)}"
                self.report(Code.MODEL_FIELD, child(ROOT, keys[0]), "nothing", expected, clause)
            return default
        if type(found.value) is int and 0 < found.value <= MAX_SIZE:
            return found.value
        self.wrong(found, f"an integer from 1 to {MAX_SIZE}")
        return None

    def positive(self, found: Found | None) -> float | None:
        """A finite positive number, integers included; None when absent or wrong."""
        if found is None:
            return None
        if type(found.value) in (int, float):
            try:
                number = float(found.value)
            except OverflowError:
                number = math.inf
            if 0 < number < math.inf:
                return number
        self.wrong(found, "a finite positive number")
        return None

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``, and nothing that Python takes for one."""
        found = self.agree(self.find(key))
        if found is None:
            return default
        if isinstance(found.value, bool):
            return found.value
        self.wrong(found, "true or false")
        return default


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but ``true`` is no number."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
