"""Wrong reading of a config: what an engine takes it to say."""

from __future__ import annotations

from mone_ref.faults.plant import Fault

FAULTS: tuple[Fault, ...] = ()
