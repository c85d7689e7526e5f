"""Wrong routing: which experts a token goes to, and with what weight."""

from __future__ import annotations

from mone_ref.faults.plant import Fault

FAULTS: tuple[Fault, ...] = ()
