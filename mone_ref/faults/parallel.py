"""Wrong parallelism: which rank adds what."""

from __future__ import annotations

from mone_ref.faults.plant import Fault, Patch
from mone_ref.layer import Rank


def every_rank(tp: Rank) -> bool:
    """Add constants whatever the rank."""
    return True


RANK = "mone_ref.layer", "adds_constants"

FAULTS = (
    Fault(
        "constant-on-every-rank",
        "Every tensor-parallel rank adds the constants before the reduction.",
        ("EXEC-4", "PAR-1"),
        "run",
        (Patch(*RANK, every_rank),),
        "parallel",
    ),
)
