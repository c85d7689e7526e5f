"""Reference implementation and conformance suite for expert substitution (MoNE)."""
