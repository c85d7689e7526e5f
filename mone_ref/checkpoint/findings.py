"""Problems of weight files: what they share, and the ones that any file can have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mone_ref.checkpoint.text import plain
from mone_ref.errors import Code, Phase, Problem, Severity, reason

LFS_START = b"version https://git-lfs"

MOST = 1000
"""Most findings of one kind in one file or of one rule. A person reads fewer, and a broken list
of a large model has 10^5."""


def flaw(
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
    return flaw(Code.UNREADABLE, file, "file", reason(error).lower(), "a readable regular file")


def lfs_pointer(file: str) -> Problem:
    """A Git LFS pointer: the repository was cloned without its large files."""
    expected = "the file itself: run 'git lfs pull'"
    return flaw(Code.LFS_POINTER, file, "file", "a Git LFS pointer", expected)


def most(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The first ``MOST`` of each code and severity, then one that says there are more.

    Too many errors of one kind end the list; too many warnings do not, since an error may follow.
    """
    listed: Counter[tuple[Code, Severity]] = Counter()
    for problem in problems:
        kind = problem.code, problem.severity
        listed[kind] += 1
        if listed[kind] <= MOST:
            yield problem
        elif listed[kind] == MOST + 1:
            found = f"more than {MOST} findings of this kind"
            yield replace(problem, where="more", found=found, expected="none")
            if problem.severity is Severity.ERROR:
                return
