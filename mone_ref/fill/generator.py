"""The numbers in a fixture's tensors: integers from a hash, scaled by powers of two.

Any machine and any language gets the same bytes: the stream of a tensor is SHAKE-128
(FIPS 202) over ``mone-ref 1|<seed>|<tensor name>``; byte ``i`` as a signed 8-bit integer
is element ``i`` in row-major order. Every value fits bfloat16 and float16 exactly, so all
dtypes load the same model. No libm, no random state.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

NORM_FRACTION = 128  # a norm weight is 1 + k / 128, k in [-32, 31]: 8 significant bits


def integers(seed: int, name: str, count: int) -> NDArray[np.int8]:
    """``count`` signed 8-bit integers of one tensor."""
    stream = hashlib.shake_128(f"mone-ref 1|{seed}|{name}".encode()).digest(count)
    return np.frombuffer(stream, dtype=np.int8)


def uniform(seed: int, name: str, shape: tuple[int, ...], exponent: int) -> NDArray[np.float32]:
    """Values ``k * 2**exponent`` with ``k`` in ``[-128, 127]``, as float32 of ``shape``."""
    flat = integers(seed, name, int(np.prod(shape))).astype(np.float32)
    return np.ldexp(flat, exponent).reshape(shape)


def around_one(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norm weights ``1 + k / 128`` with ``k`` in ``[-32, 31]``."""
    steps = integers(seed, name, int(np.prod(shape))) >> 2
    return (np.float32(1) + steps.astype(np.float32) / np.float32(NORM_FRACTION)).reshape(shape)


def token(seed: int, prompt: int, position: int, attempt: int, vocab_size: int) -> int:
    """Candidate ``attempt`` for one position of one prompt."""
    digest = hashlib.shake_128(f"mone-ref 1|{seed}|prompt {prompt}|{position}|{attempt}".encode())
    return int.from_bytes(digest.digest(8), "little") % vocab_size
