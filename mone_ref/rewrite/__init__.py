"""Making checkpoints out of checkpoints: byte ranges in, byte ranges out, no model framework."""
