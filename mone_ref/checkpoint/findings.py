"""Problems of weight files: what they share, and the ones that any file can have."""

from __future__ import annotations

from mone_ref.checkpoint.text import plain
from mone_ref.errors import Code, Phase, Problem, Severity

LFS_START = b"version https://git-lfs"


def fault(
    code: Code,
    file: str,
    where: str,
    found: str,
    expected: str,
    severity: Severity = Severity.ERROR,
) -> Problem:
    """A problem of a file, noticed at load; ``file`` and ``where`` are made safe to print."""
    return Problem(code, Phase.LOAD, plain(where), found, expected, plain(file), severity)


def unreadable(file: str, error: OSError) -> Problem:
    """A file that the system refuses to open or read."""
    reason = error.strerror or str(error)
    return fault(Code.UNREADABLE, file, "file", reason.lower(), "a readable regular file")


def lfs_pointer(file: str) -> Problem:
    """A Git LFS pointer: the repository was cloned without its large files."""
    expected = "the file itself: run 'git lfs pull'"
    return fault(Code.LFS_POINTER, file, "file", "a Git LFS pointer", expected)
