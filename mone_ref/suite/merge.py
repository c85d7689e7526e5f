"""Reports of several engines as one, where they fit: whole, of one suite, over the same cases."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mone_ref.errors import show
from mone_ref.suite import cases as case_files
from mone_ref.suite import options, own_fixtures, report, spec
from mone_ref.suite.cases import Case
from mone_ref.suite.report import Report, ReportError
from mone_ref.suite.spec import Clause

CHOOSING = (
    "--backend",
    "--backend-cmd",
    "--serve-cmd",
    "--isolate",
    "--engine-arg",
    "--error-map",
)
"""Options that say which engine was judged, and how it was started."""


@dataclass(frozen=True)
class Engine:
    """One run. ``arguments`` are the options that chose the engine."""

    path: Path
    report: Report
    arguments: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name and version."""
        backend = self.report.header["backend"]
        return f"{backend['name']} {backend['version']}"

    @property
    def setting(self) -> str:
        """Device and the arguments of the engine: what tells two runs of one version apart."""
        given = [word for word in self.arguments if word.startswith("--engine-arg")]
        values = [word.removeprefix("--engine-arg=") for word in given]
        return ", ".join([self.report.header["backend"]["device"], *values])

    def results_of(self, case: str) -> list[Mapping[str, Any]]:
        """Results of one case, in the order of the run."""
        return [result for result in self.report.results if result["case"] == case]

    def reproduce(self, case: str, dtypes: Sequence[str]) -> str:
        """One command that runs this case at these dtypes again."""
        chosen = [word for dtype in dtypes for word in ("--dtype", dtype)]
        return shlex.join(["mone-ref", "conform", *self.arguments, "--case", case, *chosen])


@dataclass(frozen=True)
class Merged:
    """Engines in the order given, with the texts of the suite that judged them.

    ``cases`` are those that ran. ``not_judged`` says why a clause has no case.
    """

    engines: tuple[Engine, ...]
    cases: tuple[Case, ...]
    clauses: tuple[Clause, ...]
    not_judged: Mapping[str, str]


def merge(paths: Sequence[Path], root: Path) -> Merged:
    """Read reports that were made with the suite at ``root``. Raises ``ReportError``.

    Refused, with the file's name: a report that is incomplete, of another suite, of one's
    own fixtures, of a case that this suite does not have, over other cases than the first
    report, or of an engine that another report is already about.
    """
    engines = [read(path) for path in paths]
    suite = {case.id: case for case in case_files.load(root)}
    for index, engine in enumerate(engines):
        try:
            check_suite(engine, root)
            check_cases(engine, suite)
            for other in engines[:index]:
                check_pair(engine, other)
        except ReportError as error:
            raise ReportError(f"{engine.path}: {error}") from None
    ran = cases_of(engines[0])
    reasons = spec.read_not_judged(root)
    return Merged(
        tuple(engines),
        tuple(case for name, case in suite.items() if name in ran),
        spec.load(root),
        {name: reason for section in reasons.values() for name, reason in section.items()},
    )


def read(path: Path) -> Engine:
    """One report. Raises ``ReportError`` with its name, ``OSError`` where there is no file."""
    try:
        found = report.read(path)
        return Engine(path, found, chosen_by(found.header["command"]))
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None


def chosen_by(command: Sequence[str]) -> tuple[str, ...]:
    """The words of a command that chose the engine, each option in one word."""
    found, left = [], iter(command)
    for word in left:
        flag, equals, _ = word.partition("=")
        if flag not in CHOOSING:
            continue
        is_switch = options.OPTIONS.get(flag, {}).get("action") == "store_true"
        found.append(word if equals or is_switch else f"{word}={next(left, '')}")
    return tuple(found)


def check_suite(engine: Engine, root: Path) -> None:
    """The texts beside a result must be those of the suite that judged."""
    if any(case.startswith(f"{own_fixtures.PREFIX}/") for case in cases_of(engine)):
        raise ReportError("about fixtures of your own, which are no part of the suite")
    judged, installed = engine.report.header["suite"]["sha256"], report.suite_hash(root)
    if judged != installed:
        version = show(engine.report.header["suite"]["version"])
        raise ReportError(
            f"judged by another suite: version {version}, sha256 {judged[:12]}, "
            f"expected {installed[:12]}, which is installed here"
        )


def check_cases(engine: Engine, suite: Mapping[str, Case]) -> None:
    """Every result is of a case of the suite, none twice; a verdict rests on all cases."""
    seen = set()
    for result in engine.report.results:
        key = result["case"], result["dtype"]
        if result["case"] not in suite:
            raise ReportError(f"case {show(result['case'])} is not in the suite")
        if key in seen:
            raise ReportError(f"two results of {' at '.join(map(show, key))}")
        seen.add(key)
    left_out = suite.keys() - cases_of(engine)
    if engine.report.footer["verdict"] is not None and left_out:
        raise ReportError(f"a verdict without {len(left_out)} cases, such as {min(left_out)}")
    if not seen:
        raise ReportError("no result")


def check_pair(engine: Engine, other: Engine) -> None:
    """Two reports side by side are about two engines and the same cases."""
    if (engine.title, engine.setting) == (other.title, other.setting):
        told = show(f"{engine.title} ({engine.setting})")
        raise ReportError(f"{told} is already the engine of {other.path}")
    different = cases_of(engine) ^ cases_of(other)
    if different:
        raise ReportError(
            f"other cases than {other.path}: only one of both has {len(different)}, "
            f"such as {min(different)}"
        )


def cases_of(engine: Engine) -> set[str]:
    """Ids of the cases that ran."""
    return {result["case"] for result in engine.report.results}
