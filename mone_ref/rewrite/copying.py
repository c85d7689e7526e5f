"""Copying byte ranges into a new file: one buffer of a fixed size, whatever the file's.

Blocks go to the device directly (``O_DIRECT``) where the file system can, so that a large output
does not first fill the page cache and is then written back all at once, and the caches of
everybody else stay. The hash is computed while the same block is written. Measured beside
kernel copies and plain loops (docs/rewrite.md, Figures).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from mone_ref.checkpoint.findings import flaw, unreadable
from mone_ref.errors import Code, Rejected
from mone_ref.rewrite.blueprint import Piece
from mone_ref.rewrite.output_file import OutputFile

BUFFER = 8 << 20  # bytes; a multiple of every block size of a disk
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
DIRECT = getattr(os, "O_DIRECT", 0)

Advance = Callable[[int], None]


def write_file(file: OutputFile, path: Path, hashing: Executor, advance: Advance) -> str:
    """Write one file that reaches the disk before this returns; its sha256.

    ``advance`` is told the bytes of each block and may raise to stop. Raises ``Rejected``
    (UNREADABLE, TRUNCATED) for a source file, OSError for the output.
    """
    digest = hashlib.sha256()
    output = _create(path)
    try:
        block = memoryview(mmap.mmap(-1, BUFFER))  # page-aligned
        source = _Reader(file)
        offset = 0
        while size := source.fill(block):
            hashed = hashing.submit(digest.update, block[:size])
            try:
                _write(output, block[:size], offset)
            finally:
                hashed.result()
            offset += size
            advance(size)
        os.fsync(output)
    finally:
        os.close(output)
    return digest.hexdigest()


class _Reader:
    """The bytes of an output file in order, read from its head and its pieces."""

    def __init__(self, file: OutputFile) -> None:
        self.head = memoryview(file.head)
        self.pieces = list(reversed(file.pieces))

    def fill(self, block: memoryview) -> int:
        """Fill a block as far as there are bytes; how many it holds."""
        size = min(len(self.head), len(block))
        block[:size] = self.head[:size]
        self.head = self.head[size:]
        while self.pieces and size < len(block):
            piece = self.pieces.pop()
            end = min(piece.end, piece.begin + len(block) - size)
            read_exactly(Piece(piece.path, piece.begin, end), block[size:])
            size += end - piece.begin
            if end < piece.end:
                self.pieces.append(Piece(piece.path, end, piece.end))
        return size


def read_exactly(piece: Piece, block: memoryview) -> None:
    """Read a piece into the start of a block.

    Raises ``Rejected`` when the file cannot be read or ends before the piece does.
    """
    try:
        handle = os.open(piece.path, os.O_RDONLY)
        try:
            done = 0
            while done < piece.size:
                got = os.preadv(handle, [block[done : piece.size]], piece.begin + done)
                if not got:
                    found = f"the end of the file at byte {piece.begin + done}"
                    expected = f"data up to byte {piece.end}"
                    where = str(piece.path)
                    raise Rejected([flaw(Code.TRUNCATED, where, "file", found, expected)])
                done += got
        finally:
            os.close(handle)
    except OSError as error:
        raise Rejected([unreadable(str(piece.path), error)]) from None


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
        return os.open(path, flags, 0o666)


def _write(output: int, block: memoryview, offset: int) -> None:
    """Write a whole block; the last one of a file has no whole number of disk blocks."""
    if len(block) != BUFFER:
        _through_cache(output)
    done = 0
    while done < len(block):
        try:
            done += os.pwrite(output, block[done:], offset + done)
        except OSError as error:
            if error.errno not in NOT_DIRECT or not _through_cache(output):
                raise


def _through_cache(output: int) -> bool:
    """Leave direct writing; whether it was on."""
    flags = fcntl.fcntl(output, fcntl.F_GETFL)
    fcntl.fcntl(output, fcntl.F_SETFL, flags & ~DIRECT)
    return bool(flags & DIRECT)
