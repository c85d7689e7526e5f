"""The header of one safetensors file: names, types, shapes and byte ranges.

Layout of a file: 8 bytes, the length N of the header, little-endian; N bytes of JSON,
padded with spaces; then the tensors, back to back, in the order of their offsets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mone_ref import strict_json
from mone_ref.checkpoint import dtypes, ordinary, ranges
from mone_ref.checkpoint.entry import TensorEntry
from mone_ref.checkpoint.findings import LFS_START, flaw, lfs_pointer, unreadable
from mone_ref.checkpoint.opening import open_regular
from mone_ref.checkpoint.ordinary import METADATA
from mone_ref.errors import Code, Problem, Severity, only_errors, show

LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
ENTRY_KEYS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True)
class Header:
    """What one file declares; ``entries`` holds only those that are well formed.

    ``size`` is the length of the whole file in bytes, 0 where it could not be read;
    ``metadata`` is the text in ``__metadata__``.
    """

    entries: tuple[TensorEntry, ...]
    problems: tuple[Problem, ...]
    size: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


def read(path: Path, file: str) -> Header:
    """Read the header of ``path`` and nothing else; every fault becomes a problem.

    Codes: HEADER, TRUNCATED, OFFSETS, METADATA, ALIGNMENT, LFS_POINTER, UNREADABLE.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            text = _json_bytes(stream, size, file)
    except OSError as error:
        return Header((), (unreadable(file, error),))
    if isinstance(text, Problem):
        return Header((), (text,))
    begin = LENGTH_BYTES + len(text)
    faultless = ordinary.read(text, file, begin, size)
    if faultless is not None:
        entries, metadata = faultless
        return Header(entries, (), size, metadata)
    return explained(text, file, begin, size)


def explained(text: bytes, file: str, begin: int, size: int) -> Header:
    """What the JSON of a header says, with everything that is wrong with it.

    ``begin`` is where it ends and ``size`` the length of the file, both in bytes.
    """
    document = _document(text, file)
    if isinstance(document, tuple):
        return Header((), document)
    return _header(document, file, begin, size)


def _json_bytes(stream: BinaryIO, size: int, file: str) -> bytes | Problem:
    """The header's JSON; the declared length is checked before anything is allocated."""
    start = stream.read(len(LFS_START))
    if start == LFS_START:
        return lfs_pointer(file)
    if len(start) < LENGTH_BYTES:
        expected = f"at least {LENGTH_BYTES} bytes, the length of the header"
        return flaw(Code.TRUNCATED, file, "file", f"a file of {size} bytes", expected)
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > LONGEST_HEADER:
        found = f"a header length of {length} bytes"
        return flaw(Code.HEADER, file, "header", found, f"at most {LONGEST_HEADER}")
    if length > size - LENGTH_BYTES:
        expected = f"{LENGTH_BYTES + length} bytes or more: the header takes {length}"
        return flaw(Code.TRUNCATED, file, "file", f"a file of {size} bytes", expected)
    stream.seek(LENGTH_BYTES)
    return stream.read(length)


def _document(text: bytes, file: str) -> dict[str, Any] | tuple[Problem, ...]:
    """The header as a JSON object, or what is wrong with it as JSON."""
    if not text.startswith(b"{"):
        found = f"a header that starts with {show(text[:16])}"
        return (flaw(Code.HEADER, file, "header", found, "a JSON object, starting with {"),)
    try:
        parsed = strict_json.parse(text)
    except strict_json.StrictJsonError as error:
        return (flaw(Code.HEADER, file, "header", str(error), "valid JSON"),)
    if parsed.duplicates:
        return tuple(
            flaw(Code.HEADER, file, key, "a key that stands more than once", "each key once")
            for key in parsed.duplicates
        )
    document: dict[str, Any] = parsed.value
    return document


def _header(document: dict[str, Any], file: str, data_begin: int, size: int) -> Header:
    problems = list(_metadata_problems(document.get(METADATA), file))
    entries, broken = [], False
    for name, fields in document.items():
        if name == METADATA:
            continue
        faults = list(_entry_problems(name, fields, file))
        problems += faults
        if only_errors(faults):
            broken = True
        else:
            begin, end = fields["data_offsets"]
            shape, dtype = tuple(fields["shape"]), fields["dtype"]
            placed = data_begin + begin, data_begin + end
            entries.append(TensorEntry(name, file, dtype, shape, *placed))
    if not broken:  # a range that is wrong by itself also looks like a hole: name it once
        problems += ranges.problems(entries, file, data_begin, size)
    return Header(tuple(entries), tuple(problems), size, _texts(document.get(METADATA)))


def _texts(metadata: object) -> dict[str, str]:
    """The part of ``__metadata__`` that is text; the rest is reported."""
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _metadata_problems(metadata: object, file: str) -> Iterator[Problem]:
    """``__metadata__`` maps text to text; loaders look for ``format: pt`` in it."""
    if metadata is None:
        found, expected = "nothing (or null)", "{'format': 'pt'}"
        yield flaw(Code.METADATA, file, METADATA, found, expected, Severity.WARNING)
        return
    if not isinstance(metadata, dict):
        yield flaw(Code.METADATA, file, METADATA, show(metadata), "an object of text values")
        return
    for key, value in metadata.items():
        if not isinstance(value, str):
            found = f"{show(value)} as {show(key)}"
            yield flaw(Code.METADATA, file, METADATA, found, "text")
    if metadata.get("format") != "pt" and isinstance(metadata.get("format", ""), str):
        found = f"format {show(metadata['format'])}" if "format" in metadata else "no format"
        yield flaw(Code.METADATA, file, METADATA, found, "format 'pt'", Severity.WARNING)


def _entry_problems(name: str, fields: object, file: str) -> Iterator[Problem]:
    """Faults of one entry by itself: its keys, their types, and its length against its shape."""
    if not isinstance(fields, dict):
        yield flaw(Code.HEADER, file, name, show(fields), f"an object with {ENTRY_KEYS}")
        return
    unknown = fields.keys() - ENTRY_KEYS
    for key in fields if unknown else ():
        if key in unknown:  # the safetensors library reads over it
            found = f"an unknown key {show(key)}"
            yield flaw(Code.HEADER, file, name, found, f"only {ENTRY_KEYS}", Severity.WARNING)
    missing = [key for key in ENTRY_KEYS if key not in fields]
    if missing:
        yield flaw(Code.HEADER, file, name, f"no {', '.join(missing)}", f"all of {ENTRY_KEYS}")
        return
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    malformed = list(_type_problems(name, dtype, shape, offsets, file))
    yield from malformed or _length_problems(name, dtype, tuple(shape), offsets, file)


def _type_problems(
    name: str, dtype: object, shape: object, offsets: object, file: str
) -> Iterator[Problem]:
    if not isinstance(dtype, str):
        yield flaw(Code.HEADER, file, name, f"dtype {show(dtype)}", "a type name")
    if _sizes(shape) is None:
        yield flaw(Code.HEADER, file, name, f"shape {show(shape)}", "a list of sizes from 0")
    if len(_sizes(offsets) or ()) != 2:
        yield flaw(Code.HEADER, file, name, f"data_offsets {show(offsets)}", "[begin, end]")


def _sizes(value: object) -> list[int] | None:
    """The value if it is a list of JSON integers from 0 (``true`` is none)."""
    if not isinstance(value, list):
        return None
    for item in value:
        if type(item) is not int or not 0 <= item <= dtypes.LARGEST:
            return None
    return value


def _length_problems(
    name: str, dtype: str, shape: tuple[int, ...], offsets: list[int], file: str
) -> Iterator[Problem]:
    begin, end = offsets
    if begin > end:
        yield flaw(Code.OFFSETS, file, name, f"data_offsets {offsets}", "begin <= end")
    elif dtype in dtypes.BITS:
        length = dtypes.byte_length(dtype, shape)
        if length == end - begin:
            return
        declared = f"{dtype} {show(list(shape))}"
        if length is None:
            yield flaw(Code.OFFSETS, file, name, declared, "a whole number of bytes, below 2^63")
        else:
            found = f"{end - begin} bytes at {offsets}"
            yield flaw(Code.OFFSETS, file, name, found, f"{length} bytes for {declared}")
