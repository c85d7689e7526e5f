"""A small MoE engine in numpy that serves checkpoints with substituted experts."""
