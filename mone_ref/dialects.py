"""Everything in a config that looks like a declaration and is not read as one.

An engine that overlooks one of these serves experts that were never loaded, without
a word. So each is an error by name, or a warning where only the spelling is near.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mone_ref import explicit
from mone_ref.declaration import APPROX, Listed, Named
from mone_ref.errors import Code, Severity, show
from mone_ref.fields import ROOT, TEXT_CONFIG, Fields, Found
from mone_ref.strict_json import child

INIT_TOKENS = "approximate_expert_init_tokens"


def check(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Report two forms at once, misplaced forms, dialects and near misses.

    ``listed`` and ``named`` are what the two forms declare, None when not readable.
    """
    check_one_form(fields, listed, named)
    check_misplaced(fields)
    check_mone_block(fields)
    _check_other_holders(fields)
    warn_near_misses(fields)
    if listed is not None and named is not None:
        check_init_tokens(fields, listed or {layer: tuple(ids) for layer, ids in named.items()})


def check_one_form(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Refuse the explicit form beside the approx form (FMT-13, FMT-30)."""
    approx, declared = fields.find(APPROX), explicit.find(fields)
    if approx and declared:
        both = " and ".join(found.path for found in (*approx, *declared))
        clause = "FMT-30" if {} in (listed, named) else "FMT-13"
        fields.report(Code.BOTH_FORMS, declared[0].path, both, "one form", clause)


def check_misplaced(fields: Fields) -> None:
    """Refuse the explicit form in any other place than its own (FMT-16)."""
    declared = explicit.find(fields)
    misplaced = [found.path for found in declared if found.path != explicit.PLACE]
    for path, node in _objects(*fields.holders[-1]):
        if path.endswith(f".{explicit.PATH[-1]}") and node.get("targets") is not None:
            misplaced.append(path)
    for path in dict.fromkeys(misplaced):
        if path != explicit.PLACE:
            expected = f"the explicit form at the top level, as {explicit.PLACE}"
            fields.report(Code.MISPLACED, path, "the explicit form", expected, "FMT-16")


def _objects(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object inside another one, with its path; objects in arrays are not looked at."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield child(path, key), value
            yield from _objects(child(path, key), value)


def check_mone_block(fields: Fields) -> None:
    """Refuse the ``mone`` block of earlier engine branches, which lists the same thing."""
    for found in fields.find("mone"):
        expected = f"{APPROX}: a mone block is recognised but not read"
        fields.report(Code.DIALECT, found.path, show(found.value), expected, "FMT-26")


def _check_other_holders(fields: Fields) -> None:
    """Refuse a list in any other object of the config, where no engine would look (FMT-3)."""
    for path, holder in fields.holders:
        for key, value in holder.items():
            if (path, key) == (ROOT, TEXT_CONFIG) or not isinstance(value, dict):
                continue
            if value.get(APPROX) is not None:
                where = child(child(path, key), APPROX)
                expected = f"the list at {ROOT}.{APPROX} or {ROOT}.{TEXT_CONFIG}.{APPROX}"
                fields.report(Code.MISPLACED, where, show(value[APPROX]), expected, "FMT-3")


def check_init_tokens(fields: Fields, listed: Listed) -> None:
    """Accept all-zero counts beside the list; anything else makes constants evolve (FMT-26)."""
    lengths = {str(layer): len(ids) for layer, ids in listed.items()}
    for found in fields.find(INIT_TOKENS):
        if not isinstance(found.value, dict):
            expected = "an object with one count per listed expert, layer by layer"
            fields.report(Code.DIALECT, found.path, show(found.value), expected, "FMT-26")
            continue
        before = len(fields.problems)
        for layer in {**found.value, **lengths} if found.value else ():
            counts = Found(child(found.path, layer), found.value.get(layer))
            _check_counts(fields, counts, lengths.get(layer, 0))
        if len(fields.problems) == before:
            expected = "no such key: it has no effect"
            fields.report(Code.DIALECT, found.path, "zeros only", expected, "FMT-26", Severity.NOTE)


def _check_counts(fields: Fields, counts: Found, length: int) -> None:
    """The counts of one layer: zeros, as many as listed experts; null is no counts."""
    value = [] if counts.value is None else counts.value
    if not isinstance(value, list) or any(type(count) is not int for count in value):
        expected = "an array of integers"
        fields.report(Code.DIALECT, counts.path, show(value), expected, "FMT-26")
    elif len(value) != length:
        expected = f"{length} counts, one per listed expert"
        fields.report(Code.DIALECT, counts.path, f"{len(value)} counts", expected, "FMT-26")
    elif any(value):
        expected = "zeros: constants that change while the model runs are not supported"
        fields.report(Code.EVOLVING, counts.path, show(value), expected, "FMT-26")


def warn_near_misses(fields: Fields) -> None:
    """Warn about keys that were probably meant as one of ours: they would go unread (FMT-23)."""
    ours = {
        _letters(path[-1]): ".".join(path) for path in ((APPROX,), (INIT_TOKENS,), explicit.PATH)
    }
    holders = [*fields.holders, *explicit.way(fields)]
    for path, holder in holders:
        for key in holder:
            if key in (APPROX, INIT_TOKENS) or child(path, key) == explicit.PLACE:
                continue
            for match in difflib.get_close_matches(_letters(key), ours, n=1, cutoff=0.8):
                expected = f"{ours[match]}, if that was meant; this key is not read"
                fields.report(
                    Code.UNKNOWN_KEY,
                    child(path, key),
                    show(key),
                    expected,
                    "FMT-23",
                    Severity.WARNING,
                )


def _letters(key: str) -> str:
    return re.sub(r"[^a-z]", "", key.lower())
