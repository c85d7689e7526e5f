"""Rules on stored tensors that hold for every architecture: they need names, not a family.

Strict where a name can only mean one thing, silent where it may mean another: a sound
checkpoint of an unknown architecture gives no finding.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import count as count_from

from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.errors import Code, Problem, Severity, show

CONSTANT = "approx_value"  # FMT-5, in every family

EXPERT = re.compile(r"(.+\.experts)\.([0-9]{1,9})\..+", re.ASCII | re.DOTALL)
FUSED = re.compile(r"(.+\.experts)\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w[123])\b.*", re.S)

# A companion and what it belongs to, as endings after one common stem: the weight that a
# scale scales, or the packed values that cannot be read without it.
WEIGHT_ENDINGS = (".weight", ".weight_packed")
COMPANIONS: Mapping[str, tuple[str, ...]] = {
    ".weight_scale_inv": WEIGHT_ENDINGS,
    ".weight_scale": WEIGHT_ENDINGS,
    ".weight_scale_2": WEIGHT_ENDINGS,
    ".weight_global_scale": WEIGHT_ENDINGS,
    ".weight_zero_point": WEIGHT_ENDINGS,
    ".weight_g_idx": WEIGHT_ENDINGS,
    ".weight_shape": WEIGHT_ENDINGS,
    ".input_scale": WEIGHT_ENDINGS,
    ".input_global_scale": WEIGHT_ENDINGS,
    ".qzeros": (".qweight",),
    ".scales": (".qweight",),
    ".g_idx": (".qweight",),
    "_scales": ("_blocks",),
}
# Endings of quantised values, and the scale without which they mean nothing.
SCALES: Mapping[str, tuple[str, ...]] = {
    ".weight": (".weight_scale_inv", ".weight_scale"),
    ".weight_packed": (".weight_scale",),
    ".qweight": (".scales",),
    "_blocks": ("_scales",),
}
PACKED = ("F8_", "F4", "F6_", "U8", "I8", "I32")  # starts of types that hold quantised values


# -- quantised weights and their companions


def orphaned_companions(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A scale or zero point whose weight is gone: nothing reads it.

    An ending counts only where some tensor of the checkpoint has the pair: elsewhere it
    may be a model's own parameter.
    """
    names = checkpoint.tensors
    for ending, owners in COMPANIONS.items():
        orphans = [
            name
            for name, stem in _stems(names, ending)
            if not any(stem + owner in names for owner in owners)
        ]
        if orphans and len(orphans) < sum(1 for _ in _stems(names, ending)):
            found = f"{some(orphans, 'tensor')} without a weight"
            expected = f"{' or '.join(owners)} beside every {ending}"
            warning = Severity.WARNING
            yield tensor_problem(Code.ORPHAN, checkpoint, orphans[0], found, expected, "", warning)


def missing_scales(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Quantised values without their scale, in a checkpoint that stores scales for others."""
    names = checkpoint.tensors
    for ending, scales in SCALES.items():
        packed = [
            (name, stem)
            for name, stem in _stems(names, ending)
            if names[name].dtype.startswith(PACKED)
        ]
        bare = [name for name, stem in packed if not any(stem + s in names for s in scales)]
        if bare and len(bare) < len(packed):
            found = f"{some(bare, 'quantised tensor')} without a scale"
            yield tensor_problem(
                Code.ORPHAN, checkpoint, bare[0], found, f"{' or '.join(scales)} for each"
            )


def _stems(names: Collection[str], ending: str) -> Iterator[tuple[str, str]]:
    """Every name with an ending, and what stands before it."""
    for name in names:
        if name.endswith(ending):
            yield name, name.removesuffix(ending)


# -- experts and constants, where no family says how they are named


def expert_gaps(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Experts of a layer are numbered from 0 without a gap, else some were pruned (LOAD-11)."""
    for path, experts in _experts(checkpoint).items():
        last = max(experts)
        if len(experts) <= last:
            # Ids come from names and may be huge: never build the whole range.
            missing = next(expert for expert in count_from(0) if expert not in experts)
            absent = count(last + 1 - len(experts), "expert")
            found = f"no tensors of {absent}, the first {missing}: the layer looks pruned"
            expected = f"experts 0 to {last}, or a list of those substituted"
            yield tensor_problem(Code.MISSING_EXPERT, checkpoint, path, found, expected, "LOAD-11")


def mixed_layouts(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A layer stores its experts one by one or all in one tensor, not both."""
    experts = _experts(checkpoint)
    for name in checkpoint.tensors:
        match = FUSED.fullmatch(name)
        if match and match[1] in experts:
            first = min(experts[match[1]].items())[1]
            found = f"a tensor of all experts beside {plain(first)}"
            yield tensor_problem(
                Code.FUSED_EXPERTS, checkpoint, name, found, "one layout in a layer"
            )


def constants_without_list(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Constants in a checkpoint whose config declares nothing (LOAD-11)."""
    stray = [name for name in checkpoint.tensors if name.endswith(f".{CONSTANT}")]
    if stray:
        found = f"{some(stray, 'constant')} and no list"
        expected = "approximate_experts in config.json"
        yield tensor_problem(Code.UNLISTED_LAYER, checkpoint, stray[0], found, expected, "LOAD-11")


def _experts(checkpoint: Checkpoint) -> dict[str, dict[int, str]]:
    """Path of an experts module -> expert id -> one of its tensors."""
    paths: dict[str, dict[int, str]] = defaultdict(dict)
    for name in checkpoint.tensors:
        if match := EXPERT.fullmatch(name):
            paths[match[1]].setdefault(int(match[2]), name)
    return paths


# -- values


def non_finite_weights(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every stored value is finite. Reads all weights, one small piece at a time.

    Types whose values are not known, or have no NaN and no infinity, are not read.
    """
    for name, entry in checkpoint.tensors.items():
        if entry.dtype not in dtypes.NON_FINITE:
            continue
        bad = sum(dtypes.non_finite(data, entry.dtype) for data in checkpoint.chunks(name))
        if bad:
            found = f"{count(bad, 'value')} of NaN or infinity in {show(list(entry.shape))}"
            warning = Severity.WARNING
            yield tensor_problem(
                Code.NON_FINITE_WEIGHT, checkpoint, name, found, "finite values", "", warning
            )
