"""One file of an output against the byte ranges that it is made of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mone_ref.checkpoint import TensorEntry, header
from mone_ref.checkpoint.findings import flaw
from mone_ref.checkpoint.opening import open_regular
from mone_ref.errors import Code, Problem, Rejected, only_errors, show
from mone_ref.rewrite.blueprint import OutputShard, OutputTensor, Piece
from mone_ref.rewrite.copying import read_exactly
from mone_ref.rewrite.output_file import OutputFile
from mone_ref.rewrite.output_file import header as planned_header

BLOCK = 4 << 20  # bytes of each of the two buffers of a comparison

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Checked:
    """What one file showed: problems, the sha256 of the file ("" if it could not be read whole),
    and how many bytes were compared."""

    problems: tuple[Problem, ...]
    sha256: str
    size: int


def check_shard(path: Path, shard: OutputShard, advance: Advance) -> Checked:
    """A safetensors file: its header, then every tensor that it should hold."""
    read = header.read(path, shard.name)
    broken = only_errors(read.problems)
    if broken:
        return Checked(tuple(broken), "", 0)
    found = {entry.name: entry for entry in read.entries}
    planned = {tensor.name: tensor for tensor in shard.tensors}
    problems = list(_declarations(shard.name, found, planned))
    problems += _rest_of_header(path, shard) if not problems else []
    digest, begin = hashlib.sha256(), min((one.begin for one in read.entries), default=read.size)
    _hash(path, digest, 0, begin)
    for entry in sorted(read.entries, key=lambda entry: (entry.begin, entry.end)):
        tensor = planned.get(entry.name)
        if tensor is None or tensor.size != entry.size:
            _hash(path, digest, entry.begin, entry.end)
        else:
            problems += _differences(path, digest, entry, tensor, advance)
    return Checked(tuple(problems), digest.hexdigest(), read.size)


def check_bytes(path: Path, file: OutputFile, advance: Advance) -> Checked:
    """A file that is copied whole."""
    size, digest = path.stat().st_size, hashlib.sha256()
    if size != file.size:
        _hash(path, digest, 0, size)
        found, expected = f"{size} bytes", f"{file.size} bytes, as in the source"
        problem = flaw(Code.OUTPUT_BYTES, file.name, "file", found, expected)
        return Checked((problem,), digest.hexdigest(), 0)
    entry = TensorEntry("file", file.name, "U8", (size,), 0, size)
    tensor = OutputTensor("file", "U8", (size,), file.pieces)
    problems = tuple(_differences(path, digest, entry, tensor, advance))
    return Checked(problems, digest.hexdigest(), size)


def _declarations(
    file: str, found: dict[str, TensorEntry], planned: dict[str, OutputTensor]
) -> Iterator[Problem]:
    """Tensors too few and too many, and those of another type or shape."""
    for name in sorted(planned.keys() - found.keys()):
        yield flaw(Code.OUTPUT_TENSORS, file, name, "no such tensor", "the planned tensor")
    for name in sorted(found.keys() - planned.keys()):
        yield flaw(Code.OUTPUT_TENSORS, file, name, "a tensor", "none of this name")
    for name in sorted(found.keys() & planned.keys()):
        has, wants = (f"{one.dtype} {list(one.shape)}" for one in (found[name], planned[name]))
        if has != wants:
            yield flaw(Code.OUTPUT_TENSORS, file, name, show(has), show(wants))


def _rest_of_header(path: Path, shard: OutputShard) -> Iterator[Problem]:
    """Whatever else the header says: metadata, order, padding."""
    expected = planned_header(shard)
    with open_regular(path) as stream:
        if stream.read(len(expected)) != expected:
            found = "other metadata, order of tensors or padding"
            yield flaw(Code.OUTPUT_TENSORS, shard.name, "header", found, "the planned header")


def _hash(path: Path, digest: hashlib._Hash, begin: int, end: int) -> None:
    block = memoryview(bytearray(min(BLOCK, end - begin)))
    for part in _blocks((Piece(path, begin, end),)):
        read_exactly(part, block)
        digest.update(block[: part.size])


def _differences(
    path: Path,
    digest: hashlib._Hash,
    entry: TensorEntry,
    tensor: OutputTensor,
    advance: Advance,
) -> Iterator[Problem]:
    """The bytes of one tensor against its pieces; only the first difference is told."""
    place, told = entry.begin, False
    size = min(BLOCK, max((piece.size for piece in tensor.pieces), default=0))
    wants, has = bytearray(size), bytearray(size)
    for part in _blocks(tensor.pieces):
        read_exactly(part, memoryview(wants))
        read_exactly(Piece(path, place, place + part.size), memoryview(has))
        digest.update(memoryview(has)[: part.size])
        at = _first_difference(has, wants, part.size)
        if at is not None and not told:
            told = True
            found = f"byte {place + at - entry.begin} is {has[at]:#04x}"
            expected = f"{wants[at]:#04x}, byte {part.begin + at} of {part.path.name}"
            yield flaw(Code.OUTPUT_BYTES, entry.file, entry.name, found, expected)
        place += part.size
        advance(part.size)


def _blocks(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    for piece in pieces:
        for begin in range(piece.begin, piece.end, BLOCK):
            yield Piece(piece.path, begin, min(begin + BLOCK, piece.end))


def _first_difference(one: bytearray, other: bytearray, size: int) -> int | None:
    """The first place where two buffers differ, of their first ``size`` bytes."""
    first, second = (np.frombuffer(buffer, np.uint8)[:size] for buffer in (one, other))
    if np.array_equal(first, second):
        return None
    return int(np.argmax(first != second))


def require_readable(path: Path) -> None:
    """Raises ``Rejected`` (NOT_A_CHECKPOINT) unless the path is a directory."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        found, expected = "no directory", "the output of a rewrite"
        raise Rejected([flaw(Code.NOT_A_CHECKPOINT, str(path), "path", found, expected)])
