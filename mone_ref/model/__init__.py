"""Whole decoders around the MoE layer."""
