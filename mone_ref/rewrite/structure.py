"""What a checkpoint is made of, from its headers and config.json: no family has to be known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from mone_ref import config as config_file
from mone_ref import strict_json
from mone_ref.checkpoint import Checkpoint, TensorEntry
from mone_ref.checkpoint.opening import open_regular
from mone_ref.config import FILE, Config, NotModelled
from mone_ref.errors import Code, Problem, Rejected, only_errors
from mone_ref.rewrite import names
from mone_ref.rewrite.names import Place
from mone_ref.rewrite.settings import Settings
from mone_ref.rules.generic import CONSTANT

LIMITS = config_file.LIMITS


class Layout(StrEnum):
    """How the routed experts of one layer are stored."""

    PER_EXPERT = "per expert"
    FUSED = "fused"
    BOTH = "both"


@dataclass(frozen=True)
class MoeLayer:
    """One layer with routed experts.

    ``block`` is the module path that holds router and experts. ``experts`` maps logical ids to
    every stored tensor of that expert, companions included; ``fused`` are tensors of all
    experts. ``row_tensors`` are the other tensors with one row per expert: router weight and
    bias, correction bias; ``router`` is the weight among them, ``[E, H]``.
    ``beside`` is what else lies in the block, shared experts first of all.
    """

    block: str
    place: Place
    is_mtp: bool
    experts: Mapping[int, tuple[TensorEntry, ...]]
    fused: tuple[TensorEntry, ...]
    constants: Mapping[int, TensorEntry]
    router: TensorEntry | None
    row_tensors: tuple[TensorEntry, ...]
    shared: tuple[TensorEntry, ...]
    beside: tuple[TensorEntry, ...]

    @cached_property
    def num_experts(self) -> int:
        """Logical experts: the router's rows, or what the experts' names and shapes show."""
        return max(self.router.shape[0] if self.router else 0, self.seen)

    @property
    def seen(self) -> int:
        """Logical experts as far as tensors of experts show them."""
        last = max((*self.experts, *self.constants), default=-1) + 1
        return max([last, *(entry.shape[0] for entry in self.fused if entry.shape)])

    @property
    def retained(self) -> Sequence[int]:
        """Ids of the experts that are stored, ascending."""
        if self.fused and not self.experts:
            return range(self.num_experts)  # of a broken header: never build it
        return tuple(sorted(self.experts))

    @property
    def layout(self) -> Layout:
        """How the experts are stored."""
        if self.experts and self.fused:
            return Layout.BOTH
        return Layout.FUSED if self.fused else Layout.PER_EXPERT

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the projections, sorted: ``down_proj``, ``gate_proj``, ``up_proj``."""
        prefix = f"{self.block}.{names.EXPERTS}."
        one = min(self.experts.items())[1] if self.experts else self.fused
        texts = [entry.name.removeprefix(prefix).removeprefix(f"{self.block}.") for entry in one]
        parts = [names.part_of(_after_index(text)) for text in texts]
        return tuple(sorted({part.projection for part in parts if part}))

    @property
    def expert_tensors(self) -> Iterator[TensorEntry]:
        """Every tensor of a routed expert."""
        for stored in self.experts.values():
            yield from stored
        yield from self.fused


@dataclass(frozen=True)
class Structure:
    """A checkpoint's layers with experts, and what is wrong with it.

    ``config`` is what ``mone_ref.config`` made of config.json, None for a family that has no
    row or a config that it refuses. ``limits`` say why a model has no row; they are no fault.
    """

    checkpoint: Checkpoint
    settings: Settings
    layers: tuple[MoeLayer, ...]
    config: Config | None
    problems: tuple[Problem, ...]
    limits: tuple[Problem, ...] = ()
    unrecognised: tuple[str, ...] = field(default=())

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that make the layers unreliable."""
        return tuple(only_errors(self.problems))

    @cached_property
    def decoder(self) -> tuple[MoeLayer, ...]:
        """Layers of the main stack, without MTP layers."""
        main = self.main_stack
        return tuple(
            layer for layer in self.layers if not layer.is_mtp and layer.place.stack == main
        )

    @property
    def mtp(self) -> tuple[MoeLayer, ...]:
        """MTP layers with experts."""
        return tuple(layer for layer in self.layers if layer.is_mtp)

    @property
    def others(self) -> tuple[MoeLayer, ...]:
        """Layers with experts in a second model of the checkpoint, such as a talker."""
        main = self.main_stack
        return tuple(
            layer for layer in self.layers if not layer.is_mtp and layer.place.stack != main
        )

    @cached_property
    def main_stack(self) -> str:
        """The stack with most layers with experts, ``model.layers``."""
        return _main_stack(layer.place for layer in self.layers if not layer.is_mtp)

    @cached_property
    def num_experts(self) -> int:
        """Logical experts of a layer of the decoder, 0 without experts; the most, if uneven."""
        return max((layer.num_experts for layer in self.decoder), default=0)

    def is_mtp(self, name: str) -> bool:
        """Whether a tensor belongs to an MTP layer: by its path, or past the decoder's end."""
        if names.MTP.search(name):
            return True
        rest = name.removeprefix(f"{self.main_stack}.")
        index = rest.partition(".")[0]
        last = self.settings.num_layers
        return bool(
            last is not None and rest is not name and index.isdecimal() and int(index) >= last
        )

    def key(self, layer: MoeLayer) -> str:
        """How plans name a layer: its index in the main stack, the whole path elsewhere."""
        return str(layer.place.layer) if layer.place.stack == self.main_stack else layer.place.path


def read(directory: Path | str) -> Structure:
    """Read headers and config.json; a bad checkpoint gives problems, never an exception."""
    checkpoint = Checkpoint.open(directory)
    found = list(checkpoint.problems)
    limits: tuple[Problem, ...] = ()
    config, settings = None, Settings({})
    if not any(problem.code is Code.NOT_A_CHECKPOINT for problem in found):
        config, limits, said = _read_config(checkpoint.directory)
        found = [*said, *found]
        settings = Settings(_document(checkpoint.directory))
    layers, unrecognised = _layers(checkpoint, settings)
    return Structure(checkpoint, settings, layers, config, tuple(found), limits, unrecognised)


def _read_config(directory: Path) -> tuple[Config | None, tuple[Problem, ...], list[Problem]]:
    """The config of a known family, why there is none, and what is wrong with the file."""
    try:
        config = config_file.read(directory)
        return config, (), list(config.findings)
    except NotModelled as limited:
        return limited.config, limited.problems, list(limited.findings)
    except Rejected as rejected:
        limits = tuple(problem for problem in rejected.problems if problem.code in LIMITS)
        return None, limits, [problem for problem in rejected.problems if problem not in limits]


def _document(directory: Path) -> Mapping[str, Any]:
    """config.json as it stands; empty where ``_read_config`` has said that it cannot be read."""
    try:
        with open_regular(directory / FILE) as file:
            data = file.read(config_file.MAX_BYTES + 1)
        value = strict_json.parse(data).value if len(data) <= config_file.MAX_BYTES else {}
    except (OSError, strict_json.StrictJsonError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class _Block:
    """The tensors of one block while names are read."""

    experts: dict[int, list[TensorEntry]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[int, TensorEntry] = field(default_factory=dict)
    fused: list[TensorEntry] = field(default_factory=list)
    beside: dict[str, TensorEntry] = field(default_factory=dict)


def _layers(
    checkpoint: Checkpoint, settings: Settings
) -> tuple[tuple[MoeLayer, ...], tuple[str, ...]]:
    """Layers with experts in order, and names that speak of experts but are not understood."""
    blocks: dict[str, _Block] = defaultdict(_Block)
    others, unrecognised = [], []
    for name, entry in checkpoint.tensors.items():
        parts = names.split(name)
        if parts is None:
            bare = names.BARE_FUSED.fullmatch(name)
            if bare and len(entry.shape) == 3:
                blocks[bare[1]].fused.append(entry)
            else:
                others.append(entry)
            continue
        block, rest = parts
        expert = names.expert_of(rest)
        if expert is None:
            if names.part_of(rest):
                blocks[block].fused.append(entry)
            elif f"{names.EXPERTS}.{rest}" in names.CORRECTION_BIASES:
                others.append(entry)
            else:
                unrecognised.append(name)
        elif expert[1] == CONSTANT:
            blocks[block].constants[expert[0]] = entry
        else:
            blocks[block].experts[expert[0]].append(entry)
    for entry in others:
        owner = _block_of(entry.name, blocks)
        if owner is not None:
            blocks[owner].beside[entry.name.removeprefix(f"{owner}.")] = entry
    return _sorted_layers(blocks, settings), tuple(unrecognised)


def _block_of(name: str, blocks: Mapping[str, _Block]) -> str | None:
    """The innermost block that a tensor lies in."""
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        if path in blocks:
            return path
    return None


def _sorted_layers(blocks: Mapping[str, _Block], settings: Settings) -> tuple[MoeLayer, ...]:
    places = {path: names.place_of(path) or Place(path, 0) for path in blocks}
    main = _main_stack(place for path, place in places.items() if not names.MTP.search(f"{path}."))
    last = settings.num_layers
    layers = []
    for path, block in blocks.items():
        place = places[path]
        past = place.stack == main and last is not None and place.layer >= last
        is_mtp = past or bool(names.MTP.search(f"{path}."))
        layers.append(_layer(path, place, is_mtp, block))
    return tuple(sorted(layers, key=lambda one: (one.place.stack, one.place.layer, one.block)))


def _main_stack(places: Iterable[Place]) -> str:
    counted: dict[str, int] = defaultdict(int)
    for place in places:
        counted[place.stack] += 1
    return max(counted, key=lambda stack: (counted[stack], stack), default="")


def _layer(path: str, place: Place, is_mtp: bool, block: _Block) -> MoeLayer:
    experts = {expert: tuple(stored) for expert, stored in sorted(block.experts.items())}
    constants = dict(sorted(block.constants.items()))
    fused = tuple(block.fused)
    bare = MoeLayer(path, place, is_mtp, experts, fused, constants, None, (), (), ())
    router = _router(block.beside, bare.seen)
    count = router.shape[0] if router else bare.seen
    rows, shared, beside = [], [], []
    for inner, entry in block.beside.items():
        if names.SHARED.match(inner):
            shared.append(entry)
        elif _has_expert_rows(inner, entry, count):
            rows.append(entry)
        else:
            beside.append(entry)
    return MoeLayer(
        path,
        place,
        is_mtp,
        experts,
        fused,
        constants,
        router,
        tuple(rows),
        tuple(shared),
        tuple(beside),
    )


def _router(beside: Mapping[str, TensorEntry], seen: int) -> TensorEntry | None:
    """The router weight: a known name, and at least one row per expert that is stored (D03)."""
    for module in names.ROUTERS:
        entry = beside.get(f"{module}.weight")
        if entry and len(entry.shape) == 2 and entry.shape[0] >= max(seen, 2):
            return entry
    return None


def _has_expert_rows(inner: str, entry: TensorEntry, count: int) -> bool:
    """Whether a tensor of the block has one row or value per expert, by name and shape."""
    known = inner in names.CORRECTION_BIASES or inner.startswith(
        tuple(f"{module}." for module in names.ROUTERS)
    )
    return known and (entry.shape[:1] == (count,) or entry.shape == (1, count))


def _after_index(text: str) -> str:
    expert = names.expert_of(text)
    return expert[1] if expert else text
