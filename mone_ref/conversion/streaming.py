"""Stored tensors -> results, group by group, with a bound on the bytes in memory.

Each whole is allocated once and every part is read straight into its view of it, in pieces,
by a few threads. A piece passes through a buffer only where its place is not contiguous or
of another dtype. A whole is *in flight* from its allocation until its results are handed
out; the next one is begun only when it fits beside those in flight. So whoever takes the
results slowly slows the reading down, and memory stays below

    max(limit, largest whole) + threads * PIECE

whatever the checkpoint's size, plus what the caller keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.conversion import plan
from mone_ref.conversion.converter import WeightConverter
from mone_ref.conversion.plan import Group, Request
from mone_ref.errors import Code, Rejected, show

LIMIT = 256 * 2**20
THREADS = 4
PIECE = 8 * 2**20
"""Most bytes that one read fills."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Types of a file that torch has, too."""


@dataclass
class InFlight:
    """Bytes that are allocated and not yet handed out, and the most there ever were."""

    bytes: int = 0
    peak: int = 0
    _lock: Lock = field(default_factory=Lock)

    def add(self, size: int) -> None:
        """Count ``size`` more bytes, or fewer where it is negative."""
        with self._lock:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)


def stored(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Shape and dtype of every tensor of a checkpoint, as tensors on the meta device.

    Raises ``Rejected`` (``TENSOR_DTYPE``) where torch has no such type.
    """
    foreign = [entry for entry in checkpoint.tensors.values() if entry.dtype not in DTYPES]
    if foreign:
        expected = f"one of {', '.join(DTYPES)}"
        raise Rejected(
            tensor_problem(Code.TENSOR_DTYPE, checkpoint, one.name, show(one.dtype), expected)
            for one in foreign
        )
    return {
        name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        for name, entry in checkpoint.tensors.items()
    }


def grouped(
    checkpoint: Checkpoint, converters: Sequence[WeightConverter], request: Request | None = None
) -> list[Group]:
    """``plan.make`` for a checkpoint whose headers are sound."""
    files = {name: entry.file for name, entry in checkpoint.tensors.items()}
    return plan.make(
        stored(checkpoint),
        converters,
        request or Request(),
        lambda name: files.get(name, checkpoint.listing),
    )


def stream(
    checkpoint: Checkpoint,
    groups: Sequence[Group],
    *,
    limit: int = LIMIT,
    threads: int = THREADS,
    flight: InFlight | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Results one by one, those of a group together; ``limit`` in bytes.

    Results of one group share its memory. Raises ``Rejected`` (``UNREADABLE``,
    ``TRUNCATED``) when a file changed after its header was read: reading then stops, and
    nothing of that group is handed out.
    """
    flight = flight or InFlight()
    begun: deque[_Reading] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for group in sorted(groups, key=lambda group: _position(checkpoint, group)):
            while begun and flight.bytes + group.nbytes > limit:
                yield from begun.popleft().results()
            begun.append(_Reading(checkpoint, group, pool, flight))
        while begun:
            yield from begun.popleft().results()
    finally:
        pool.shutdown(cancel_futures=True)


class _Reading:
    """A group whose parts are being read."""

    def __init__(
        self, checkpoint: Checkpoint, group: Group, pool: ThreadPoolExecutor, flight: InFlight
    ) -> None:
        flight.add(group.nbytes)
        self.group = group
        self.flight = flight
        self.whole = torch.empty(group.shape, dtype=group.dtype)
        self.pieces: list[Future[None]] = [
            pool.submit(_read, checkpoint, name, piece, begin, group.stored_dtype, flight)
            for name, place in group.places(self.whole).items()
            for piece, begin in pieces(place, group.stored_dtype)
        ]

    def results(self) -> Iterator[tuple[str, Tensor]]:
        """The results, when every piece is there; raises the first error of a piece."""
        for piece in self.pieces:
            piece.result()
        self.flight.add(-self.group.nbytes)
        yield from self.group.results(self.whole).items()


def pieces(place: Tensor, stored: torch.dtype, begin: int = 0) -> Iterator[tuple[Tensor, int]]:
    """A place cut along its first axes until a piece takes at most ``PIECE`` stored bytes.

    With each piece comes its first byte in the stored tensor, which is contiguous.
    """
    size = place.numel() * stored.itemsize
    if size <= PIECE or not place.dim():
        if size:
            yield place, begin
        return
    rows = max(PIECE // (size // len(place)), 1)
    step = size // len(place)
    for first in range(0, len(place), rows):
        part = place[first : first + rows]
        yield from pieces(part if len(part) > 1 else part[0], stored, begin + first * step)


def _read(
    checkpoint: Checkpoint,
    name: str,
    place: Tensor,
    begin: int,
    stored_dtype: torch.dtype,
    flight: InFlight,
) -> None:
    """Read one piece into its place, through a buffer if need be."""
    if place.is_contiguous() and place.dtype == stored_dtype:
        checkpoint.read_into(_bytes(place), name, begin)
        return
    buffer = torch.empty(place.shape, dtype=stored_dtype)
    flight.add(buffer.nbytes)
    try:
        checkpoint.read_into(_bytes(buffer), name, begin)
        place.copy_(buffer)
    finally:
        flight.add(-buffer.nbytes)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; its strides may be odd where an axis has size 1."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _position(checkpoint: Checkpoint, group: Group) -> tuple[int, int]:
    """Where the first part of a group lies: its file, and its first byte there."""
    entries = (checkpoint.tensors[name] for row in group.sources for name in row)
    return min((checkpoint.files.index(entry.file), entry.begin) for entry in entries)


def convert(groups: Sequence[Group], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in memory -> results; views of the given tensors where nothing has to move.

    With ``group.reverse`` for each group, the way back to the tensors as they were stored.
    """
    results: dict[str, Tensor] = {}
    for group in groups:
        if group.converter.joins:
            whole = torch.empty(group.shape, dtype=group.dtype)
            for name, place in group.places(whole).items():
                place.copy_(tensors[name])
        else:
            whole = tensors[group.sources[0][0]].to(group.dtype)
        results |= group.results(whole)
    return results
