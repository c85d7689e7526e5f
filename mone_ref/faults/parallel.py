"""Wrong parallelism: which rank adds what."""

from __future__ import annotations

from mone_ref.faults.plant import Fault, Patch


def every_rank(rank: int) -> bool:
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
