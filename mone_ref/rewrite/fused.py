"""Fused experts cut into tensors of one expert each, where that is a matter of byte ranges.

Orientation comes from a table, never from a shape: a square tensor would not tell, and a wrong
guess gives a model of the same size that answers nonsense (D07).
"""

from __future__ import annotations

from mone_ref.checkpoint import TensorEntry
from mone_ref.errors import show
from mone_ref.rewrite import names
from mone_ref.rewrite.blueprint import OutputTensor, Piece
from mone_ref.rewrite.decisions import Choice
from mone_ref.rewrite.names import Role
from mone_ref.rewrite.structure import Structure

ROWS = "rows"  # [E, out, in], the gate's rows before those of up
TRANSPOSED = "transposed"  # [E, in, out]: gate and up alternate in every row
INTERLEAVED = "interleaved"  # rows of gate and up alternate
BARE = "in the block"  # no experts module, so that no engine reads per-expert names

ORIENTATION = {
    "qwen3_5_moe": ROWS,
    "qwen3_5_moe_text": ROWS,
    "mistral4": ROWS,
    "gemma4": ROWS,
    "gemma4_text": ROWS,
    "qwen3_vl_moe": TRANSPOSED,
    "qwen3_vl_moe_text": TRANSPOSED,
    "llama4": TRANSPOSED,
    "llama4_text": TRANSPOSED,
    "gpt_oss": INTERLEAVED,
    "granitemoe": BARE,
    "granitemoeshared": BARE,
    "granitemoehybrid": BARE,
    "jetmoe": BARE,
}
"""model_type -> how fused experts are stored (transformers 5.19 ``conversion_mapping.py``)."""

HALVES = ("gate_proj", "up_proj")


def reason_not_split(structure: Structure, entry: TensorEntry, choice: Choice) -> str | None:
    """Why a fused tensor cannot become per-expert tensors; None if it can."""
    orientation = ORIENTATION.get(structure.settings.model_type)
    if orientation is None:
        model = structure.settings.model_type
        return f"a fused tensor of model_type {show(model)}, whose orientation is not known"
    if orientation is not ROWS:
        return f"a fused tensor stored {orientation}"
    inner = entry.name.removeprefix(f"{choice.layer.block}.{names.EXPERTS}.")
    part = names.part_of(inner)
    if part is None or part.ending not in ("", ".weight"):
        return "a fused bias or scale"
    experts, hidden = choice.layer.num_experts, structure.settings.hidden_size
    is_down = part.role is Role.DOWN
    shape = entry.shape
    fits = len(shape) == 3 and shape[0] == experts and shape[1 if is_down else 2] == hidden
    if not fits or entry.size % experts or (part.role is Role.GATE_UP and shape[1] % 2):
        axes = "[experts, hidden, intermediate]" if is_down else "[experts, rows, hidden]"
        return f"shape {show(list(shape))} where {axes} is stored"
    return None


def split(structure: Structure, entry: TensorEntry, choice: Choice) -> list[OutputTensor]:
    """The kept experts' tensors, for which ``reason_not_split`` is None."""
    path = f"{choice.layer.block}.{names.EXPERTS}"
    part = names.part_of(entry.name.removeprefix(f"{path}."))
    assert part is not None  # reason_not_split
    halves = HALVES if part.role is Role.GATE_UP else (part.projection,)
    _, rows, columns = entry.shape
    shape = (rows // len(halves), columns)
    size = entry.size // (choice.layer.num_experts * len(halves))
    file = structure.checkpoint.directory / entry.file
    made = []
    for expert in choice.kept:
        for half, name in enumerate(halves):
            begin = entry.begin + (expert * len(halves) + half) * size
            piece = Piece(file, begin, begin + size)
            full = f"{path}.{expert}.{name}.weight"
            made.append(OutputTensor(full, entry.dtype, shape, (piece,)))
    return made
