"""Where an output may appear, and the one rewrite that may work on it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mone_ref.checkpoint.findings import flaw
from mone_ref.errors import Code, Problem, Rejected, reason


@dataclass(frozen=True)
class Target:
    """Real paths: the output, its parts while it is written, and what only the writer reads."""

    final: Path

    @property
    def partial(self) -> Path:
        """The hidden directory beside the output that holds everything until the end."""
        return self.final.with_name(f".{self.final.name}.partial")

    @property
    def output(self) -> Path:
        """What becomes ``final``."""
        return self.partial / "output"


def choose(path: Path, source: Path) -> Target:
    """The target, links resolved; nothing is made yet.

    Raises ``Rejected`` (OUTPUT_EXISTS, OUTPUT_PLACE).
    """
    shown, here = str(path), Path(os.path.abspath(path))
    if os.path.lexists(here):
        raise _refused(Code.OUTPUT_EXISTS, shown, "something there", "a path that does not exist")
    parent, real = Path(os.path.realpath(here.parent)), Path(os.path.realpath(source))
    final = parent / here.name
    if real in (final, *final.parents):
        raise _refused(Code.OUTPUT_PLACE, shown, "a path inside the source", "one outside of it")
    if final in real.parents:
        raise _refused(Code.OUTPUT_PLACE, shown, "a path around the source", "one outside of it")
    if not os.path.isdir(parent):
        expected = "an existing directory above the output"
        raise _refused(Code.OUTPUT_PLACE, shown, f"no directory {parent}", expected)
    return Target(final)


def _refused(code: Code, file: str, found: str, expected: str) -> Rejected:
    return Rejected([flaw(code, file, "path", found, expected)])


def cannot_write(path: Path, error: OSError) -> Problem:
    """A problem of the disk or its permissions."""
    found = reason(error).lower()
    expected = "an output that can be written; what is finished is kept for the next try"
    return flaw(Code.OUTPUT_WRITE, str(error.filename or path), "file", found, expected)


@contextmanager
def locked(target: Target) -> Iterator[None]:
    """Hold the partial directory, made if it is not there.

    The lock is the directory's own and ends with the process, so that a kill leaves none. A
    directory that stayed empty is removed.
    Raises ``Rejected`` (OUTPUT_BUSY), OSError.
    """
    target.partial.mkdir(exist_ok=True)
    # Through a link, a restart would empty a directory that is not ours.
    handle = os.open(target.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(target) from None
        held = os.fstat(handle)
        try:
            there = os.stat(target.partial)
        except FileNotFoundError:
            raise _busy(target) from None
        if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
            raise _busy(target)  # the other one finished between our two looks
        yield
    finally:
        with suppress(OSError):
            target.partial.rmdir()  # only where nothing was written
        os.close(handle)


def _busy(target: Target) -> Rejected:
    found, expected = "another rewrite at work", "one at a time"
    return _refused(Code.OUTPUT_BUSY, str(target.final), found, expected)


def empty(directory: Path) -> None:
    """Remove everything in a directory. Raises OSError."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def discard(target: Target) -> None:
    """Remove what the writer alone needed; best effort, since the output is there already."""
    with suppress(OSError):
        shutil.rmtree(target.partial)


def require_absent(target: Target) -> None:
    """Raises ``Rejected`` (OUTPUT_EXISTS): ``rename`` would replace an empty directory."""
    if os.path.lexists(target.final):
        found, expected = "something there", "a path that does not exist"
        raise _refused(Code.OUTPUT_EXISTS, str(target.final), found, expected)
