"""The record of a run: JSON lines, written as things happen, complete only with their last line.

``header``, then ``start`` and ``result`` for every case and dtype, then ``footer``
(``report.schema.json``). An engine that takes the process down leaves a file whose
last line is a ``start``: it names the case, and no reader mistakes it for a whole run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jsonschema

from mone_ref import __version__
from mone_ref.backend import BackendInfo
from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import show
from mone_ref.fill import pins
from mone_ref.suite import spec
from mone_ref.suite.cases import Case
from mone_ref.suite.diagnosis import Diagnosis
from mone_ref.suite.expectations import Deviation
from mone_ref.suite.outcomes import Result
from mone_ref.suite.verdict import Verdict, counts

FORMAT = 1
"""Version of the lines; it changes when a reader of the old one would misread the new one."""
KINDS = ("header", "start", "result", "footer")


class ReportError(ValueError):
    """A report that is not whole, or not one at all; names the line."""


@dataclass(frozen=True)
class Report:
    """A whole report."""

    header: Mapping[str, Any]
    results: tuple[Mapping[str, Any], ...]
    footer: Mapping[str, Any]


# -- writing


def header(
    root: Path,
    info: BackendInfo,
    dtypes: Iterable[str],
    command: Iterable[str],
    reliable: bool,
    own: Path | None = None,
) -> dict[str, Any]:
    """What was judged, by what.

    ``reliable`` is what the error map says of itself, ``own`` a user's fixtures, where the
    run is about those.
    """
    return {
        "kind": "header",
        "format": FORMAT,
        "suite": {
            "version": __version__,
            "sha256": own_hash(own) if own else suite_hash(root),
            "source_sha256": spec.source_hash(spec.read_text(root)),
        },
        "backend": {
            **asdict(info),
            "compute": dict(info.compute),
            "components": dict(info.components),
            "features": sorted(info.features),
            "parallel": sorted(info.parallel),
        },
        "dtypes": list(dtypes),
        "error_map_reliable": reliable,
        "command": list(command),
    }


def start(case: str, dtype: str) -> dict[str, Any]:
    """Written before a case runs."""
    return {"kind": "start", "case": case, "dtype": dtype}


def result(
    case: Case,
    level: str,
    found: Result,
    status: str,
    diagnosis: Diagnosis | None = None,
    deviation: Deviation | None = None,
) -> dict[str, Any]:
    """Written after it. ``status`` is what the outcome means for this run.

    ``deviation`` is the entry of the expectation file that the outcome agrees with.
    """
    line = {"kind": "result", "level": level, "clauses": list(case.clauses), "status": status}
    told = diagnosis.as_dict() if diagnosis else None
    declared = {"reason": deviation.reason, "link": deviation.link} if deviation else None
    return line | found.as_dict() | {"diagnosis": told, "declared": declared}


def footer(
    verdict: Verdict, results: Iterable[Result], problems: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """The end of a run. ``problems`` are disagreements with the expectation file."""
    return {
        "kind": "footer",
        "verdict": str(verdict.word) if verdict.word else None,
        "missing_groups": list(verdict.missing),
        "coverage": asdict(verdict.coverage),
        "counts": counts(results),
        "expectation_problems": dict(problems),
        "seconds": round(seconds, 3),
    }


class Writer:
    """Appends lines and flushes each, so that a dying process loses none."""

    def __init__(self, path: Path | None) -> None:
        """Without a path, nothing is written."""
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path else None

    def write(self, line: Mapping[str, Any]) -> None:
        """One line."""
        if self._file:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """End of the file; without a footer it stays an incomplete one."""
        if self._file:
            self._file.close()


def suite_hash(root: Path) -> str:
    """The sha256 over every case, name and bytes, and over the hashes of the fixtures."""
    digest = hashlib.sha256()
    files = [*(root / "conformance").rglob("*.yaml"), *(root / "conformance").rglob("goldens/**/*")]
    for path in [
        *sorted(path for path in files if path.is_file()),
        root / "fixtures" / "SHA256SUMS",
    ]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def own_hash(fixtures: Path) -> str:
    """The sha256 over every file of a user's own fixtures, name and content."""
    digest = hashlib.sha256()
    for name, content in pins.current(fixtures).items():
        digest.update(f"{content}  {name}\n".encode())
    return digest.hexdigest()


# -- reading


def read(path: Path) -> Report:
    """Read a whole report. Raises ``ReportError`` when a line is missing, broken or misplaced."""
    lines = [parse(number, line) for number, line in enumerate(read_regular(path).splitlines(), 1)]
    if not lines or lines[0]["kind"] != "header":
        raise ReportError("line 1: a report starts with its header")
    check_order(lines)
    results = tuple(line for line in lines if line["kind"] == "result")
    return Report(lines[0], results, lines[-1])


def parse(number: int, text: bytes) -> dict[str, Any]:
    """One line, checked against the schema."""
    try:
        line: Any = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"line {number}: {error}") from error
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind not in KINDS:
        expected = f"expected an object whose kind is {' or '.join(KINDS)}"
        raise ReportError(f"line {number}: found {show(line)}, {expected}")
    broken = jsonschema.exceptions.best_match(validator(kind).iter_errors(line))
    if broken is not None:
        told = show(f"{broken.json_path}: {broken.message}", 300)
        raise ReportError(f"line {number}: {told}")
    checked: dict[str, Any] = line
    return checked


def refuse_constant(name: str) -> NoReturn:
    """NaN and infinities are not JSON. Raises ``ValueError``."""
    raise ValueError(f"{name} is not JSON")


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """Of one line of a kind, so that a flaw is told by its place and not as "no line at all"."""
    text = Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8")
    definitions = json.loads(text)["$defs"]
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": definitions})


def check_order(lines: list[dict[str, Any]]) -> None:
    """Header, pairs of start and result for the same case and dtype, footer."""
    running: dict[str, Any] | None = None
    for number, line in enumerate(lines[1:], 2):
        kind = line["kind"]
        due = ("result",) if running else ("start", "footer")
        if kind not in due:
            raise ReportError(f"line {number}: {kind}, expected {' or '.join(due)}")
        if running and (line["case"], line["dtype"]) != (running["case"], running["dtype"]):
            raise ReportError(f"line {number}: result of {line['case']}, not {running['case']}")
        if kind == "footer" and number != len(lines):
            raise ReportError(f"line {number}: a footer before the end")
        running = line if kind == "start" else None
    if running:
        raise ReportError(
            f"incomplete: the engine's process died during {running['case']} at {running['dtype']}"
        )
    if lines[-1]["kind"] != "footer":
        raise ReportError("incomplete: the run was ended between two cases")


# -- comparing


def differences(one: Report, other: Report) -> list[str]:
    """Where two runs of one suite on one engine do not agree, a line each.

    Compared are the outcome of every case and dtype of both runs, and codes and phase of its
    refusal. Times and the last digits of numbers may differ from run to run.
    """
    first, second = (by_case(run) for run in (one, other))
    lines = []
    for key in common(one, other):
        told = [told_of(run[key]) for run in (first, second)]
        if told[0] != told[1]:
            lines.append(f"{' at '.join(key)}: {told[0]}, then {told[1]}")
    return lines


def common(one: Report, other: Report) -> list[tuple[str, str]]:
    """Cases of both runs, each with a dtype that both were asked for."""
    dtypes = set(one.header["dtypes"]) & set(other.header["dtypes"])
    return sorted(key for key in by_case(one).keys() & by_case(other) if key[1] in dtypes)


def by_case(run: Report) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Results by case and dtype."""
    return {(line["case"], line["dtype"]): line for line in run.results}


def told_of(result: Mapping[str, Any]) -> str:
    """The part of a result that a second run repeats."""
    words = [result["outcome"], result["phase"], *result["codes"]]
    return " ".join(word for word in words if word)
