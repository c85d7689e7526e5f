"""The byte ranges of one file together: back to back, from the header to the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mone_ref.checkpoint import dtypes
from mone_ref.checkpoint.entry import TensorEntry
from mone_ref.checkpoint.findings import flaw
from mone_ref.checkpoint.text import plain, some
from mone_ref.errors import Code, Problem, Severity


def problems(
    entries: Sequence[TensorEntry], file: str, data_begin: int, size: int
) -> Iterator[Problem]:
    """Overlaps, holes, ranges past the end, a cut or padded file, and a note on alignment.

    Each entry must be right by itself. ``data_begin`` is where the header ends, ``size``
    the length of the file, both in bytes.
    """
    ordered = sorted(entries, key=lambda entry: (entry.begin, entry.end, entry.name))
    misplaced = list(_gaps(ordered, file, data_begin))
    data_end = max((entry.end for entry in ordered), default=data_begin)
    if misplaced:
        yield from misplaced
        yield from _past_end(ordered, file, size)
        return
    if size != data_end:
        found, expected = f"a file of {size} bytes", f"{data_end} bytes, as its header says"
        yield flaw(Code.TRUNCATED, file, "file", found, expected)
    yield from _misaligned(ordered, file)


def _gaps(ordered: Sequence[TensorEntry], file: str, data_begin: int) -> Iterator[Problem]:
    """Each tensor starts where the one before it ends, zero-size tensors included."""
    expected, before = data_begin, ""
    for entry in ordered:
        if entry.begin != expected:
            kind = "a hole" if entry.begin > expected else "an overlap"
            after = plain(before) if before else "the header"
            found = f"{kind} of {abs(entry.begin - expected)} bytes after {after}"
            yield flaw(Code.OFFSETS, file, entry.name, found, f"a start at byte {expected}")
        if entry.end >= expected:
            expected, before = entry.end, entry.name


def _past_end(ordered: Sequence[TensorEntry], file: str, size: int) -> Iterator[Problem]:
    for entry in ordered:
        if entry.end > size:
            found = f"an end at byte {entry.end}"
            yield flaw(Code.OFFSETS, file, entry.name, found, f"at most {size}, the file's length")


def _misaligned(ordered: Sequence[TensorEntry], file: str) -> Iterator[Problem]:
    """Legal, but a reader that maps the file has to copy: worth a note."""
    odd = [entry.name for entry in ordered if entry.begin % dtypes.alignment(entry.dtype)]
    if odd:
        expected = "starts at a multiple of the element size (readers copy these)"
        yield flaw(Code.ALIGNMENT, file, "header", some(odd, "tensor"), expected, Severity.NOTE)
