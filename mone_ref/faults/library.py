"""All faults, by id."""

from __future__ import annotations

from mone_ref.faults import (
    changes,
    config,
    experts,
    families,
    features,
    loading,
    parallel,
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
    changes,
)

FAULTS = {fault.id: fault for file in FILES for fault in file.FAULTS}
