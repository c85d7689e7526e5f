"""A problem of one tensor: where it stands, or where it should have been listed."""

from __future__ import annotations

from mone_ref.checkpoint.reader import Checkpoint
from mone_ref.checkpoint.text import plain
from mone_ref.errors import Code, Phase, Problem, Severity


def tensor_problem(
    code: Code,
    checkpoint: Checkpoint,
    name: str,
    found: str,
    expected: str,
    clause: str = "",
    severity: Severity = Severity.ERROR,
) -> Problem:
    """A problem of a tensor, in its own file or in the one that should have listed it."""
    entry = checkpoint.tensors.get(name)
    file = plain(entry.file if entry else checkpoint.listing)
    return Problem(code, Phase.LOAD, plain(name), found, expected, file, severity, clause)
