"""Wrong oracles: each fault replaces one named step of the right one.

A suite that cannot tell a fault from the oracle proves nothing, so every fault has to
turn the verdict red.
"""

from mone_ref.faults.library import FAULTS
from mone_ref.faults.plant import Fault, Patch, Planted, planted

__all__ = ["FAULTS", "Fault", "Patch", "Planted", "planted"]
