"""A blueprint -> a directory that appears whole, or not at all.

Everything is written into a hidden directory beside the output and renamed at the end. A rewrite
that was killed goes on with the files that it had not finished.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mone_ref.checkpoint.findings import flaw
from mone_ref.errors import Code, Rejected
from mone_ref.rewrite import copying, identity, journal, manifest, source_state, target
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.copying import Advance
from mone_ref.rewrite.journal import Journal
from mone_ref.rewrite.output_file import OutputFile, files
from mone_ref.rewrite.target import Target

WORKERS = 2  # files side by side: one is hashed while the other waits for the disk


class Stopped(Exception):
    """Raised inside a worker when another one failed or the user interrupted."""


@dataclass(frozen=True)
class Written:
    """What a rewrite did: bytes of the output, files written now, and files found finished."""

    directory: Path
    size: int
    written: tuple[str, ...]
    resumed: tuple[str, ...]


def write(
    blueprint: Blueprint,
    path: Path,
    plan: Mapping[str, Any] | None = None,
    *,
    restart: bool = False,
    advance: Advance = lambda size: None,
    workers: int = WORKERS,
) -> Written:
    """Write the output and its manifest, durably.

    ``advance`` is told bytes as they reach the output, finished files of an earlier try
    included, and may be called from several threads. ``restart`` throws a partial output away.

    Raises ``Rejected``: OUTPUT_EXISTS, OUTPUT_PLACE, OUTPUT_BUSY, OUTPUT_PARTIAL, OUTPUT_WRITE,
    SOURCE_CHANGED, UNREADABLE, TRUNCATED. Nothing is at ``path`` then, and what was finished
    is kept beside it. KeyboardInterrupt (or what a signal handler raises) passes, likewise.
    """
    place = target.choose(path, blueprint.source)
    try:
        with target.locked(place):
            return _write(blueprint, place, plan, restart, advance, workers)
    except OSError as error:
        raise Rejected([target.cannot_write(path, error)]) from None


def _write(
    blueprint: Blueprint,
    place: Target,
    plan: Mapping[str, Any] | None,
    restart: bool,
    advance: Advance,
    workers: int,
) -> Written:
    wanted = files(blueprint)
    inputs = source_state.inputs(blueprint, wanted)
    begun = Journal(identity.of(wanted, blueprint.source), source_state.look(inputs))
    if restart:
        target.empty(place.partial)
    journal_ = _resumed(place, begun)
    finished = [file for file in wanted if _is_finished(file, journal_, place)]
    missing = [file for file in wanted if file not in finished]
    _require_space(place, missing)
    journal_.save(place.partial)
    place.output.mkdir(exist_ok=True)
    for file in finished:
        advance(file.size)
    _Workers(place, journal_, advance).write(missing, workers)
    source_state.require_same(journal_.states, source_state.look(inputs))
    described = manifest.describe(inputs, blueprint.source)
    said = manifest.plan_entry(plan, blueprint.source)
    content = manifest.document(begun.identity, said, described, journal_.finished)
    journal.write_durably(place.output / manifest.NAME, content)
    _publish(place)
    names = tuple(tuple(file.name for file in some) for some in (missing, finished))
    return Written(place.final, sum(file.size for file in wanted), *names)


def _resumed(place: Target, begun: Journal) -> Journal:
    """The journal to go on with: a new one, or that of a partial output of this very rewrite."""
    if not any(place.partial.iterdir()):
        return begun
    found = journal.load(place.partial)
    if found is None and not place.output.exists():
        return begun  # killed before anything was written
    if found is None or found.identity != begun.identity:
        what = "no journal" if found is None else "another plan, source or version of this tool"
        expected = "the same rewrite, or --restart to throw it away"
        problem = flaw(Code.OUTPUT_PARTIAL, str(place.partial), "directory", what, expected)
        raise Rejected([problem])
    source_state.require_same(found.states, begun.states)
    return found


def _is_finished(file: OutputFile, done: Journal, place: Target) -> bool:
    """Whether an earlier try left the file whole under its own name."""
    path = place.output / file.name
    size, _ = done.finished.get(file.name, (-1, ""))
    return size == file.size and path.is_file() and path.stat().st_size == size


def _require_space(place: Target, missing: list[OutputFile]) -> None:
    """Raises ``Rejected`` (OUTPUT_WRITE): better at once than after an hour."""
    needed = sum(file.size for file in missing)
    free = shutil.disk_usage(place.partial).free
    begun = place.output.rglob(journal.unfinished(Path("*")).name)
    free += sum(path.stat().st_size for path in begun)
    if needed > free:
        found, expected = f"{free} bytes free", f"{needed} bytes, for what is not written yet"
        raise Rejected([flaw(Code.OUTPUT_WRITE, str(place.final), "disk", found, expected)])


def _publish(place: Target) -> None:
    """Make all names durable, then let the output appear under its own in one step."""
    for directory in sorted(path for path in place.output.rglob("*") if path.is_dir()):
        journal.sync_directory(directory)
    journal.sync_directory(place.output)
    target.require_absent(place)
    place.output.rename(place.final)
    journal.sync_directory(place.final.parent)
    target.discard(place)


class _Workers:
    """Files written side by side; the first failure, or an interrupt, stops all of them."""

    def __init__(self, place: Target, done: Journal, advance: Advance) -> None:
        self.place = place
        self.done = done
        self.advance = advance
        self.stop = threading.Event()
        self.journal = threading.Lock()

    def write(self, missing: list[OutputFile], workers: int) -> None:
        """Write all files, the largest first. Raises what the first failing worker raised."""
        ordered = sorted(missing, key=lambda file: -file.size)
        with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(workers) as self.hashing:
            running = [pool.submit(self._one, file) for file in ordered]
            try:
                finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stop.set()
                raise
            failures = [failed for one in finished if (failed := one.exception()) is not None]
            if failures:
                self.stop.set()
                raise failures[0]

    def _one(self, file: OutputFile) -> None:
        path = self.place.output / file.name
        self._checkpoint(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = journal.unfinished(path)
        digest = copying.write_file(file, unfinished, self.hashing, self._checkpoint)
        unfinished.replace(path)
        journal.sync_directory(path.parent)
        with self.journal:
            self.done.finished[file.name] = (file.size, digest)
            self.done.save(self.place.partial)

    def _checkpoint(self, size: int) -> None:
        """After each block: tell progress, or stop."""
        if self.stop.is_set():
            raise Stopped
        self.advance(size)
