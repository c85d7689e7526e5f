"""How a call into another process fails, apart from what the engine itself raises there."""

from __future__ import annotations

from collections.abc import Sequence

from mone_ref.backend import Refused
from mone_ref.errors import Phase


class ProtocolError(Exception):
    """The other side broke the protocol. Never a refusal, whatever words it used."""


class Relayed(Exception):
    """What an engine raised in its own process; the message is the whole chain told there."""


class RelayedRefusal(Relayed, Refused):
    """A refusal that an engine stated in its own process."""

    def __init__(self, evidence: Sequence[str], phase: Phase | None, codes: Sequence[str]) -> None:
        Refused.__init__(self, evidence, phase=phase, code=codes)
