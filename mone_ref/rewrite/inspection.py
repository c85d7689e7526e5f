"""What ``mone-ref inspect`` tells of a checkpoint: counts, bytes, and what decoding reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mone_ref import explicit, families
from mone_ref.checkpoint import TensorEntry
from mone_ref.config import FILE
from mone_ref.declaration import APPROX
from mone_ref.dialects import INIT_TOKENS
from mone_ref.errors import Problem
from mone_ref.fields import Fields
from mone_ref.rewrite import names, soundness, structure
from mone_ref.rewrite.components import Classifier, Component, sizes
from mone_ref.rewrite.structure import MoeLayer, Structure
from mone_ref.rewrite.uncollected import uncollected

GIGA = 10**9


@dataclass(frozen=True)
class LayerSummary:
    """One layer with experts."""

    path: str
    mtp: bool
    experts: int
    retained: int
    constants: int
    layout: str
    projections: tuple[str, ...]
    routers: int


@dataclass(frozen=True)
class Active:
    """What one token meets while decoding.

    ``parameters`` and ``bytes`` count top-k experts, or all retained ones where fewer are
    left: routes to constants read next to nothing, so a substituted model reads at most this.
    The embedding table counts as one row, the output head whole.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The whole answer; numbers are of what is stored."""

    directory: str
    family: str | None
    model_type: str
    stack: str
    layers: tuple[LayerSummary, ...]
    num_experts: int
    top_k: int | None
    router_keys: int
    expert_keys: int
    tensors: int
    files: int
    dtypes: dict[str, int]
    companions: dict[str, int]
    correction_biases: tuple[str, ...]
    router_biases: int
    shared: int
    mtp_layers: int
    form: str
    substituted: int
    dialects: tuple[str, ...]
    bytes: dict[str, int]
    parameters: int
    active: Active
    saved_bytes: int
    problems: tuple[Problem, ...]

    @property
    def size(self) -> int:
        """All tensor bytes."""
        return sum(self.bytes.values())

    def tokens_per_second(self, bandwidth: float) -> float | None:
        """See ``decode_speed``; None where nothing is read."""
        return decode_speed(bandwidth, self.active.bytes) if self.active.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "problems": [problem.as_dict() for problem in self.problems]}


def decode_speed(bandwidth: float, active_bytes: float) -> float:
    """Tokens per second of decoding one sequence, if reading weights is all that takes time.

    ``bandwidth`` in GB/s, ``active_bytes`` of the parameters that one token meets.
    """
    return bandwidth * GIGA / active_bytes


@uncollected
def inspect(directory: Path | str) -> Inspection:
    """Read headers and config.json; a broken checkpoint gives problems, never an exception."""
    read = structure.read(directory)
    problems = (*read.problems, *soundness.problems(read))
    every = [*read.decoder, *read.others, *read.mtp]
    entries = read.checkpoint.tensors.values()
    known = Classifier(read)
    counted = {entry.name: parameters(entry) for entry in entries}
    endings = Counter(names.ending(entry.name) for entry in entries)
    form, dialects = declared(read)
    gone = {layer.block: layer.num_experts - len(layer.retained) for layer in every}
    rows = [entry.name for layer in every for entry in layer.row_tensors]
    return Inspection(
        directory=str(directory),
        family=family(read),
        model_type=read.settings.model_type,
        stack=read.main_stack,
        layers=tuple(summary(layer) for layer in every),
        num_experts=read.num_experts,
        top_k=read.settings.top_k,
        router_keys=sum(layer.router is not None for layer in every),
        expert_keys=sum(1 for layer in every for _ in layer.expert_tensors),
        tensors=len(read.checkpoint.tensors),
        files=len(read.checkpoint.files),
        dtypes=dict(Counter(entry.dtype for entry in entries)),
        companions={
            ending.removeprefix("."): found
            for ending, found in endings.items()
            if names.is_companion(ending)
        },
        correction_biases=tuple(dict.fromkeys(_corrections(every))),
        router_biases=sum(name.endswith(".bias") for name in rows),
        shared=sum(len(layer.shared) for layer in every),
        mtp_layers=len(read.mtp),
        form=form,
        substituted=sum(gone.values()),
        dialects=dialects,
        bytes=sizes(known, entries),
        parameters=sum(counted.values()),
        active=active(read, known, counted),
        saved_bytes=sum(_saved(layer, gone[layer.block]) for layer in every),
        problems=problems,
    )


def family(read: Structure) -> str | None:
    """The family's row that serves a config, also where quantisation keeps it from being read."""
    listed = read.settings.document.get("architectures")
    named = listed if isinstance(listed, list) else []
    architectures = [name for name in named if isinstance(name, str)]
    found = families.find(architectures, read.settings.model_type)
    return found.name if found else None


def summary(layer: MoeLayer) -> LayerSummary:
    """One row of the report."""
    return LayerSummary(
        layer.place.path,
        layer.is_mtp,
        layer.num_experts,
        len(layer.retained),
        len(layer.constants),
        str(layer.layout),
        layer.projections,
        int(layer.router is not None),
    )


def parameters(entry: TensorEntry) -> int:
    """Model parameters in a tensor: 4-bit formats pack several in one element, scales are none."""
    return _per_element(entry.dtype, names.ending(entry.name)) * math.prod(entry.shape)


@lru_cache(maxsize=names.CACHED)
def _per_element(dtype: str, ending: str) -> int:
    if names.is_companion(ending):
        return 0
    packed = (
        factor
        for (kind, end), factor in names.PACKED.items()
        if kind == dtype and ending.endswith(end)
    )
    return next(packed, 1)


def active(read: Structure, known: Classifier, counted: Mapping[str, int]) -> Active:
    """Parameters and bytes that one decoded token meets; see ``Active``.

    ``known`` has the component of each tensor, ``counted`` its parameters.
    """
    total = [0.0, 0.0]
    stored = read.checkpoint.tensors
    tied = read.settings.tied and not any(map(names.HEAD.search, stored))
    for entry in stored.values():
        share = 1.0
        if known[entry.name] in (Component.EXPERTS, Component.CONSTANTS, Component.MTP):
            continue
        if names.EMBEDDINGS.search(entry.name) and not tied:
            share = 1 / max(entry.shape[0], 1) if entry.shape else 1.0
        total[0] += share * counted[entry.name]
        total[1] += share * entry.size
    for layer in read.decoder:
        if layer.retained:
            read_experts = min(read.settings.top_k or 0, len(layer.retained))
            share = read_experts / len(layer.retained)
            total[0] += share * sum(counted[entry.name] for entry in layer.expert_tensors)
            total[1] += share * sum(entry.size for entry in layer.expert_tensors)
    return Active(round(total[0]), round(total[1]))


def _saved(layer: MoeLayer, gone: int) -> int:
    """Bytes that a layer's substituted experts would take, less what its constants take."""
    if not gone or not layer.retained:
        return 0
    stored = sum(entry.size for entry in layer.expert_tensors)
    constants = sum(entry.size for entry in layer.constants.values())
    return gone * stored // len(layer.retained) - constants


def _corrections(layers: list[MoeLayer]) -> Iterator[str]:
    """Spellings of the correction bias, below the block."""
    for layer in layers:
        for entry in layer.row_tensors:
            inner = entry.name.removeprefix(f"{layer.block}.")
            if inner in names.CORRECTION_BIASES:
                yield inner


def declared(read: Structure) -> tuple[str, tuple[str, ...]]:
    """The form that config.json declares, and other dialects in it by name (A01)."""
    fields = Fields(read.settings.document, FILE)
    forms = []
    if any(found.value for found in fields.find(APPROX)):
        forms.append("approx")
    if explicit.find(fields):
        forms.append("explicit")
    others = [key for key in ("mone", INIT_TOKENS) if fields.find(key)]
    if read.settings.model_type.endswith("_compressed"):
        others.append("mode-pd")
    return " and ".join(forms) or "none", tuple(others)
