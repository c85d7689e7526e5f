"""An engine's own words for a refusal -> the suite's codes.

``error_maps/<backend>.toml``: each key is a code, a group or ``GROUP/detail``, and
lists regular expressions, searched in the evidence. ``reliable = false`` says that
the patterns are known to be loose; reports print it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import GROUPS, Code

CODES = GROUPS | {str(code) for code in Code if code.group in GROUPS}


class ErrorMapError(ValueError):
    """A broken error map; names the file and the key."""


class Ambiguous(Exception):
    """One message that matches patterns of two groups: no refusal can be told from it."""


@dataclass(frozen=True)
class ErrorMap:
    """Patterns in the order of the file, each with the code it stands for."""

    patterns: tuple[tuple[str, re.Pattern[str]], ...] = ()
    reliable: bool = True

    def find(self, evidence: str) -> str | None:
        """The code that the evidence speaks of: the first of the file that has a detail.

        None when no pattern matches; raises ``Ambiguous`` when two groups match.
        """
        hits = [(code, pattern) for code, pattern in self.patterns if pattern.search(evidence)]
        groups = {group(code) for code, _ in hits}
        if len(groups) > 1:
            found = "; ".join(f"{code}: {pattern.pattern!r}" for code, pattern in hits)
            raise Ambiguous(f"the error map matches several groups: {found}")
        codes = [code for code, _ in hits]
        return next((code for code in codes if code != group(code)), codes[0] if codes else None)


def group(code: str) -> str:
    """``MISSING_CONSTANT`` of itself and of ``MISSING_CONSTANT/absent``."""
    return code.partition("/")[0]


def load(path: Path) -> ErrorMap:
    """Read an error map. Raises ``ErrorMapError``."""
    try:
        document = tomllib.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ErrorMapError(f"{path}: {error}") from error
    try:
        return parse(document)
    except ErrorMapError as error:
        raise ErrorMapError(f"{path}: {error}") from None


def parse(document: dict[str, Any]) -> ErrorMap:
    """An error map from its TOML document. Raises ``ErrorMapError`` without a file name."""
    document = dict(document)
    reliable = document.pop("reliable", True)
    if not isinstance(reliable, bool):
        raise ErrorMapError(f"reliable is {reliable!r}, expected true or false")
    compiled = [
        (code, pattern) for code, texts in document.items() for pattern in _patterns(code, texts)
    ]
    return ErrorMap(tuple(compiled), reliable)


def _patterns(code: str, texts: Any) -> Iterable[re.Pattern[str]]:
    if code not in CODES:
        raise ErrorMapError(f"{code}: no such code")
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ErrorMapError(f"{code}: expected a list of regular expressions")
    try:
        return [re.compile(text, re.MULTILINE) for text in texts]
    except re.error as error:
        raise ErrorMapError(f"{code}: {error.pattern!r} does not compile: {error}") from error


# -- suggesting


SAID = re.compile(r"[A-Za-z_][\w.]*: *\S.*")
PARTS = re.compile(r"((?<![\w.])/[^\s'\":,;]+|\d+)")
"""What changes from run to run: paths and numbers."""


def suggest(code: str, evidence: str, limit: int = 3) -> tuple[str, ...]:
    """Lines of an error map that would know a refusal, one for each exception of its chain.

    The most telling is for a person to choose. Empty when no exception says anything.
    """
    said = [line for line in evidence.splitlines()[:20] if SAID.fullmatch(line)]
    patterns = dict.fromkeys(pattern(line[:160]) for line in said)
    return tuple(f"{code} = [{literal(one)}]" for one in list(patterns)[:limit])


def pattern(line: str) -> str:
    """A regular expression for a line, whatever its paths and numbers are."""
    return "".join(
        ".*" if part.startswith("/") else r"\d+" if part.isdigit() else escaped(part)
        for part in PARTS.split(line)
    )


def escaped(text: str) -> str:
    """As ``re.escape``, with the spaces and hyphens of a sentence left alone."""
    return re.escape(text).replace("\\ ", " ").replace("\\-", "-")


def literal(text: str) -> str:
    """A TOML string; one without escapes where the text allows it."""
    for quotes in ("'", "'''"):
        if text.isprintable() and quotes not in text:
            return f"{quotes}{text}{quotes}"
    return json.dumps(text).replace("\x7f", "\\u007f")
