"""One stored tensor, as its file declares it."""

from __future__ import annotations

from typing import NamedTuple


class TensorEntry(NamedTuple):
    """Name, type, shape and place of a tensor; a tuple, since a model has 10^5 of them.

    ``dtype`` is the file's own word (``BF16``) and may be unknown; ``begin`` and
    ``end`` are absolute byte offsets in ``file``.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Stored bytes."""
        return self.end - self.begin
