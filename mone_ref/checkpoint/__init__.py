"""Bytes on disk: which files hold the weights, and where each tensor lies in them.

Only headers are read until a tensor is asked for. No framework, no memory maps, and
pickle files are never opened.
"""

from mone_ref.checkpoint.entry import TensorEntry
from mone_ref.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "TensorEntry"]
