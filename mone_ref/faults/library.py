"""All faults, by id."""

from __future__ import annotations

from mone_ref.faults import (
    changes,
    config,
    decode,
    experts,
    families,
    features,
    loading,
    parallel,
    ranks,
    rare,
    rounding,
    routing,
    substitution,
)

FILES = (
    config,
    features,
    routing,
    substitution,
    rounding,
    rare,
    experts,
    families,
    loading,
    parallel,
    ranks,
    changes,
    decode,
)

FAULTS = {fault.id: fault for file in FILES for fault in file.FAULTS}
