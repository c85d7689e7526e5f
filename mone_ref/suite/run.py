"""One run: which cases at which dtypes, each recorded as it happens, then the verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mone_ref.backend import COMPUTE_TYPES, FEATURES, PARALLEL, Backend, BackendInfo
from mone_ref.errors import Phase, show
from mone_ref.fill import pins
from mone_ref.suite import cases as case_files
from mone_ref.suite import (
    errormap,
    expectations,
    options,
    own_fixtures,
    report,
    spec,
    text,
    verdict,
)
from mone_ref.suite.bench import Options
from mone_ref.suite.cases import Case, Kind
from mone_ref.suite.diagnosis import Diagnosis, Diagnostician
from mone_ref.suite.errormap import ErrorMap
from mone_ref.suite.expectations import Agreement, Deviation
from mone_ref.suite.guard import Failure, Guard
from mone_ref.suite.mistakes import Mistakes
from mone_ref.suite.options import OptionError
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.printable import printable
from mone_ref.suite.runner import Harness
from mone_ref.suite.simulate import Simulator
from mone_ref.suite.spec import Level
from mone_ref.suite.verdict import Verdict

DTYPES = ("float32", "bfloat16", "float16")
LONGEST = 86400
DESCRIBE_LINES = 6
"""Lines shown of what an engine said that could not describe itself."""
FOLDERS = {"error_map": "error_maps", "expectations": "expectations"}
"""Attributes of a backend, and where the suite keeps those files for the engines it knows."""
FAILING = {Level.MUST: "failed", Level.SHOULD: "advice", Level.MAY: "differs"}
"""What a failed case means, by its level: only MUST decides against an engine."""


@dataclass(frozen=True)
class Settings:
    """Options of a run, with their files found; see ``options.OPTIONS``."""

    backend: str
    dtypes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    fixtures: Path | None = None
    error_map: Path | None = None
    expectations: Path | None = None
    write_expectations: Path | None = None
    report: Path | None = None
    markdown: Path | None = None
    call_limit: float = 120.0
    serve_cmd: str = ""
    case_limit: float = 1800.0
    isolate: bool = False
    backend_cmd: str = ""
    diagnosis: bool = True
    command: tuple[str, ...] = ()

    def chosen_by(self) -> list[str]:
        """The options that chose the engine, for a command that repeats a case."""
        words = [f"--backend={self.backend}"]
        if self.serve_cmd:
            words.append(f"--serve-cmd={self.serve_cmd}")
        if self.backend_cmd:
            words = [f"--backend-cmd={self.backend_cmd}"]
        if self.isolate:
            words.append("--isolate")
        words += [f"--engine-arg={text}" for text in self.engine_args]
        if self.fixtures:
            words.append(f"--fixtures={self.fixtures}")
        if self.error_map:
            words.append(f"--error-map={self.error_map}")
        return words


@dataclass
class Run:
    """A run of one engine. ``results`` grow as cases are judged.

    ``oracle`` is the reference in exact arithmetic, which failures are compared with;
    without one none is diagnosed.
    Raises a ``ValueError`` that says what to mend when a file, an option or the
    engine's description of itself cannot be used.
    """

    settings: Settings
    backend: Backend
    root: Path
    oracle: Backend | None = None
    results: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read every file before the first case, so that a bad one costs no engine time."""
        check_places(self.settings)
        check_limit("--call-limit", self.settings.call_limit)
        check_limit("--case-limit", self.settings.case_limit)
        self.info = described(self.backend, self.settings.call_limit)
        self.clauses = spec.load(self.root)
        self.cases = self._find_cases()
        self.levels = verdict.levels(self.cases, self.clauses)
        self.dtypes = chosen_dtypes(self.settings.dtypes, self.info)
        self.planned = [
            (case, dtype)
            for case in chosen_cases(self.settings.patterns, self.cases)
            for dtype in case.dtypes_of(self.dtypes)
        ]
        map_path = self.settings.error_map or self._shipped("error_map")
        self.error_map = errormap.load(map_path) if map_path else ErrorMap()
        self.deviations = self._read_expectations()
        for deviation in self.deviations or ():
            deviation.applies(self.info)  # a condition that cannot be decided is told now
        self.harness = Harness(self.backend, self.info, self.root, self._options())
        self.mistakes = self._diagnose_with(self.oracle) if self.oracle else None
        self.began = time.monotonic()
        self._writer: report.Writer | None = None

    def _find_cases(self) -> tuple[Case, ...]:
        """The suite's cases, on fixtures that are as they were pinned; or the user's own."""
        if self.settings.fixtures:
            return own_fixtures.cases(self.settings.fixtures)
        altered = pins.differences(self.root / "fixtures")
        if altered:
            raise OptionError(f"fixtures are not as they were pinned: {altered[0]}")
        return case_files.load(self.root)

    def _shipped(self, kind: str) -> Path | None:
        """``error_map`` or ``expectations`` of the adapter itself, else the suite's own."""
        own = getattr(self.backend, kind)
        if own is None:
            return existing(self.root / "conformance" / FOLDERS[kind] / f"{self.info.name}.toml")
        if not isinstance(own, Path):
            found = f"{type(self.backend).__name__}.{kind} is {type(own).__name__}"
            raise OptionError(f"{found}, expected a pathlib.Path or None")
        return own

    def _read_expectations(self) -> tuple[Deviation, ...] | None:
        """Declared deviations. What is shipped speaks of the suite's cases, not of a user's."""
        path = self.settings.expectations
        if path is None and not self.settings.fixtures:
            path = self._shipped("expectations")
        return expectations.load(path, {case.id for case in self.cases}) if path else None

    def _options(self) -> Options:
        return Options(
            time_limit=self.settings.call_limit,
            case_limit=self.settings.case_limit,
            engine_args=options.engine_args(self.settings.engine_args),
            error_map=self.error_map,
            dtypes=self.dtypes,
            fixtures=self.settings.fixtures,
        )

    def _diagnose_with(self, oracle: Backend) -> Mistakes | None:
        if not self.settings.diagnosis:
            return None
        here = Options(fixtures=self.settings.fixtures)
        simulator = Simulator(self.root, oracle, options=here)
        return Mistakes(Diagnostician(simulator), self.harness.bench)

    def pairs(self, kinds: Collection[Kind]) -> list[tuple[Case, str]]:
        """Planned cases of some kinds, each with a dtype."""
        return [(case, dtype) for case, dtype in self.planned if case.kind in kinds]

    def judge(self, case: Case, dtype: str) -> Result:
        """Run one case and record it."""
        writer = self._report()
        writer.write(report.start(case.id, dtype))
        result, judgement = self.harness.judge(case, dtype)
        self.results.append(result)
        status = self.status(result)
        if self.mistakes:
            failed = status in FAILING.values() and result.outcome.failed
            self.mistakes.see(case, result, judgement, failed)
        found, known = self.diagnosis(result), self.deviation(result)
        writer.write(report.result(case, self.levels[case.id], result, status, found, known))
        return result

    def diagnosis(self, result: Result) -> Diagnosis | None:
        """What explains an undeclared failure, where it was looked for."""
        return self.mistakes.of(result) if self.mistakes else None

    def _report(self) -> report.Writer:
        """The report, with its header, from the first case on."""
        if self._writer is None:
            self._writer = report.Writer(self.settings.report)
            head = (self.root, self.info, self.dtypes, self.settings.command)
            own = self.settings.fixtures
            self._writer.write(report.header(*head, self.error_map.reliable, own))
        return self._writer

    # -- what a result means

    def agreement(self) -> Agreement | None:
        """Results against the expectation file, where there is one; other cases left aside."""
        if self.deviations is None:
            return None
        return self._agree(self.results)

    def problem(self, result: Result) -> str:
        """How a result disagrees with the expectation file; empty when it does not."""
        if self.deviations is None:
            return ""
        return self._agree([result]).problems.get((result.case, result.dtype), "")

    def deviation(self, result: Result) -> Deviation | None:
        """The declaration that a result agrees with."""
        return self._agree([result]).declared.get((result.case, result.dtype))

    def _agree(self, results: Sequence[Result]) -> Agreement:
        """Only cases that ran, at dtypes of this run, can be held against a declaration."""
        results = [result for result in results if result.dtype in self.dtypes]
        judged = {result.case for result in results}
        entries = [entry for entry in self.deviations or () if entry.id in judged]
        return expectations.agree(results, entries, self.info)

    def status(self, result: Result) -> str:
        """What the outcome means for this run: ``ok``, ``failed``, ``advice``, ``differs``
        (a base model), ``declared`` or ``undecided``."""
        if self.problem(result):
            return "failed"
        if self.deviation(result):
            return "declared"
        if result.outcome.failed:
            return FAILING[self.levels[result.case]]
        return "ok" if result.outcome is Outcome.OK else "undecided"

    def failures(self) -> int:
        """How many cases a test runner has counted as failed."""
        return sum(self.status(result) in FAILING.values() for result in self.results)

    def explain(self, result: Result) -> str:
        """The text about a case that is not ok."""
        case = next(case for case in self.cases if case.id == result.case)
        clauses = {clause.id: clause for clause in self.clauses}
        told = text.failure(
            case, result, clauses, self.settings.chosen_by(), self.diagnosis(result)
        )
        problem = self.problem(result)
        return f"not as declared: {problem}\n{told}" if problem else told

    # -- the end

    @property
    def partial(self) -> bool:
        """Whether anything that a whole run has is missing: no clause rests on own fixtures."""
        if self.settings.fixtures:
            return True
        whole = {(case.id, d) for case in self.cases for d in case.dtypes_of(self.dtypes)}
        return whole != {(result.case, result.dtype) for result in self.results}

    def verdict(self) -> Verdict:
        """The verdict on what was judged so far."""
        return verdict.conclude(
            self.results, self.cases, self.clauses, self.partial, self.info.parallel
        )

    def passes(self) -> bool:
        """Whether the run leaves exit code 0: by its verdict, or by its declarations.

        A partial run has no verdict; it passes when something was judged, nothing failed
        and nothing but inapplicable cases stayed undecided.
        """
        if self.partial:
            return self._partly_passes()
        concluded, agreement = self.verdict(), self.agreement()
        if agreement is None:
            return concluded.word is not None and concluded.word.good
        return not agreement.problems and set(concluded.missing) <= self._declared_groups(agreement)

    def _partly_passes(self) -> bool:
        told = [(self.status(result), result.outcome) for result in self.results]
        undecided = {outcome for status, outcome in told if status == "undecided"}
        judged = any(status != "undecided" for status, _ in told)
        failed = any(status in ("failed", "differs") for status, _ in told)
        return judged and not failed and undecided <= {Outcome.NOT_APPLICABLE}

    def _declared_groups(self, agreement: Agreement) -> set[str]:
        """Clause groups of cases that the expectation file names."""
        named = {case for case, _ in agreement.declared}
        cited = {name for case in self.cases if case.id in named for name in case.clauses}
        return {clause.group for clause in self.clauses if clause.id in cited}

    def finish(self) -> list[str]:
        """Close the engine, write what was asked for, and return the closing lines."""
        closing = self.harness.close()
        concluded, agreement = self.verdict(), self.agreement()
        lines = [f"closing      the engine failed to: {closing.first_line}"] if closing else []
        lines += text.conclusion(
            concluded, self.results, agreement, self.info, self.error_map.reliable
        )
        if self.settings.fixtures:
            lines.append(f"fixtures     {own_told(self.settings.fixtures, self.results)}")
        if self.mistakes:
            lines += self.mistakes.lines()
            self.mistakes.close()
        problems = agreement.problems if agreement else {}
        named = {f"{case} {dtype}": problem for (case, dtype), problem in problems.items()}
        seconds = time.monotonic() - self.began
        self._report().write(report.footer(concluded, self.results, named, seconds))
        self._report().close()
        if self.settings.markdown:
            statements = {case.id: case.statement for case in self.cases}
            told = text.markdown(concluded, self.results, agreement, self.info, statements)
            self.settings.markdown.write_text(told, encoding="utf-8")
        if self.settings.write_expectations:
            lines.append(self._write_expectations(self.settings.write_expectations))
        return lines

    def _write_expectations(self, path: Path) -> str:
        if self.partial:
            return f"expectations not written: {path} needs a whole run"
        written = expectations.write(self.results, self.deviations or (), self.info)
        path.write_text(written, encoding="utf-8")
        return f"expectations written to {path}; every entry needs a reason"


def check_limit(flag: str, seconds: float) -> None:
    """A time that can be waited. Raises ``OptionError``."""
    if not 0 < seconds <= LONGEST:
        raise OptionError(f"{flag} {seconds:g}: expected seconds in (0, {LONGEST}]")


def existing(path: Path) -> Path | None:
    """A path, if there is such a file."""
    return path if path.is_file() else None


def own_told(directory: Path, results: Sequence[Result]) -> str:
    """How far a run on a user's own fixtures reaches."""
    count = len({result.case for result in results})
    return f"{count} of your own in {directory}; they decide about no clause of the specification"


def check_places(settings: Settings) -> None:
    """Every file of the run must be one of its own that can be written. Raises ``OptionError``."""
    places = (settings.report, settings.markdown, settings.write_expectations)
    given = [path for path in places if path is not None]
    for index, path in enumerate(given):
        if path.resolve() in {other.resolve() for other in given[:index]}:
            raise OptionError(f"{path}: two options write this file")
        if not path.parent.is_dir():
            raise OptionError(f"{path}: there is no such directory")
        if path.exists() and not path.is_file():
            raise OptionError(f"{path}: not a regular file")
        place = path if path.exists() else path.parent
        if not os.access(place, os.W_OK):
            raise OptionError(f"{path}: cannot be written")


TEXT, TEXTS = (str, "a text"), (Mapping, "a mapping of texts to texts")
INFO_TYPES: Mapping[str, tuple[Any, str]] = {
    "name": TEXT,
    "version": TEXT,
    "device": TEXT,
    "compute": TEXTS,
    "features": (Set, "a set of texts"),
    "components": TEXTS,
    "workarounds": (tuple, "a tuple of texts"),
    "parallel": (Set, "a set of texts"),
}
"""Fields of ``BackendInfo``: type, and what to say of another one."""


def words(value: Any) -> list[Any]:
    """Every word of a field of ``BackendInfo``, keys and values of a mapping."""
    if isinstance(value, str):
        return [value]
    return [*value, *value.values()] if isinstance(value, Mapping) else list(value)


def described(backend: Backend, limit: float = Options.time_limit) -> BackendInfo:
    """The engine's description of itself, given within ``limit`` seconds.

    Raises ``OptionError``, on one line, when it is not given or makes no sense.
    """
    info = Guard(ErrorMap(), limit).call(Phase.INIT, backend.describe)
    if isinstance(info, Failure):
        told = " | ".join(text.excerpt(printable(info.evidence), DESCRIBE_LINES))
        raise OptionError(f"the engine cannot describe itself: {told}")
    if not isinstance(info, BackendInfo):
        raise OptionError(f"describe() returned {type(info).__name__}, not BackendInfo")
    for name, (kind, expected) in INFO_TYPES.items():
        value = getattr(info, name)
        if not isinstance(value, kind) or not all(isinstance(text, str) for text in words(value)):
            raise OptionError(f"describe(): {name} is {show(value)}, expected {expected}")
    known: Iterable[tuple[str, Iterable[Any], Sequence[str]]] = (
        ("dtype", info.compute, DTYPES),
        ("compute type", info.compute.values(), COMPUTE_TYPES),
        ("feature", info.features, FEATURES),
        ("number of ranks", info.parallel, PARALLEL),
    )
    for what, given, allowed in known:
        foreign = [name for name in given if name not in allowed]
        if foreign:
            raise OptionError(f"{info.name}: {foreign[0]!r} is no {what}; known: {allowed}")
    if not info.compute:
        raise OptionError(f"{info.name} declares no dtype")
    return info


def chosen_dtypes(wanted: Sequence[str], info: BackendInfo) -> tuple[str, ...]:
    """The dtypes of a run. Raises ``OptionError``."""
    foreign = [dtype for dtype in wanted if dtype not in info.compute]
    if foreign:
        offered = ", ".join(info.compute)
        raise OptionError(f"--dtype {foreign[0]}: {info.name} runs {offered}")
    return tuple(dict.fromkeys(wanted)) or tuple(info.compute)


def chosen_cases(patterns: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """The cases that match any pattern; all without one. Raises ``OptionError``."""
    for pattern in patterns:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            raise OptionError(f"--case {pattern}: no such case")
    if not patterns:
        return list(cases)
    return [case for case in cases if any(fnmatchcase(case.id, name) for name in patterns)]
