"""What people read: one failure, the end of a run, and the summary for a CI job."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isnan
from typing import Any

from mone_ref.backend import BackendInfo
from mone_ref.suite.cases import Case
from mone_ref.suite.compare import MULTIPLIER, Numbers
from mone_ref.suite.diagnosis import Diagnosis
from mone_ref.suite.expectations import Agreement, Deviation
from mone_ref.suite.outcomes import UNDECIDED, Outcome, Result
from mone_ref.suite.spec import Clause
from mone_ref.suite.verdict import Verdict, counts

EXCERPT = 24
"""Lines of evidence shown; reports have all of it."""


def failure(
    case: Case,
    result: Result,
    clauses: Mapping[str, Clause],
    command: Sequence[str],
    diagnosis: Diagnosis | None = None,
) -> str:
    """Everything about one case that is not ok, ending with the command that repeats it."""
    lines = [f"{case.id} at {result.dtype}: {result.outcome}", f"  {case.statement}"]
    lines += [
        f"  {name} ({clauses[name].level}): {first_sentence(clauses[name].text)}"
        for name in case.clauses
    ]
    lines += [f"  expected   {result.expected}", f"  found      {result.found}"]
    if result.numbers:
        lines += numbers(result.numbers)
    if diagnosis:
        lines.append(f"  diagnosis  {diagnosis}")
    lines.append(f"  why        {case.why}")
    if result.evidence:
        lines += ["  evidence"] + [f"    | {line}" for line in excerpt(result.evidence)]
    lines.append(f"  reproduce  {reproduce(result, command)}")
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """The start of a clause; ``mone-ref spec ID`` shows it whole."""
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text, maxsplit=1)[0]


def numbers(found: Numbers) -> list[str]:
    """Errors against their budgets: in nats, or in the unit of a layer's output."""
    agrees = f"; the likeliest id agrees for {found.argmax:.0%} of tokens"
    return [
        f"  numbers    worst token {found.token}: {found.token_error:.3g} against "
        f"{MULTIPLIER:g} x {found.token_budget:.3g} (ratio {found.token_ratio:.3g})",
        f"             largest error: {found.max_error:.3g} against "
        f"{MULTIPLIER:g} x {found.max_budget:.3g} (ratio {found.max_ratio:.3g})",
        f"             norm is {found.norm_ratio:.4g} x the golden's"
        + ("" if isnan(found.argmax) else agrees),
    ]


def excerpt(evidence: str, limit: int = EXCERPT) -> list[str]:
    """First and last lines of evidence: the exception leads, the log's end explains."""
    lines = evidence.splitlines()
    if len(lines) <= limit:
        return lines
    head = limit // 2
    left_out = len(lines) - limit
    return [*lines[:head], f"[{left_out} lines left out]", *lines[left_out + head :]]


def reproduce(result: Result, command: Sequence[str]) -> str:
    """One command that runs this case only. ``command`` holds the options that chose the engine."""
    words = ["mone-ref", "conform", *command, "--case", result.case, "--dtype", result.dtype]
    return shlex.join(words)


def engine(info: BackendInfo, dtypes: Collection[str]) -> str:
    """The engine in one line, with the dtypes it was judged at."""
    parts = [f"{name} {version}" for name, version in info.components.items()]
    compute = [
        name if name == how else f"{name} in {how}"
        for name, how in info.compute.items()
        if name in dtypes
    ]
    about = ", ".join([info.device, *compute, *parts])
    return f"{info.name} {info.version} ({about})"


def conclusion(
    verdict: Verdict,
    results: Sequence[Result],
    agreement: Agreement | None,
    info: BackendInfo,
    reliable: bool,
) -> Iterator[str]:
    """The block at the end of a run."""
    yield f"engine       {engine(info, dtypes(results))}"
    yield from (f"work-around  {workaround}" for workaround in info.workarounds)
    if not reliable:
        yield "error map    declares itself unreliable: codes of refusals may be wrong"
    yield "outcomes     " + ", ".join(f"{n} {name}" for name, n in counts(results).items())
    yield from (f"unasked      {count} x {why}" for why, count in unasked(results))
    yield from (f"undecided    {count} x {why}" for why, count in undecided(results))
    yield f"slowest      {slowest(results)}"
    if agreement is not None:
        yield from declarations(agreement)
    if verdict.word is not None:
        yield f"coverage     {verdict.coverage}"
    yield f"verdict      {verdict}"


def dtypes(results: Iterable[Result]) -> set[str]:
    """Dtypes at which something was asked."""
    return {each.dtype for each in results if each.outcome is not Outcome.NOT_APPLICABLE}


def unasked(results: Iterable[Result]) -> list[tuple[str, int]]:
    """Why cases were not applicable, and how many, the commonest reason first."""
    reasons = (result.found for result in results if result.outcome is Outcome.NOT_APPLICABLE)
    return Counter(reasons).most_common()


def undecided(results: Iterable[Result]) -> list[tuple[str, int]]:
    """Why cases that were asked could not be judged, the commonest reason first."""
    asked = (result for result in results if result.outcome in UNDECIDED - {Outcome.NOT_APPLICABLE})
    return Counter(f"{result.outcome}: {result.found}" for result in asked).most_common()


def slowest(results: Sequence[Result], limit: int = 3) -> str:
    """The cases that took longest."""
    ranked = sorted(results, key=lambda result: -result.seconds)[:limit]
    return ", ".join(f"{result.case} {result.dtype} {result.seconds:.1f} s" for result in ranked)


def declarations(agreement: Agreement) -> Iterator[str]:
    """What the expectation file said, and where it was wrong."""
    for (case, dtype), deviation in agreement.declared.items():
        yield f"declared     {case} {dtype}: {deviation.outcome}: {deviation.reason}"
    for (case, dtype), problem in agreement.problems.items():
        yield f"undeclared   {case} {dtype}: {problem}"
    for deviation in agreement.ignored:
        yield f"ignored      {deviation.id}: {deviation.outcome}{conditions(deviation)}"


def conditions(deviation: Deviation) -> str:
    """When a declaration holds."""
    pairs = [(key, getattr(deviation, key)) for key in ("version", "device", "dtype")]
    held = [f"{key} {value}" for key, value in pairs if value]
    return f" (only for {', '.join(held)})" if held else ""


# -- Markdown


def markdown(
    verdict: Verdict,
    results: Sequence[Result],
    agreement: Agreement | None,
    info: BackendInfo,
    statements: Mapping[str, str],
) -> str:
    """A summary for a CI job: the verdict, then every case that is not ok."""
    judged = engine(info, dtypes(results))
    parts = [
        f"## {verdict}",
        f"{judged}, judged on expert substitution by mone-ref: {verdict.coverage}.",
        table(("outcome", "cases"), counts(results).items()),
    ]
    rows = [
        (result.case, result.dtype, result.outcome, statements[result.case], result.found)
        for result in results
        if result.outcome.failed
    ]
    if rows:
        parts += ["### Not ok", table(("case", "dtype", "outcome", "expected", "found"), rows)]
    if agreement and agreement.declared:
        declared = [(*key, entry.reason) for key, entry in agreement.declared.items()]
        parts += ["### Declared", table(("case", "dtype", "reason"), declared)]
    if agreement and agreement.problems:
        problems = [(*key, problem) for key, problem in agreement.problems.items()]
        parts += ["### Not as declared", table(("case", "dtype", "problem"), problems)]
    if info.workarounds:
        parts += ["### Work-arounds in force", "\n".join(f"- {cell(w)}" for w in info.workarounds)]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(value) for value in line)} |" for line in lines)


def cell(value: object) -> str:
    """Text that cannot break out of a table or be taken for markup."""
    text = " ".join(str(value).split())
    for special in "\\|<>`*_[]":
        text = text.replace(special, f"\\{special}")
    return text
