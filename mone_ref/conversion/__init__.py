"""Stored tensors -> the tensors of a model, by reversible operations, and back.

``operations`` say where parts lie in a whole; a ``converter`` is one rule, name patterns and
operations; ``plan`` groups the tensors of a checkpoint by rule and finds every fault before
anything is read; ``streaming`` reads the parts straight into their places, with a bound on
memory; ``experts`` are the rules for the layouts of experts that checkpoints come in.
"""

from mone_ref.conversion.converter import WeightConverter
from mone_ref.conversion.operations import (
    Chunk,
    Concatenate,
    Deinterleave,
    Interleave,
    MergeModulelist,
    SplitModulelist,
    Transpose,
)
from mone_ref.conversion.plan import Group, Request
from mone_ref.conversion.streaming import convert, grouped, stream

__all__ = [
    "Chunk",
    "Concatenate",
    "Deinterleave",
    "Group",
    "Interleave",
    "MergeModulelist",
    "Request",
    "SplitModulelist",
    "Transpose",
    "WeightConverter",
    "convert",
    "grouped",
    "stream",
]
