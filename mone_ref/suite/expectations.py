"""Declared deviations of one engine, so that its CI notices every change, for better or worse.

``expectations/<backend>.toml`` holds ``[[deviation]]`` tables: ``id``, ``outcome``,
``reason``, and optionally ``link`` and ``when`` (``version``, ``device``, ``dtype``).
A file that agrees with the results makes the exit code 0. It never changes the verdict.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from mone_ref.backend import BackendInfo
from mone_ref.checkpoint.opening import read_regular
from mone_ref.suite.outcomes import Outcome, Result

FIELDS = {"id", "outcome", "reason", "link", "when"}
CONDITIONS = {"version", "device", "dtype"}
UNDECLARED = (Outcome.OK, Outcome.NOT_APPLICABLE)
"""Outcomes that need no declaration. That a case is not applicable may be declared, and has
to be where a whole group of MUST clauses is left unjudged by it."""


class ExpectationError(ValueError):
    """A broken expectation file; names the file and the entry."""


@dataclass(frozen=True)
class Deviation:
    """One entry. Empty conditions always hold."""

    id: str
    outcome: Outcome
    reason: str
    link: str = ""
    version: str = ""
    device: str = ""
    dtype: str = ""

    def applies(self, info: BackendInfo) -> bool:
        """Whether the engine at hand is meant. Raises ``ExpectationError``."""
        if self.device and self.device != info.device:
            return False
        return not self.version or matches(info.version, self.version)


def specifiers(wanted: str) -> SpecifierSet:
    """A condition on versions. Raises ``ExpectationError``."""
    try:
        return SpecifierSet(wanted if wanted[:1] in "<>=!~" else f"=={wanted}")
    except InvalidSpecifier:
        raise ExpectationError(f"when.version {wanted!r} is no version specifier") from None


def matches(version: str, wanted: str) -> bool:
    """Whether a version satisfies ``0.33.*``, ``>=0.33,<0.34`` or just ``0.33.0``."""
    try:
        return specifiers(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        raise ExpectationError(
            f"when.version cannot be decided: the engine's version {version!r} is none"
        ) from None


@dataclass(frozen=True)
class Agreement:
    """Results against a file: ``declared`` ones agree, ``problems`` do not, ``ignored``
    entries are about another version, device or dtype."""

    declared: Mapping[tuple[str, str], Deviation] = field(default_factory=dict)
    problems: Mapping[tuple[str, str], str] = field(default_factory=dict)
    ignored: tuple[Deviation, ...] = ()


def load(path: Path, case_ids: Collection[str]) -> tuple[Deviation, ...]:
    """Read an expectation file. Raises ``ExpectationError`` for everything that is not so."""
    try:
        document = tomllib.loads(read_regular(path).decode("utf-8"))
        return parse(document, case_ids)
    except (OSError, ValueError) as error:
        raise ExpectationError(f"{path}: {error}") from error


def parse(document: Mapping[str, Any], case_ids: Collection[str]) -> tuple[Deviation, ...]:
    """Entries of a TOML document. Raises ``ExpectationError`` without a file name."""
    entries = document.get("deviation", [])
    if set(document) - {"deviation"} or not isinstance(entries, list):
        raise ExpectationError("expected [[deviation]] tables and nothing else")
    return tuple(_deviation(entry, case_ids) for entry in entries)


def _deviation(entry: Mapping[str, Any], case_ids: Collection[str]) -> Deviation:
    if not isinstance(entry, dict) or "id" not in entry:
        raise ExpectationError("every [[deviation]] needs an id")
    name, when = entry["id"], entry.get("when", {})
    if not isinstance(when, dict):
        raise ExpectationError(f"{name}: when is a table of version, device, dtype")
    unknown = sorted(set(entry) - FIELDS) + sorted(set(when) - CONDITIONS)
    if unknown:
        raise ExpectationError(f"{name}: unknown key {unknown[0]}")
    texts = [value for value in (*entry.values(), *when.values()) if value is not when]
    if not all(isinstance(text, str) for text in texts):
        raise ExpectationError(f"{name}: every value is a text")
    if name not in case_ids:
        raise ExpectationError(f"{name}: no such case")
    if entry.get("outcome") not in set(Outcome) - {Outcome.OK}:
        raise ExpectationError(f"{name}: outcome {entry.get('outcome')!r} is no deviation")
    if not entry.get("reason", "").strip():
        raise ExpectationError(f"{name}: a deviation needs a reason")
    if when.get("version"):
        specifiers(when["version"])
    outcome = Outcome(entry["outcome"])
    return Deviation(entry["id"], outcome, entry["reason"], entry.get("link", ""), **when)


def agree(
    results: Sequence[Result],
    deviations: Sequence[Deviation],
    info: BackendInfo,
) -> Agreement:
    """Hold results against declarations, strictly both ways."""
    applying = [deviation for deviation in deviations if deviation.applies(info)]
    declared: dict[tuple[str, str], Deviation] = {}
    problems: dict[tuple[str, str], str] = {}
    used: set[Deviation] = set()
    for result in results:
        entries = [entry for entry in applying if meant(entry, result)]
        used.update(entries)
        problem = disagreement(result, entries)
        key = (result.case, result.dtype)
        if problem:
            problems[key] = problem
        elif entries:
            declared[key] = entries[0]
    ignored = tuple(deviation for deviation in deviations if deviation not in used)
    return Agreement(declared, problems, ignored)


def meant(deviation: Deviation, result: Result) -> bool:
    """Whether an entry speaks about a result."""
    return deviation.id == result.case and deviation.dtype in ("", result.dtype)


def disagreement(result: Result, entries: Sequence[Deviation]) -> str:
    """How a result differs from what was declared for it; empty when it does not."""
    if len(entries) > 1:
        return f"declared {len(entries)} times"
    if not entries:
        return "" if result.outcome in UNDECLARED else f"{result.outcome}, which is not declared"
    if result.outcome is entries[0].outcome:
        return ""
    return f"declared {entries[0].outcome}, found {result.outcome}"


# -- writing


def write(results: Sequence[Result], existing: Sequence[Deviation], info: BackendInfo) -> str:
    """An expectation file that agrees with the results.

    Reasons, links and conditions of entries that still hold are kept, as are entries
    about other versions and devices. New entries have an empty reason, which
    ``load`` refuses until someone writes one.
    """
    other = [entry for entry in existing if not entry.applies(info)]
    applying = [entry for entry in existing if entry.applies(info)]
    return dump([*other, *dict.fromkeys(needed(results, applying))])


def needed(results: Sequence[Result], existing: Sequence[Deviation]) -> Iterable[Deviation]:
    """One entry per case where all dtypes agree, else one per dtype."""
    for case in dict.fromkeys(result.case for result in results):
        mine = [result for result in results if result.case == case]
        same = len({result.outcome for result in mine}) == 1
        for result in mine:
            if result.outcome in UNDECLARED:
                continue
            dtype = "" if same else result.dtype
            new = Deviation(case, result.outcome, "", dtype=dtype)
            kept = [old for old in existing if meant(old, result) and old.outcome is new.outcome]
            yield replace(kept[0], dtype=dtype) if kept else new


def dump(deviations: Iterable[Deviation]) -> str:
    """TOML text of entries."""
    return "\n".join(_table(deviation) for deviation in deviations)


def _table(deviation: Deviation) -> str:
    lines = ["[[deviation]]"]
    lines += [f"{key} = {_text(str(getattr(deviation, key)))}" for key in ("id", "outcome")]
    lines.append(f"reason = {_text(deviation.reason)}")
    if deviation.link:
        lines.append(f"link = {_text(deviation.link)}")
    when = [
        f"{key} = {_text(getattr(deviation, key))}"
        for key in ("version", "device", "dtype")
        if getattr(deviation, key)
    ]
    if when:
        lines.append(f"when = {{{', '.join(when)}}}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's, but DEL needs one in TOML only."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
