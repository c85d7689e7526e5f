"""The ``mone-ref`` command: one file per subcommand."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = tuple(
    name
    for name in ("validate", "fixtures", "conform", "spec")
    if importlib.util.find_spec(f"{__name__}.{name}")
)

# What a missing package belongs to: commands need more than the library does.
EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "typer": "cli",
    "jsonschema": "conformance",
    "pytest": "conformance",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit.

    Only the module of the named subcommand is imported, since some of them need torch.
    Exits 2, with one line that says what to install, when an extra is missing.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app = application(words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        message = f'error: {error.name} is not installed: pip install "mone-ref[{extra}]"'
        print(message, file=sys.stderr)
        sys.exit(2)
    app(words, prog_name="mone-ref")


def application(commands: Iterable[str]) -> typer.Typer:
    """The typer app with some of the subcommands; raises ModuleNotFoundError."""
    import typer

    app = typer.Typer(
        help="Reference implementation and conformance suite for expert substitution (MoNE).",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_group)
    for name in commands:
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


def _group() -> None:
    """Keep subcommand names in the usage when only one is registered."""
