"""Wrong changes: what an update or a reload of a loaded model does."""

from __future__ import annotations

from mone_ref.faults.plant import Fault

FAULTS: tuple[Fault, ...] = ()
