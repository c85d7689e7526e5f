"""The element types of safetensors: how many bits one element takes, and its value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Types of safetensors 0.8. A type that is not here is listed, never decoded.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

FLOATS = ("F64", "F32", "F16", "BF16")  # the types in which weights can be computed with

# Bits that tell a value that is no number: ``x & mask == pattern`` for NaN, and infinity
# where the type has one. Types that are not here have neither, or are not known.
NON_FINITE = {
    "F64": ("<u8", 0x7FF << 52, 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23, 0xFF << 23),
    "F16": ("<u2", 0x1F << 10, 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7, 0xFF << 7),
    "F8_E5M2": ("<u1", 0x7C, 0x7C),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),
    "F8_E4M3FNUZ": ("<u1", 0xFF, 0x80),
    "F8_E5M2FNUZ": ("<u1", 0xFF, 0x80),
    "F8_E8M0": ("<u1", 0xFF, 0xFF),
}

LARGEST = 2**63 - 1  # of a dimension or an offset: what a file system can hold

# Significand bits and largest exponent of the dtypes in which parameters are held.
_FORMATS = {"float16": (11, 15), "bfloat16": (8, 127), "float32": (24, 127), "float64": (53, 1023)}
PARAMETER_DTYPES = tuple(_FORMATS)


def byte_length(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, sub-byte types packed; None where that is no whole number.

    ``dtype`` must be in ``BITS``. None also when the product passes ``LARGEST``.
    """
    bits = 0 if 0 in shape else BITS[dtype]
    for size in shape if bits else ():
        bits *= size
        if bits > 8 * LARGEST:  # stop early: a header may hold millions of dimensions
            return None
    return bits // 8 if bits % 8 == 0 else None


def alignment(dtype: str) -> int:
    """Bytes to which a reader that maps the file wants a tensor aligned; 1 if unknown."""
    return max(BITS.get(dtype, 8) // 8, 1)


def decode(data: bytes, dtype: str) -> NDArray[np.floating[Any]]:
    """Values of a float tensor, flat ``[n]``; ``dtype`` must be in ``FLOATS``.

    numpy has no bfloat16: it is the upper half of a float32, so the widening is exact
    and keeps NaN and infinity.
    """
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)
        return bits.view("<f4")
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


def non_finite(data: bytes, dtype: str) -> int:
    """How many values are NaN or infinite; ``dtype`` must be in ``NON_FINITE``."""
    kind, mask, pattern = NON_FINITE[dtype]
    bits = np.frombuffer(data, kind)
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == pattern))


def overflow_bound(dtype: str) -> float:
    """Smallest magnitude that rounds to infinity in a parameter dtype.

    The largest finite value is ``(2 - 2^(1-p)) 2^e``; half a unit above it, a tie, rounds
    to even, which is infinity. For float64 no finite float64 value reaches the bound.
    """
    precision, exponent = _FORMATS[dtype]
    if dtype == "float64":
        return math.inf
    return float((2.0 - 2.0**-precision) * 2.0**exponent)
