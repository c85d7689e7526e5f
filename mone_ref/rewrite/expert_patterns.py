"""Entries of a quantisation config that name single experts: a prune gives experts other numbers.

``targets`` and ``ignore`` of compressed-tensors, and lists of other methods, hold names of modules
or, after ``re:``, regular expressions. Names are held against the plan. Expressions are not run,
since one from a file can run for ever: a number in the place of the id is enough for a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from mone_ref.config import FILE
from mone_ref.errors import Code, Phase, Problem, Severity, show
from mone_ref.rewrite import names
from mone_ref.rewrite.decisions import Choice, Decisions
from mone_ref.rewrite.structure import Structure
from mone_ref.strict_json import child

HOLDERS = ("quantization_config", "compression_config")
PATTERN = "re:"

_SEPARATOR = re.compile(r"\\?\.")
_ANY_DIGIT = re.compile(r"\\d|0-9|\{[0-9,]*\}")  # and how often: no number of an expert
_NUMBER = re.compile("(?<![A-Za-z0-9_])[0-9]")  # not that of w1
_ROUTED = re.compile(f"(?<!shared_){names.EXPERTS}$")


def problems(structure: Structure, decisions: Decisions) -> Iterator[Problem]:
    """Names of experts whose numbers change (MODEL_FIELD); patterns with numbers (ENGINE_LIMIT)."""
    if not decisions.choices:
        return
    for holder in structure.settings.find(HOLDERS):
        for where, entry in _texts(holder.path, holder.value):
            if entry.startswith(PATTERN):
                if _has_number(entry.removeprefix(PATTERN)):
                    yield _numbered_pattern(where, entry)
            elif (change := _change(entry, decisions)) is not None:
                expected = "no name of an expert whose number changes: it would be another's"
                found = f"{show(entry)}, {change}"
                yield Problem(Code.MODEL_FIELD, Phase.PARSE, where, found, expected, FILE)


def _texts(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Every text in a config object with its path, keys included."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield child(path, key), key
            yield from _texts(child(path, key), item)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _texts(child(path, at), item)


def _has_number(pattern: str) -> bool:
    """Whether a pattern has a number where the id of an expert stands: after ``experts.``."""
    words = _SEPARATOR.split(pattern)
    ids = (after for word, after in pairwise(words) if _ROUTED.search(word))
    return any(_NUMBER.search(_ANY_DIGIT.sub("", text)) for text in ids)


def _change(name: str, decisions: Decisions) -> str | None:
    """What becomes of the expert that a module's name tells; None where its number stays."""
    parts = names.split(f"{name}.weight")
    expert = names.expert_of(parts[1]) if parts else None
    if parts is None or expert is None:
        return None
    for choice in decisions.choices:
        if _is_in(choice, parts[0]) and expert[0] in choice.gone:
            return "an expert that is not kept"
        if _is_in(choice, parts[0]) and expert[0] in choice.kept:
            new = choice.kept.index(expert[0])
            if new != expert[0]:
                return f"an expert that becomes number {new}"
    return None


def _is_in(choice: Choice, block: str) -> bool:
    """Whether a path, whole or only its end, is that of a layer's block; prefixes differ."""
    paths = f".{choice.layer.block}", f".{block}"
    return paths[0].endswith(paths[1]) or paths[1].endswith(paths[0])


def _numbered_pattern(where: str, entry: str) -> Problem:
    found = f"{show(entry)}, which names experts by their old numbers"
    expected = "a pattern for all experts, or one for the numbers after pruning"
    warning = Severity.WARNING
    return Problem(Code.ENGINE_LIMIT, Phase.PARSE, where, found, expected, FILE, warning)
