"""A header with nothing to explain, read at one pass; any other is for ``header.py``.

A model has 10^5 entries and next to none has a fault. Here an entry is held against what it must
be as a whole; which of its faults it has, and how to say so, is looked for only if it has one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mone_ref.checkpoint import dtypes
from mone_ref.checkpoint.entry import TensorEntry

METADATA = "__metadata__"
STRINGS = 5  # of an entry as JSON: its name, three keys, and its type
MOST_AXES = 8  # of a tensor: a longer product would take long
KNOWN = {dtype: (bits, dtypes.alignment(dtype)) for dtype, bits in dtypes.BITS.items()}

Found = tuple[tuple[TensorEntry, ...], Mapping[str, str]]


def read(text: bytes, file: str, begin: int, size: int) -> Found | None:
    """Entries and metadata of a header without any fault; None where there may be one.

    ``text`` is the header's JSON, ``begin`` where it ends and ``size`` the length of the file, both
    in bytes.
    """
    try:
        document = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    metadata = document.pop(METADATA, None) if type(document) is dict else None
    if type(metadata) is not dict or metadata.get("format") != "pt":
        return None
    if not all(type(value) is str for value in metadata.values()):
        return None
    entries = _entries(document, file, begin, size)
    # Of two equal keys json keeps one: then the text has more quotes than what is left of it.
    strings = 1 + 2 * len(metadata) + STRINGS * len(document)
    is_whole = text.startswith(b"{") and b"\\" not in text and text.count(b'"') == 2 * strings
    return (entries, metadata) if entries is not None and is_whole else None


def _entries(
    document: Mapping[str, Any], file: str, begin: int, size: int
) -> tuple[TensorEntry, ...] | None:
    """Each of a known type, as long as its shape says, aligned, and right after the one before."""
    entries, at = [], begin
    try:
        for name, fields in document.items():
            dtype, shape, (first, last) = fields["dtype"], fields["shape"], fields["data_offsets"]
            bits, alignment = KNOWN[dtype]
            if len(fields) != 3 or type(shape) is not list or len(shape) > MOST_AXES:
                return None
            for axis in shape:
                if type(axis) is not int or not 0 <= axis <= dtypes.LARGEST:
                    return None
            if type(first) is not int or type(last) is not int or begin + first != at:
                return None
            if at % alignment or 8 * (last - first) != bits * math.prod(shape):
                return None
            end = begin + last
            entries.append(TensorEntry(name, file, dtype, tuple(shape), at, end))
            at = end
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(entries) if at == size else None
