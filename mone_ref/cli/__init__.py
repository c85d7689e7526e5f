"""The ``mone-ref`` command: one file per subcommand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mone_ref import standard_output

if TYPE_CHECKING:
    import typer

COMMANDS = (
    "validate",
    "inspect",
    "plan",
    "rewrite",
    "convert",
    "verify",
    "run",
    "fixtures",
    "conform",
    "report",
    "findings",
    "spec",
    "matrix",
)

# What a missing package belongs to: commands need more than the library does.
EXTRAS = {
    "jsonschema": "cli",
    "rich": "cli",
    "typer": "cli",
    "jinja2": "conformance",
    "packaging": "conformance",
    "pytest": "conformance",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit.

    Only the module of the named subcommand is imported, since some of them need torch.
    Exits 2, with one line that says what to install, when an extra is missing, and 74 when
    standard output cannot be written, whatever the command did.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app = application(words[0] if words and words[0] in COMMANDS else None)
        with standard_output.watched():
            app(words, prog_name="mone-ref")
    except ModuleNotFoundError as error:
        install = _installation(error)
        if install is None:
            raise
        print(f"error: {error.name} is not installed: {install}", file=sys.stderr)
        sys.exit(2)


def application(command: str | None = None) -> typer.Typer:
    """The typer app with one subcommand, or with all that can be imported.

    Raises ModuleNotFoundError when typer, or a package of the one subcommand, is absent.
    """
    import typer

    absent: dict[str, str] = {}
    modules = []
    for name in COMMANDS if command is None else [command]:
        try:
            modules.append(importlib.import_module(f"{__name__}.{name}"))
        except ModuleNotFoundError as error:
            install = _installation(error)
            if install is None or command is not None:
                raise
            absent[name] = install
    app = typer.Typer(
        help="Reference implementation and conformance suite for expert substitution (MoNE).",
        epilog="; ".join(f"{name}: {install}" for name, install in absent.items()) or None,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # markup would eat the brackets of "mone-ref[cli]"
        pretty_exceptions_enable=False,
    )
    app.callback()(_group)
    for module in modules:
        module.register(app)
    return app


def _installation(error: ModuleNotFoundError) -> str | None:
    """The command that installs what is missing, if an extra does."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return f'pip install "mone-ref[{extra}]"' if extra else None


def _group() -> None:
    """Keep subcommand names in the usage when only one is registered."""
