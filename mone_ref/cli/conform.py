"""``mone-ref conform``: the conformance suite, from anywhere.

The same as ``pytest conformance`` in a checkout. All arguments go to pytest, whose
configuration is the suite's own and not that of the current directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mone_ref.suite import data, options


def register(app: typer.Typer) -> None:
    """Add the ``conform`` command."""
    passing = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("conform", context_settings=passing, epilog=EPILOG)(conform)


EPILOG = "\n\n".join(
    f"{flag} {option.get('metavar', '')}".strip() + f": {option['help']}"
    for flag, option in options.OPTIONS.items()
)


def conform(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS]...", help="Options below, and pytest's."),
    ] = None,
) -> None:
    """Judge an engine: mone-ref conform --backend=NAME."""
    raise typer.Exit(run([*(arguments or ()), *context.args]))


def run(arguments: list[str]) -> int:
    """Run the suite with pytest; returns its exit code, or 2 without the suite's data.

    pytest runs in a process of its own: an engine that ends its process, whatever exit
    code it leaves, must not look like a run that ended well.
    """
    import packaging.specifiers  # noqa: F401 - pytest would tell its absence with a traceback
    import pytest  # noqa: F401

    try:
        conformance = data.root() / "conformance"
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ours = [f"--rootdir={conformance}", f"--config-file={conformance / 'pytest.ini'}"]
    words = [*ours, str(conformance), *joined(arguments)]
    command = [sys.executable, "-m", "mone_ref.cli.conform_process", *words]
    with tempfile.TemporaryDirectory() as scratch:
        progress = Path(scratch, "progress")
        code = supervised(command, os.environ | {options.PROGRESS: str(progress)})
        last = progress.read_text(encoding="utf-8") if progress.exists() else "start-up"
    if last != options.DONE:
        print(f"error: the process ended during {last} (exit code {code})", file=sys.stderr)
        return code or 1
    return code


def joined(arguments: list[str]) -> list[str]:
    """Options of the suite as ``--flag=value``, under the names that pytest knows.

    pytest looks for configuration beside every separate word that is an existing path,
    before it knows that the word is the value of an option.
    """
    words, left = [], iter(arguments)
    for word in left:
        value = next(left, None) if word in options.WITH_VALUE else None
        flag, equals, rest = (word if value is None else f"{word}={value}").partition("=")
        words.append(f"{options.RENAMED.get(flag, flag)}{equals}{rest}")
    return words


def supervised(command: list[str], environment: dict[str, str]) -> int:
    """Wait for a command. Ctrl-C reaches it too, and it is the one to end the run."""
    with subprocess.Popen(command, env=environment) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
