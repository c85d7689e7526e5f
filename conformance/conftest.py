"""pytest's side of the suite: options, one test per case and dtype, the exit code.

Everything that decides anything is in ``mone_ref.suite``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mone_ref import backends
from mone_ref.backends import BackendError
from mone_ref.backends.exact import ExactBackend
from mone_ref.suite import data, options, smoke
from mone_ref.suite.cases import Case
from mone_ref.suite.printable import printable
from mone_ref.suite.run import Run, Settings

RUN = pytest.StashKey[Run]()
CLOSING = pytest.StashKey[list[str]]()
STATUS = "conformance"
WORDS = {
    "failed": ("failed", "F", "FAILED"),
    "advice": ("advice", "a", "ADVICE"),
    "differs": ("differs", "d", "DIFFERS"),
    "undecided": ("undecided", "u", "UNDECIDED"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "expert substitution conformance")
    for flag, settings in options.OPTIONS.items():
        group.addoption(options.RENAMED.get(flag, flag), **settings)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.help or config.option.version:
        return
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None):
        raise pytest.UsageError("one verdict needs one process: run without -n")
    try:
        settings = read_settings(config)
        engine = backends.chosen(settings)
        config.stash[RUN] = Run(settings, engine, data.root(), ExactBackend())
    except (BackendError, OSError, ValueError) as error:
        raise pytest.UsageError(printable(str(error))) from error


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """A smoke run instead of a session of tests, where one is asked for."""
    if not config.option.smoke or config.option.help or config.option.version:
        return None
    try:
        settings = read_settings(config)
        backend = backends.chosen(settings)
        tell_progress("the smoke run")
        passed = smoke.tell(settings, backend, data.root(), partial(print, flush=True))
        tell_progress(options.DONE)
        return int(not passed)
    except (BackendError, OSError, ValueError) as error:
        raise pytest.UsageError(printable(str(error))) from error


def pytest_unconfigure() -> None:
    tell_progress(options.DONE)


def tell_progress(what: str) -> None:
    """Leave a trace for whoever started this process, in case it does not come back."""
    if os.environ.get(options.PROGRESS):
        Path(os.environ[options.PROGRESS]).write_text(what, encoding="utf-8")


def read_settings(config: pytest.Config) -> Settings:
    """What the options say. Raises ``OptionError`` for one that is given without a value."""
    for flag in options.WITH_VALUE:
        options.check_value(flag, config.getoption(options.RENAMED.get(flag, flag)))

    def path(name: str) -> Path | None:
        given = config.getoption(name)
        return Path(config.invocation_params.dir, given) if given else None

    command = config.getoption("backend_cmd") or ""
    return Settings(
        backend=config.getoption("backend") or ("" if command else backends.DEFAULT),
        dtypes=tuple(config.getoption("dtype") or ()),
        patterns=tuple(config.getoption("case") or ()),
        engine_args=tuple(config.getoption("engine_arg") or ()),
        fixtures=path("own_fixtures"),
        error_map=path("error_map"),
        expectations=path("expectations"),
        write_expectations=path("write_expectations"),
        report=path("report"),
        markdown=path("markdown"),
        call_limit=config.getoption("call_limit"),
        serve_cmd=config.getoption("serve_cmd") or "",
        case_limit=config.getoption("case_limit"),
        isolate=config.getoption("isolate"),
        backend_cmd=command,
        diagnosis=config.getoption("diagnosis"),
        command=tuple(sys.argv[1:]),
    )


def pytest_report_header(config: pytest.Config) -> str:
    info = config.stash[RUN].info
    return printable(f"conformance: {info.name} {info.version} on {info.device}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pairs = metafunc.config.stash[RUN].pairs(metafunc.module.KINDS)
    names = [f"{case.id}-{dtype}" for case, dtype in pairs]
    metafunc.parametrize(("case", "dtype"), pairs, ids=names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop what pytest makes of a file none of whose cases was chosen."""
    items[:] = [item for item in items if isinstance(item.callspec.params["case"], Case)]


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Callable[[Case, str], None]:
    """Run one case and tell pytest what came of it."""
    run = request.config.stash[RUN]

    def judge_case(case: Case, dtype: str) -> None:
        tell_progress(f"{case.id} at {dtype}")
        result = run.judge(case, dtype)
        status = run.status(result)
        request.node.user_properties.append((STATUS, status))
        if status == "declared":
            pytest.xfail(f"declared: {result.outcome}")
        if status == "undecided":
            pytest.skip(f"{result.outcome}: {result.found}")
        if status != "ok":
            pytest.fail(printable(run.explain(result)), pytrace=False)

    return judge_case


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    status = dict(report.user_properties).get(STATUS)
    return WORDS.get(str(status)) if report.when == "call" else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash.get(RUN, None)
    if run is None or not run.results:
        return
    session.config.stash[CLOSING] = run.finish()
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        only_ours = session.testsfailed == run.failures()
        session.exitstatus = int(not (run.passes() and only_ours))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for word in ("advice", "differs"):
        for report in terminalreporter.getreports(word):
            terminalreporter.write_line(f"\n{word}: {report.longreprtext}")
    terminalreporter.section("conformance")
    for line in terminalreporter.config.stash.get(CLOSING, ["nothing was judged"]):
        terminalreporter.write_line(printable(line))
