"""Text of an engine's log, made fit for a page: nothing in it acts, everything in it shows."""

from __future__ import annotations

import re

_TERMINAL = re.compile(
    r"""\x1b(?: \[ [0-?]* [ -/]* [@-~]               # colours and cursor movements
              | \] [^\x07\x1b]* (?: \x07 | \x1b\\ )  # titles and links
              | [@-Z\\^_] )""",
    re.VERBOSE,
)
_NEWLINE = re.compile(r"\r\n?")
KEPT = "\n\t"
"""Characters that do not print and still belong in a text."""


def printable(text: str) -> str:
    """Without terminal sequences; what else does not print stands as its escape.

    That covers what HTML forbids (control characters, lone surrogates) and what
    would mislead a reader (marks that turn the writing direction around).
    """
    plain = _NEWLINE.sub("\n", _TERMINAL.sub("", text))
    return "".join(shown(character) for character in plain)


def shown(character: str) -> str:
    """One character, or its escape as Python writes it."""
    if character in KEPT or character.isprintable():
        return character
    return ascii(character)[1:-1]


def shortened(text: str, lines: int, width: int) -> str:
    """First and last lines, ``lines`` in all, each at most ``width`` wide; says what is missing."""
    told = [narrowed(line, width) for line in text.split("\n")]
    if len(told) > lines:
        head = lines // 2
        told[head : len(told) - (lines - head)] = [f"[{len(told) - lines} lines left out]"]
    return "\n".join(told)


def narrowed(line: str, width: int) -> str:
    """One line, cut to ``width``."""
    if len(line) <= width:
        return line
    return f"{line[:width]} [{len(line) - width} characters left out]"
