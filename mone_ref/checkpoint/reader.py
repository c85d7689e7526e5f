"""A checkpoint directory: every tensor's place, and everything wrong with the files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mone_ref.checkpoint import header, index, weight_files
from mone_ref.checkpoint.entry import TensorEntry
from mone_ref.checkpoint.findings import flaw, most, unreadable
from mone_ref.checkpoint.header import Header
from mone_ref.checkpoint.index import Index
from mone_ref.checkpoint.opening import open_regular
from mone_ref.checkpoint.text import plain
from mone_ref.checkpoint.weight_files import WeightFiles
from mone_ref.errors import Code, Problem, Rejected, only_errors

CHUNK = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a directory say.

    ``tensors`` maps names to entries and is complete only where ``problems`` holds no
    error; ``files`` are the weight files read, in order; ``listing`` is the file in which
    a missing tensor should have been named: the index, or the only weight file. ``index`` is
    None where there is none, or none that can be used; ``metadata`` is that of each file.
    """

    directory: Path
    tensors: Mapping[str, TensorEntry]
    files: tuple[str, ...]
    listing: str
    problems: tuple[Problem, ...]
    index: Index | None = None
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read the index and all headers; a bad checkpoint gives problems, never an exception.

        Codes: every one of the group CHECKPOINT except NO_CONFIG.
        """
        directory = Path(directory)
        found = weight_files.find(directory)
        headers = {file: header.read(directory / file, file) for file in found.files}
        tensors = _tensors(found, headers)
        problems = list(found.problems)
        for read in headers.values():
            problems += most(read.problems)
        if not only_errors(problems):
            # A shard that is absent or broken would make all its tensors look misplaced.
            problems += most(_between_files(found, headers, len(tensors)))
        listing = index.NAME if found.index or len(found.files) != 1 else found.files[0]
        metadata = {file: read.metadata for file, read in headers.items()}
        said = tuple(problems)
        return cls(directory, tensors, found.files, listing, said, found.index, metadata)

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that make the tensors of this directory unreliable."""
        return tuple(only_errors(self.problems))

    def read(self, name: str) -> bytes:
        """Bytes of one tensor, as stored.

        Raises KeyError for an unknown name, Rejected (UNREADABLE, TRUNCATED) when the file
        changed since it was opened or was already reported as too short.
        """
        return b"".join(self.chunks(name, self.tensors[name].size or 1))

    def read_into(self, buffer: memoryview, name: str, begin: int = 0) -> None:
        """Fill ``buffer`` with bytes of one tensor from byte ``begin`` of it on.

        Raises Rejected as ``read`` does. Several threads may read at a time.
        """
        entry = self.tensors[name]
        try:
            with open_regular(self.directory / entry.file) as stream:
                stream.seek(entry.begin + begin)
                read = stream.readinto(buffer)  # type: ignore[attr-defined]
        except OSError as error:
            raise Rejected([unreadable(entry.file, error)]) from None
        if read < len(buffer):
            raise Rejected([_cut(entry, entry.begin + begin + read)])

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[bytes]:
        """Bytes of one tensor in pieces of ``size``; raises as ``read`` does."""
        entry = self.tensors[name]
        try:
            with open_regular(self.directory / entry.file) as stream:
                size_now = os.fstat(stream.fileno()).st_size
                if entry.end > size_now:
                    raise Rejected([_cut(entry, size_now)])
                stream.seek(entry.begin)
                for begin in range(entry.begin, entry.end, size):
                    yield stream.read(min(size, entry.end - begin))
        except OSError as error:
            raise Rejected([unreadable(entry.file, error)]) from None


def _cut(entry: TensorEntry, end: int) -> Problem:
    found = f"the end of the file at byte {end}"
    return flaw(Code.TRUNCATED, entry.file, entry.name, found, f"data up to byte {entry.end}")


def _between_files(
    found: WeightFiles, headers: Mapping[str, Header], names: int
) -> Iterator[Problem]:
    """What only shows when all files are known: names stored twice, and the index.

    ``names`` counts the different ones.
    """
    if names < sum(len(read.entries) for read in headers.values()):
        yield from stored_twice(headers)
    if found.index:
        stored = {file: read.entries for file, read in headers.items()}
        yield from index.disagreements(found.index, stored)
        tensor_bytes = sum(entry.size for entries in stored.values() for entry in entries)
        file_bytes = sum(read.size for read in headers.values())
        yield from index.wrong_total(found.index, tensor_bytes, file_bytes)


def stored_twice(headers: Mapping[str, Header]) -> Iterator[Problem]:
    """Names that more than one file holds (LOAD-9)."""
    first: dict[str, str] = {}
    for file, read in headers.items():
        for entry in read.entries:
            other = first.setdefault(entry.name, file)
            if other != file:
                text = f"the name also in {plain(other)}"
                yield flaw(Code.DUPLICATE_TENSOR, file, entry.name, text, "it in one file")


def _tensors(found: WeightFiles, headers: Mapping[str, Header]) -> dict[str, TensorEntry]:
    """Name -> entry; the index decides between two files, else the first file."""
    listed = found.index.weight_map if found.index else {}
    tensors: dict[str, TensorEntry] = {}
    for read in headers.values():
        for entry in read.entries:
            first = tensors.setdefault(entry.name, entry)
            if first is not entry and listed.get(entry.name) == entry.file:
                tensors[entry.name] = entry
    return tensors
