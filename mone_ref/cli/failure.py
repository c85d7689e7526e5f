"""How a command ends that cannot do what it was asked: one line on standard error."""

from __future__ import annotations

from typing import NoReturn

import typer

from mone_ref.suite.printable import printable


def fail(message: str, status: int = 2) -> NoReturn:
    """Tell a message on one line, whatever it quotes, and exit."""
    typer.echo(printable(f"error: {' '.join(message.split())}"), err=True)
    raise typer.Exit(status)
