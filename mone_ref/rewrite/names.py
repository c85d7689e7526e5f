"""The grammar of tensor names in MoE checkpoints, as data: it needs no table of families.

A name is read from its experts outwards: ``<stack>.<layer>.<block>.experts.<id>.<part>``
holds one expert, ``<block>.experts.<part>`` all experts of a layer in one tensor. What lies
beside the experts in the same block is a router, a bias with one value per expert, or shared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from mone_ref.rules.generic import COMPANIONS, CONSTANT
from mone_ref.tensor_names import INDEX

EXPERTS = "experts"
"""Module that holds the routed experts of a block; ``shared_experts`` is another word."""


class Role(StrEnum):
    """What a projection of an expert is."""

    GATE = "gate"
    UP = "up"
    DOWN = "down"
    GATE_UP = "gate and up"


PROJECTIONS = {
    "gate_up_proj": Role.GATE_UP,
    "gate_proj": Role.GATE,
    "up_proj": Role.UP,
    "down_proj": Role.DOWN,
    "w13": Role.GATE_UP,
    "w1": Role.GATE,
    "w3": Role.UP,
    "w2": Role.DOWN,
    "fc1": Role.GATE_UP,
    "fc2": Role.DOWN,
    "input_linear": Role.GATE_UP,
    "output_linear": Role.DOWN,
}

BARE_FUSED = re.compile(r"(.+)\.((?:input|output)_linear\.weight)", re.DOTALL)
"""Tensors of all experts that lie in the block itself (granitemoe, jetmoe); three dimensions."""

ROUTERS = (
    "gate",
    "router",
    "gate.wg",
    "router.layer",
    "router.classifier",
    "router.proj",
    "router.gate",
)
"""Module of the router below its block; its weight is ``[E, H]``."""

CORRECTION_BIASES = (
    "gate.e_score_correction_bias",
    "router.e_score_correction_bias",
    "experts.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "e_score_correction_bias",
    "gate.expert_bias",
    "router.expert_bias",
    "expert_bias",
)
"""Every spelling of the bias that selects experts, below the block: ``[E]`` or ``[1, E]``."""

SHARED = re.compile(r"shared_(?:experts?|mlp)(?:_gate)?(?:\.|$)")
"""Shared experts and their gates, below the block."""

EXPERT_TABLES = ("gate.tid2eid",)
"""Tensors whose values are expert ids: they cannot be renumbered as byte ranges."""

REPLACEMENTS = "expert_replacements"
"""Module beside ``experts`` that holds the constants of the explicit form."""

REPLACEMENT = re.compile(rf"\.{REPLACEMENTS}\.{INDEX}\.value$", re.ASCII)

ATTENTION = re.compile(r"(?:^|\.)(?:self_attn|attn|self_attention|attention|linear_attn)\.")
NORM = re.compile(r"(?:^|[._])(?:layer)?norm(?:_[0-9]+)?\.(?:weight|bias)$")
DENSE = ("mlp", "feed_forward", "ffn")
"""Modules of an MLP that every token passes, where the experts lie beside it in the layer."""

EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$"
)
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.weight$")
MTP = re.compile(r"(?:^|\.)(?:mtp|mtp_[a-z_]+|nextn)\.")

PACKED = {("U8", "_blocks"): 2, ("U8", ".weight_packed"): 2, ("I32", ".weight_packed"): 8}
PACKED |= {("I32", ".qweight"): 8, ("U8", ".qweight"): 2}
"""(dtype, ending) -> weights in one element of 4-bit formats."""

_BELOW = f".{EXPERTS}."
_INDEX = re.compile(INDEX, re.ASCII)
CACHED = 4096  # parts of names: more than the experts of a layer, or the parts of an expert
_ENDINGS = (*COMPANIONS, "_scale_inv", "_scale", "_zeros", ".weight_zeros", "_g_idx")


@dataclass(frozen=True)
class Place:
    """A layer of a stack: ``model.layers`` and 3."""

    stack: str
    layer: int

    @property
    def path(self) -> str:
        """``model.layers.3``"""
        return f"{self.stack}.{self.layer}" if self.stack else str(self.layer)


@dataclass(frozen=True)
class Part:
    """The rest of an expert tensor's name: a projection, and what is stored of it."""

    projection: str
    role: Role
    ending: str


def split(name: str) -> tuple[str, str] | None:
    """The block of an expert tensor, and what follows ``experts.``; None for other tensors."""
    block, separator, rest = name.partition(_BELOW)
    return (block, rest) if separator else None


def expert_of(rest: str) -> tuple[int, str] | None:
    """Logical id and part of what follows ``experts.``; None for a tensor of all experts."""
    head, _, part = rest.partition(".")
    expert = _id(head) if part else None
    return None if expert is None else (expert, part)


@lru_cache(maxsize=CACHED)
def _id(text: str) -> int | None:
    return int(text) if _INDEX.fullmatch(text) else None


@lru_cache(maxsize=CACHED)
def part_of(text: str) -> Part | None:
    """Read a part such as ``w1.weight_scale`` or ``down_proj_blocks``; None if not known."""
    for projection, role in PROJECTIONS.items():
        if text == projection or text.startswith((f"{projection}.", f"{projection}_")):
            return Part(projection, role, text.removeprefix(projection))
    return None


def is_dense(inner: str) -> bool:
    """Whether a tensor, named below its layer, is of a part that is there without experts too."""
    module, _, rest = inner.partition(".")
    is_mlp = module in DENSE and part_of(rest) is not None
    return is_mlp or bool(ATTENTION.search(inner) or NORM.search(inner))


def ending(name: str) -> str:
    """The last part of a name, with its dot: ``.weight_scale_inv``; it tells what is stored."""
    _, dot, last = name.rpartition(".")
    return dot + last


def is_companion(name: str) -> bool:
    """Whether a tensor belongs to a quantised weight, and is no weight itself."""
    return name.endswith(_ENDINGS)


def place_of(path: str) -> Place | None:
    """The layer that a module path lies in: the last number in it is the index."""
    words = path.split(".")
    for at in range(len(words) - 1, -1, -1):
        if _INDEX.fullmatch(words[at]):
            return Place(".".join(words[:at]), int(words[at]))
    return None


def constant_name(block: str, expert: int) -> str:
    """Name of a constant in the approx form: ``<block>.experts.<id>.approx_value`` (FMT-5)."""
    return f"{block}.{EXPERTS}.{expert}.{CONSTANT}"


def replacement_name(block: str, expert: int) -> str:
    """The usual name in the explicit form: ``<block>.expert_replacements.<id>.value`` (FMT-6)."""
    return f"{block}.{REPLACEMENTS}.{expert}.value"
