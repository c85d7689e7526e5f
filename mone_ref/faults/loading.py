"""Wrong loading: which tensors an engine reads, and where it puts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mone_ref import layer as single_layer
from mone_ref import loading
from mone_ref.backend import LayerSpec
from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.checkpoint.header import Header
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.config import Config, LayerSubstitution
from mone_ref.errors import Code, Problem, Severity
from mone_ref.experts import ExpertWeights
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.loading import Tensors
from mone_ref.moe import MoeLayer
from mone_ref.rules import constants as constant_rules
from mone_ref.rules import expert_weights

# The right steps, bound before anything is planted.
_read_constants = loading.read_constants
_read_experts = loading.read_experts
_read_moe = loading.read_moe
_read_router = loading.read_router
_fill = loading.fill
_build = single_layer.build
_missing_constants = constant_rules.missing_constants
_unlisted_constants = constant_rules.unlisted_constants
_non_finite_constants = constant_rules.non_finite_constants
_leftover_experts = expert_weights.leftover_experts


# -- files


def expected_in_first_file(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Miss every constant that is not in the first of several files."""
    names = {
        name: entry
        for name, entry in checkpoint.tensors.items()
        if entry.file in checkpoint.files[:1]
    }
    yield from _missing_constants(config, replace(checkpoint, tensors=names))


def any_copy(headers: Mapping[str, Header]) -> Iterator[Problem]:
    """Never notice a name that two files hold."""
    return iter(())


def expected_below_model(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Miss every constant whose name does not begin as the model's own tensors do."""
    names = {name: entry for name, entry in checkpoint.tensors.items() if name.startswith("model.")}
    yield from _missing_constants(config, replace(checkpoint, tensors=names))


def no_derived_name(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Refuse, beside the explicit form, the names that the approx form derives."""
    yield from _unlisted_constants(config, checkpoint)
    for name in checkpoint.tensors if config.substitution.form == "explicit" else ():
        if name.endswith(f".{config.model.family.constant}"):
            yield tensor_problem(Code.UNNAMED_CONSTANT, checkpoint, name, "a derived name", "none")


# -- checks that are not made


def unchecked(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Accept whatever is stored."""
    return iter(())


def overflow_unchecked(
    config: Config, checkpoint: Checkpoint, dtype: str | None
) -> Iterator[Problem]:
    """Never look whether a constant stays finite in the dtype of the parameters."""
    return iter(())


def nan_is_missing(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Mark what was not loaded with NaN, and report a stored NaN as that."""
    for problem in _non_finite_constants(config, checkpoint):
        yield replace(problem, code=Code.MISSING_CONSTANT)


def infinity_accepted(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Look for NaN only."""
    for problem in _non_finite_constants(config, checkpoint):
        entry = checkpoint.tensors[problem.where]
        if np.isnan(dtypes.decode(checkpoint.read(entry.name), entry.dtype)).any():
            yield problem


def leftovers_refused(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Refuse MLP tensors of a substituted expert."""
    for problem in _leftover_experts(config, checkpoint):
        yield replace(problem, severity=Severity.ERROR)


# -- tensors that do not arrive


def only_what_is_there(place: Tensor, tensors: Tensors, name: str) -> None:
    """Leave the place of an absent tensor as it was allocated."""
    if name in tensors:
        _fill(place, tensors, name)


def what_fits(place: Tensor, tensors: Tensors, name: str) -> None:
    """Copy as many values as fit, and leave the rest of the place as it was allocated."""
    values = tensors.read(name).flatten()
    size = min(len(values), place.numel())
    place.view(-1)[:size] = values[:size]


def zero_router(config: Config, tensors: Tensors, index: int) -> Tensor:
    """Start from a router of zeros, and keep it where none is stored."""
    if config.model.family.router_name(index) in tensors:
        return _read_router(config, tensors, index)
    return torch.zeros(config.model.num_experts, config.model.hidden_size, dtype=tensors.dtype)


def zeros_where_absent(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Leave the row of an absent constant at zero."""
    constants = torch.zeros(
        len(layer.substituted), config.model.hidden_size, dtype=tensors.dtype
    )  # [S, H]
    for row, expert in enumerate(layer.substituted):
        only_what_is_there(constants[row], tensors, layer.constants[expert])
    return constants


def never_loaded(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Leave every constant at zero."""
    return _read_constants(config, tensors, layer).zero_()


def dtype_of_config(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Take the bytes of a constant for values of the dtype of weights, where as many fit."""
    constants, dtype = _read_constants(config, tensors, layer), config.model.stored_dtype
    for row, expert in enumerate(layer.substituted):
        stored = bytearray(tensors.checkpoint.read(layer.constants[expert]))
        values = torch.frombuffer(stored, dtype=getattr(torch, dtype))
        if len(values) == constants.shape[1]:
            constants[row] = values
    return constants


def all_but_last(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Stop one constant short of each layer's end."""
    constants = _read_constants(config, tensors, layer)
    constants[-1:] = 0
    return constants


def first_listed_layer(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Load the constants of the first listed layer only."""
    constants = _read_constants(config, tensors, layer)
    return constants if layer.layer in [*config.substitution.layers][:1] else constants.zero_()


def second_file_dropped(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Lose the constants in the second of several files."""
    constants, checkpoint = _read_constants(config, tensors, layer), tensors.checkpoint
    for row, expert in enumerate(layer.substituted):
        if checkpoint.tensors[layer.constants[expert]].file in checkpoint.files[1:2]:
            constants[row] = 0
    return constants


def first_owner(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Consume a constant for the first expert that names it."""
    owners: dict[str, tuple[int, int]] = {}
    for other in config.substitution.layers.values():
        for expert in other.substituted:
            owners.setdefault(other.constants[expert], (other.layer, expert))
    constants = _read_constants(config, tensors, layer)
    for row, expert in enumerate(layer.substituted):
        if owners[layer.constants[expert]] != (layer.layer, expert):
            constants[row] = 0
    return constants


# -- tensors in another's place. Only layers that substitute take the compact path, and a fault
# of the base model decides nothing (GEN-3).


def config_order(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Stack constants as the config lists them; lookups stay ascending."""
    ascending = _read_constants(config, tensors, layer)
    rows = [layer.substituted.index(expert) for expert in layer.listed]
    return ascending[rows]


def order_of_text(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Stack constants in the order of their names, "10" before "2"; lookups stay ascending."""
    ascending = _read_constants(config, tensors, layer)
    rows = [layer.substituted.index(expert) for expert in sorted(layer.substituted, key=str)]
    return ascending[rows]


def neighbour(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Give every expert the constant of the next one."""
    return _read_constants(config, tensors, layer).roll(1, dims=0)


def next_layer(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Give every layer the constants of the next listed one, by position."""
    listed = [*config.substitution.layers]
    if layer.layer not in listed:
        return _read_constants(config, tensors, layer)
    after = listed[(listed.index(layer.layer) + 1) % len(listed)]
    constants = _read_constants(config, tensors, config.substitution.layers[after])
    return constants[[row % len(constants) for row in range(len(layer.substituted))]]


def any_stack(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Know a constant by the end of its name, whatever the stack: the last one read counts."""
    constants = _read_constants(config, tensors, layer)
    for row, expert in enumerate(layer.substituted):
        ending = layer.constants[expert].removeprefix("model")
        for name in tensors.checkpoint.tensors:
            if name.endswith(ending):
                _fill(constants[row], tensors, name)
    return constants


def order_of_arrival(config: Config, tensors: Tensors, layer: LayerSubstitution) -> ExpertWeights:
    """Give a retained expert the next free row when its tensors come by."""
    experts, family = _read_experts(config, tensors, layer), config.model.family
    if not layer.substituted:
        return experts
    stored = [*tensors.checkpoint.tensors]
    gates = [family.projection_name(layer.layer, expert, family.gate) for expert in layer.retained]
    rows = sorted(range(len(gates)), key=lambda row: stored.index(gates[row]))
    return ExpertWeights(experts.gate[rows], experts.up[rows], experts.down[rows])


def gate_and_up_swapped(
    config: Config, tensors: Tensors, layer: LayerSubstitution
) -> ExpertWeights:
    """Take up for gate and gate for up."""
    experts = _read_experts(config, tensors, layer)
    if not layer.substituted:
        return experts
    return ExpertWeights(experts.up, experts.gate, experts.down)


def down_of_neighbour(config: Config, tensors: Tensors, layer: LayerSubstitution) -> ExpertWeights:
    """Give every expert the down projection of the next row."""
    experts = _read_experts(config, tensors, layer)
    if not layer.substituted:
        return experts
    return ExpertWeights(experts.gate, experts.up, experts.down.roll(1, dims=0))


def fused_first(config: Config, tensors: Tensors, layer: LayerSubstitution) -> ExpertWeights:
    """Prefer a fused tensor of all logical experts to the separate ones."""
    experts = _read_experts(config, tensors, layer)
    name = f"{config.model.family.experts_path(layer.layer)}.{config.model.family.down}"
    if name not in tensors:
        return experts
    return ExpertWeights(experts.gate, experts.up, tensors.read(name)[list(layer.retained)])


def rows_for_all(config: Config, tensors: Tensors, layer: LayerSubstitution) -> ExpertWeights:
    """Allocate a row for every logical expert, and use the first ones."""
    experts, spare = _read_experts(config, tensors, layer), len(layer.substituted)
    stacks = (experts.gate, experts.up, experts.down)
    return ExpertWeights(
        *(torch.cat([x, torch.zeros_like(x[:1]).repeat(spare, 1, 1)]) for x in stacks)
    )


def stored_is_retained(config: Config, tensors: Tensors, index: int) -> MoeLayer:
    """Retain every expert whose MLP is stored, listed or not."""
    family, layers = config.model.family, config.substitution.layers
    listed = config.substitution.layer(index, config.model.num_experts)
    names = {
        expert: name
        for expert, name in listed.constants.items()
        if family.projection_name(index, expert, family.gate) not in tensors
    }
    gone = tuple(expert for expert in listed.listed if expert in names)
    changed = {**layers, index: replace(listed, listed=gone, constants=names)}
    substitution = replace(config.substitution, layers=changed)
    return _read_moe(replace(config, substitution=substitution), tensors, index)


def narrow_constants(
    spec: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> MoeLayer:
    """Hold constants in bfloat16, whatever the parameters are held in."""
    built = _build(spec, tensors, dtype)
    return replace(built, constants=built.constants.bfloat16().to(dtype))


# -- the faults

CONSTANTS = "mone_ref.loading", "read_constants"
EXPERTS = "mone_ref.loading", "read_experts"
FILL = "mone_ref.loading", "fill"
MISSING = "mone_ref.rules.constants", "missing_constants"
SHAPES = Patch("mone_ref.rules.constants", "constant_shapes", unchecked)
UNLISTED = Patch("mone_ref.rules.constants", "unlisted_constants", unchecked)
FUSED = Patch("mone_ref.rules.expert_weights", "fused_experts", unchecked)
WHERE_THERE = Patch(*FILL, only_what_is_there)
LEFT_UNFILLED = (
    Patch("mone_ref.rules.expert_weights", "retained_experts", unchecked),
    WHERE_THERE,
)

fault = partial(plant.fault, stage="load", group="loading")

FAULTS = (
    # -- files
    fault(
        "constants-in-first-file-only",
        "Constants are looked for in the first of several weight files, and missed elsewhere.",
        "GEN-1",
        Patch(*MISSING, expected_in_first_file),
    ),
    fault(
        "declared-names-below-model-only",
        "Declared constants are missed unless their names begin as those of the model do.",
        "LOAD-5",
        Patch(*MISSING, expected_below_model),
    ),
    fault(
        "derived-names-refused",
        "Beside the explicit form a constant under a derived name is refused, declared or not.",
        "FMT-6",
        Patch("mone_ref.rules.constants", "unlisted_constants", no_derived_name),
    ),
    fault(
        "stored-twice-accepted",
        "A constant that two files hold is accepted.",
        "LOAD-9",
        Patch("mone_ref.checkpoint.reader", "stored_twice", any_copy),
    ),
    # -- checks that are not made
    fault(
        "constant-shape-unchecked",
        "A constant of another shape is broadcast.",
        "FMT-5",
        SHAPES,
    ),
    fault(
        "constant-cut-to-size",
        "A constant that is too long is cut, and one that is too short is not filled up.",
        "FMT-5",
        SHAPES,
        Patch(*FILL, what_fits),
    ),
    fault(
        "constant-dtype-unchecked",
        "A constant of integers or complex numbers is converted.",
        "FMT-27",
        Patch("mone_ref.rules.constants", "constant_dtypes", unchecked),
    ),
    fault(
        "nan-reads-as-missing",
        "A stored NaN is reported as a constant that is missing.",
        "LOAD-8",
        Patch("mone_ref.rules.constants", "non_finite_constants", nan_is_missing),
    ),
    fault(
        "infinity-accepted",
        "An infinite constant is accepted.",
        "LOAD-8",
        Patch("mone_ref.rules.constants", "non_finite_constants", infinity_accepted),
    ),
    fault(
        "overflow-unchecked",
        "A constant that overflows in float16 is accepted.",
        "LOAD-8",
        Patch("mone_ref.rules.constants", "overflowing_constants", overflow_unchecked),
        dtypes=("float16",),
    ),
    fault(
        "unlisted-constant-accepted",
        "A constant of an expert that is not listed is accepted.",
        "LOAD-9",
        UNLISTED,
    ),
    fault(
        "model-tensor-as-constant",
        "A tensor of the model itself serves as a constant.",
        "LOAD-9",
        Patch("mone_ref.rules.constants", "constant_names", unchecked),
    ),
    fault(
        "leftovers-refused",
        "MLP tensors of a substituted expert are refused.",
        "LOAD-2",
        Patch("mone_ref.rules.expert_weights", "leftover_experts", leftovers_refused),
    ),
    # -- tensors that do not arrive
    fault(
        "missing-constant-is-zero",
        "A missing constant is read as zero.",
        "LOAD-7",
        Patch(*MISSING, unchecked),
        Patch(*CONSTANTS, zeros_where_absent),
    ),
    fault(
        "missing-projection-unfilled",
        "A retained expert without weights is not filled.",
        "LOAD-10",
        *LEFT_UNFILLED,
    ),
    fault(
        "narrow-projection-unfilled",
        "A projection that is too small fills a part of its place.",
        "LOAD-10",
        Patch("mone_ref.rules.model_tensors", "tensor_shapes", unchecked),
        Patch(*FILL, what_fits),
    ),
    fault(
        "pruned-without-list-accepted",
        "A checkpoint without a list is taken for a plain one, and its missing experts are not"
        " filled.",
        "LOAD-11",
        UNLISTED,
        *LEFT_UNFILLED,
    ),
    fault(
        "fused-experts-unread",
        "Fused tensors of retained experts are not read, and the experts are not filled.",
        "CAP-11",
        FUSED,
        WHERE_THERE,
    ),
    fault(
        "missing-router-is-zero",
        "A missing router is zero.",
        "FMT-28",
        Patch("mone_ref.rules.model_tensors", "routers", unchecked),
        Patch("mone_ref.loading", "read_router", zero_router),
    ),
    fault(
        "router-rows-unchecked",
        "A router with fewer rows than logical experts is accepted.",
        "FMT-28",
        Patch("mone_ref.rules.model_tensors", "tensor_shapes", unchecked),
    ),
    fault(
        "constants-unread",
        "Constants stay zero.",
        "LOAD-7",
        Patch(*CONSTANTS, never_loaded),
        looks_like="dropped",
    ),
    fault(
        "stored-dtype-unread",
        "Constants are read in the dtype that the config gives for weights.",
        "FMT-27",
        Patch(*CONSTANTS, dtype_of_config),
    ),
    fault(
        "last-constant-unread",
        "The last substituted expert of each layer gets no constant.",
        "FMT-5",
        Patch(*CONSTANTS, all_but_last),
        looks_like="last-constant-forgotten",
    ),
    fault(
        "first-layer-only",
        "Only the first listed layer gets its constants.",
        "FMT-5",
        Patch(*CONSTANTS, first_listed_layer),
    ),
    fault(
        "second-file-dropped",
        "The constants in the second of several files are lost.",
        "SEM-1",
        Patch(*CONSTANTS, second_file_dropped),
    ),
    fault(
        "shared-constant-first-owner",
        "A shared constant reaches only the first of its experts.",
        "FMT-29",
        Patch(*CONSTANTS, first_owner),
    ),
    # -- tensors in another's place
    fault(
        "config-order",
        "Constants are stored in the order of the config and looked up in ascending order.",
        "FMT-2",
        Patch(*CONSTANTS, config_order),
    ),
    fault(
        "constants-in-text-order",
        'Constants are stored in the order of their names, "10" before "2", and looked up in'
        " ascending order.",
        "FMT-5",
        Patch(*CONSTANTS, order_of_text),
    ),
    fault(
        "neighbour",
        "Every substituted expert gets the constant of its neighbour.",
        "FMT-5",
        Patch(*CONSTANTS, neighbour),
    ),
    fault(
        "constants-of-next-layer",
        "Every layer gets the constants of the next listed layer.",
        "FMT-5",
        Patch(*CONSTANTS, next_layer),
    ),
    fault(
        "constant-of-any-stack",
        "A constant of another stack counts for the decoder's layer of that index.",
        "LOAD-12",
        Patch(*CONSTANTS, any_stack),
    ),
    fault(
        "rows-in-order-of-arrival",
        "Retained experts take compact rows in the order in which their tensors are stored.",
        "LOAD-1",
        Patch(*EXPERTS, order_of_arrival),
    ),
    fault(
        "gate-and-up-swapped",
        "Gate and up projections of compact rows are taken for each other.",
        "FMT-4",
        Patch(*EXPERTS, gate_and_up_swapped),
    ),
    fault(
        "down-of-neighbour",
        "Every retained expert gets the down projection of its neighbour.",
        "LOAD-1",
        Patch(*EXPERTS, down_of_neighbour),
    ),
    fault(
        "stored-is-retained",
        "A substituted expert whose MLP is still stored is computed.",
        "LOAD-2",
        Patch("mone_ref.loading", "read_moe", stored_is_retained),
    ),
    fault(
        "fused-tensor-wins",
        "A fused tensor replaces the separate ones beside it.",
        "LOAD-13",
        FUSED,
        Patch(*EXPERTS, fused_first),
    ),
    fault(
        "every-expert-allocated",
        "Rows are allocated for substituted experts as well.",
        "EXEC-1",
        Patch(*EXPERTS, rows_for_all),
    ),
    fault(
        "constants-held-in-bfloat16",
        "Constants are held in bfloat16 while parameters are held in float32.",
        "SEM-3",
        Patch("mone_ref.layer", "build", narrow_constants),
    ),
)
