"""Names from untrusted files, as they may stand in a message."""

from __future__ import annotations

from collections.abc import Iterable

from mone_ref.errors import show

LONGEST = 200  # longer than any tensor name seen; a header may hold one of 100 MB
EXAMPLES = 3


def plain(name: str) -> str:
    """A tensor or file name as it is, or escaped and cut when it would break a line."""
    if 0 < len(name) <= LONGEST and name.isascii() and name.isprintable() and " " not in name:
        return name
    return show(name, LONGEST)


def some(names: Iterable[str], kind: str) -> str:
    """``3 tensors: a, b, c``, cut after a few names: ``40 tensors: a, b, c, ...``."""
    listed = list(names)
    shown = ", ".join(plain(name) for name in listed[:EXAMPLES])
    more = ", ..." if len(listed) > EXAMPLES else ""
    return f"{count(len(listed), kind)}: {shown}{more}"


def count(number: int, kind: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {kind}{'' if number == 1 else 's'}"
