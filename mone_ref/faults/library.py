"""All faults, by id."""

from __future__ import annotations

from mone_ref.faults import changes, config, experts, loading, parallel, routing, substitution

FAULTS = {
    fault.id: fault
    for file in (config, routing, substitution, experts, loading, parallel, changes)
    for fault in file.FAULTS
}
