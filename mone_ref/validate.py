"""Every rule that a checkpoint must keep, once: config, files and tensors against each other.

One module-level function per rule. The loader raises what ``check`` finds, the
command line prints it; neither knows a rule of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mone_ref import config as config_file
from mone_ref import generic_rules, layout, naming_rules
from mone_ref.checkpoint import Checkpoint, TensorEntry, dtypes
from mone_ref.checkpoint.findings import most
from mone_ref.checkpoint.tensor_problem import tensor_problem as _problem
from mone_ref.checkpoint.text import count, some
from mone_ref.config import Config, NotModelled
from mone_ref.errors import Code, Problem, Rejected, Severity, show
from mone_ref.tensor_names import ExpertTensor, expert_tensor, layer_index

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

MASK = 1e4
"""Magnitude of a router row that can only be a mask, far beyond trained weights."""

NON_FINITE = (Code.NON_FINITE_CONSTANT, Code.NON_FINITE_ROUTER)


@dataclass(frozen=True)
class Report:
    """What ``check`` found, in the order of the rules.

    ``not_modelled`` says why a model is not computed here. That is no fault of the
    checkpoint, but it cannot be loaded. ``config`` is None where config.json was rejected,
    or where rules that need the family's row did not apply for such a reason.
    ``checkpoint`` is None where the path is no readable directory.
    """

    problems: tuple[Problem, ...]
    config: Config | None
    checkpoint: Checkpoint | None
    not_modelled: tuple[Problem, ...] = ()

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that stop a load."""
        return self._of(Severity.ERROR)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Problems that a producer should mend."""
        return self._of(Severity.WARNING)

    @property
    def notes(self) -> tuple[Problem, ...]:
        """Facts that may surprise."""
        return self._of(Severity.NOTE)

    def _of(self, severity: Severity) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity is severity)


def check(directory: Path | str, dtype: str | None = None, *, scan: bool = False) -> Report:
    """Check a checkpoint directory without loading it; never raises for a bad checkpoint.

    Reads config.json, the index, all headers, the constants and the routers, and both
    embedding matrices where they are tied and stored; with ``scan`` every weight, for NaN
    and infinity. ``dtype`` is the type in which parameters will be held (``float16``):
    constants must stay finite in it (R8). Tensors are compared with the config only when
    both could be read without an error. Of one kind of finding at most
    ``checkpoint.findings.MOST`` are listed.

    Raises ValueError for a ``dtype`` that is not in ``checkpoint.dtypes.PARAMETER_DTYPES``.
    """
    if dtype not in (None, *dtypes.PARAMETER_DTYPES):
        raise ValueError(f"dtype must be one of {dtypes.PARAMETER_DTYPES}, got {show(dtype)}")
    checkpoint = Checkpoint.open(directory)
    if any(problem.code is Code.NOT_A_CHECKPOINT for problem in checkpoint.problems):
        return Report(checkpoint.problems, None, None)
    config: Config | None = None
    not_modelled: tuple[Problem, ...] = ()
    try:
        config = config_file.read(checkpoint.directory)
        problems = [*config.findings, *checkpoint.problems]
    except NotModelled as limits:
        config, not_modelled = limits.config, limits.problems
        problems = [*limits.findings, *checkpoint.problems]
    except Rejected as rejected:
        problems = [*most(rejected.problems), *checkpoint.problems]
    if not checkpoint.errors:
        try:
            if config is not None:
                problems += tensor_problems(config, checkpoint, dtype)
            elif not_modelled:
                problems += plain_problems(checkpoint)
            problems += stored_problems(checkpoint, scan, problems)
        except Rejected as changed:  # a file changed while it was read
            problems += changed.problems
    return Report(tuple(problems), config, checkpoint, not_modelled)


def tensor_problems(
    config: Config, checkpoint: Checkpoint, dtype: str | None = None
) -> Iterator[Problem]:
    """All rules between a config and the tensors of a checkpoint, in order."""
    another_model = [
        *naming_rules.decoder_path(config, checkpoint),
        *naming_rules.layer_kinds(config, checkpoint),
    ]
    if another_model:  # every other rule would report every tensor
        yield from another_model
        return
    for rule in (
        missing_constants(config, checkpoint),
        constant_names(config, checkpoint),
        constant_shapes(config, checkpoint),
        constant_dtypes(config, checkpoint),
        non_finite_constants(config, checkpoint),
        overflowing_constants(config, checkpoint, dtype),
        unlisted_constants(config, checkpoint),
        fused_experts(config, checkpoint),
        retained_experts(config, checkpoint),
        leftover_experts(config, checkpoint),
        routers(config, checkpoint),
        model_tensors(config, checkpoint),
        tensor_shapes(config, checkpoint),
        tensor_dtypes(config, checkpoint),
        tied_head(config, checkpoint),
        non_finite_routers(config, checkpoint),
        masked_routers(config, checkpoint),
        unbuilt_layers(config, checkpoint),
        unknown_tensors(config, checkpoint),
    ):
        yield from most(rule)


def plain_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Rules for a plain checkpoint of a model that is not computed here."""
    yield from most(generic_rules.expert_gaps(checkpoint))
    yield from most(generic_rules.mixed_layouts(checkpoint))
    yield from generic_rules.constants_without_list(checkpoint)


def stored_problems(
    checkpoint: Checkpoint, scan: bool, known: Sequence[Problem]
) -> Iterator[Problem]:
    """Rules on what is stored, whatever the config says; ``known`` is not said again."""
    yield from generic_rules.orphaned_companions(checkpoint)
    yield from generic_rules.missing_scales(checkpoint)
    if scan:
        reported = {problem.where for problem in known if problem.code in NON_FINITE}
        found = generic_rules.non_finite_weights(checkpoint)
        yield from most(problem for problem in found if problem.where not in reported)


# -- constants


def missing_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every substituted expert has its constant (LOAD-7)."""
    for layer in config.substitution.layers.values():
        for expert in layer.substituted:
            name = layer.constants[expert]
            if name not in checkpoint.tensors:
                expected = f"the constant of substituted expert {expert} of layer {layer.layer}"
                yield _problem(
                    Code.MISSING_CONSTANT, checkpoint, name, "nothing", expected, "LOAD-7"
                )


def constant_names(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The explicit form names no tensor of the model itself, which would be consumed (LOAD-9)."""
    for layer in config.substitution.layers.values():
        for expert, name in layer.constants.items():
            if _is_models_own(config, name):
                found = f"the constant of expert {expert} of layer {layer.layer}"
                expected = "a tensor that the model itself does not need"
                yield _problem(Code.CONSTANT_NAME, checkpoint, name, found, expected, "LOAD-9")


def constant_shapes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is one vector ``[H]``, without any further dimension (FMT-5)."""
    hidden = config.model.hidden_size
    for entry in _constants(config, checkpoint):
        if entry.shape != (hidden,):
            found, expected = f"shape {show(list(entry.shape))}", f"[{hidden}], the hidden size"
            yield _problem(Code.CONSTANT_SHAPE, checkpoint, entry.name, found, expected, "FMT-5")


def constant_dtypes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is stored in a float type of at least 16 bits (FMT-27)."""
    for entry in _constants(config, checkpoint):
        if entry.dtype not in dtypes.FLOATS:
            found, expected = f"type {show(entry.dtype)}", f"one of {', '.join(dtypes.FLOATS)}"
            yield _problem(Code.CONSTANT_DTYPE, checkpoint, entry.name, found, expected, "FMT-27")


def non_finite_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A constant is finite as stored (LOAD-8)."""
    for entry in _readable_constants(config, checkpoint):
        finite = np.isfinite(dtypes.decode(checkpoint.read(entry.name), entry.dtype))  # [H]
        if not finite.all():
            bad = np.flatnonzero(~finite)
            found = f"{count(len(bad), 'value')} of NaN or infinity, the first at index {bad[0]}"
            expected = "finite values"
            yield _problem(
                Code.NON_FINITE_CONSTANT, checkpoint, entry.name, found, expected, "LOAD-8"
            )


def overflowing_constants(
    config: Config, checkpoint: Checkpoint, dtype: str | None
) -> Iterator[Problem]:
    """A constant stays finite in the dtype in which parameters are held (LOAD-8)."""
    if dtype is None:
        return
    bound = dtypes.overflow_bound(dtype)
    for entry in _readable_constants(config, checkpoint):
        values = dtypes.decode(checkpoint.read(entry.name), entry.dtype).astype(np.float64)  # [H]
        bad = np.flatnonzero(np.isfinite(values) & (np.abs(values) >= bound))
        if len(bad):
            found = (
                f"{count(len(bad), 'value')} beyond {dtype},"
                f" the first at index {bad[0]}: {values[bad[0]]:g}"
            )
            expected = f"magnitudes that stay finite in {dtype}"
            yield _problem(
                Code.CONSTANT_OVERFLOW, checkpoint, entry.name, found, expected, "LOAD-8"
            )


def unlisted_constants(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """No constant without an entry in the list (LOAD-9, LOAD-11).

    One problem per constant in a listed layer. A layer that is not listed at all gives
    one problem: what is wrong is its missing entry.
    """
    unlisted: dict[int, dict[int, str]] = defaultdict(dict)
    for (layer, expert), name in _stray_constants(config, checkpoint).items():
        unlisted[layer][expert] = name
    for layer, names in unlisted.items():
        if layer in config.substitution.layers:
            for expert, name in names.items():
                yield _unlisted_constant(config, checkpoint, layer, expert, name)
        else:
            # Without any list the whole checkpoint looks like a plain one (LOAD-11).
            clause = "LOAD-9" if config.substitution.layers else "LOAD-11"
            found = f"constants of experts {show(sorted(names))}"
            expected = f"an entry for layer {layer} in {_list(config)}"
            first = names[min(names)]
            yield _problem(Code.UNLISTED_LAYER, checkpoint, first, found, expected, clause)


def _unlisted_constant(
    config: Config, checkpoint: Checkpoint, layer: int, expert: int, name: str
) -> Problem:
    """A constant in a listed layer whose name no declaration gives."""
    if _is_listed(config, layer, expert):
        declared = show(config.substitution.layers[layer].constants[expert])
        found = f"a constant of expert {expert}, whose constant is {declared}"
        expected = "one constant per substituted expert"
        return _problem(Code.UNNAMED_CONSTANT, checkpoint, name, found, expected, "LOAD-9")
    kind = "retained" if expert < config.model.num_experts else "unknown"
    found, expected = f"a constant of {kind} expert {expert}", "constants of listed experts only"
    return _problem(Code.UNLISTED_CONSTANT, checkpoint, name, found, expected, "LOAD-9")


# -- experts


def fused_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """No tensor that holds several projections or experts of a layer (CAP-11).

    On a substituted layer the format forbids it; on any other it is not read here.
    """
    for layer, names in _fused_layers(config, checkpoint).items():
        substituted = layer in config.substitution.layers
        found = f"fused {some(names, 'tensor')}"
        expected = "one tensor per expert and projection: unfuse them under logical ids"
        clause = "CAP-11" if substituted else ""
        yield _problem(Code.FUSED_EXPERTS, checkpoint, names[0], found, expected, clause)


def retained_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every expert that is not listed has its three projections (LOAD-10, LOAD-11).

    Experts of an unlisted layer, or with a constant, that lack all three say that the
    checkpoint was pruned and the list is lost or stale: one problem for the layer.
    """
    misnamed = list(naming_rules.no_expert(config, checkpoint))
    if misnamed:
        yield from misnamed
        return
    family = config.model.family
    constants = _stray_constants(config, checkpoint)
    fused = _fused_layers(config, checkpoint)
    for layer in config.model.moe_layers:
        if layer in fused:
            continue
        pruned: list[int] = []
        for expert in config.substitution.layer(layer, config.model.num_experts).retained:
            names = [family.projection_name(layer, expert, part) for part in family.projections]
            missing = [name for name in names if name not in checkpoint.tensors]
            listed = layer in config.substitution.layers
            if len(missing) == len(names) and (not listed or (layer, expert) in constants):
                pruned.append(expert)
                continue
            for name in missing:
                expected = f"a projection of retained expert {expert} of layer {layer}"
                yield _problem(
                    Code.MISSING_EXPERT, checkpoint, name, "nothing", expected, "LOAD-10"
                )
        if pruned:
            found = f"no projections of experts {show(pruned)}: the layer looks pruned"
            expected = f"them, or their ids for layer {layer} in {_list(config)}"
            where = family.experts_path(layer)
            yield _problem(Code.MISSING_EXPERT, checkpoint, where, found, expected, "LOAD-11")


def leftover_experts(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A substituted expert needs no projections; they are skipped (LOAD-2), and cost bytes."""
    leftovers: dict[tuple[int, int | None], list[str]] = defaultdict(list)
    for tensor in _expert_tensors(config, checkpoint):
        if _is_listed(config, tensor.layer, tensor.expert) and not tensor.is_constant:
            leftovers[tensor.layer, tensor.expert].append(tensor.name)
    for (_, expert), names in leftovers.items():
        wasted = sum(checkpoint.tensors[name].size for name in names)
        found = f"{some(names, 'tensor')} ({count(wasted, 'byte')}) of substituted expert {expert}"
        expected = "its constant only"
        warning = Severity.WARNING
        yield _problem(
            Code.LEFTOVER_EXPERT, checkpoint, names[0], found, expected, "LOAD-2", warning
        )


# -- the model's own tensors


def routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every MoE layer has its router, under its family's name (FMT-1)."""
    misnamed = list(naming_rules.no_router(config, checkpoint))
    if misnamed:
        yield from misnamed
        return
    for layer, name in zip(config.model.moe_layers, _routers(config), strict=True):
        if name not in checkpoint.tensors:
            found = "nothing"
            if candidates := naming_rules.router_candidates(config, checkpoint, layer):
                found = f"{some(candidates, 'unread tensor')} of as many rows"
            expected = f"the router of layer {layer}"
            yield _problem(Code.MISSING_TENSOR, checkpoint, name, found, expected, "FMT-1")


def model_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Everything but experts, constants and routers that the model needs is there."""
    elsewhere, experts = set(_routers(config)), f".{config.model.family.experts}."
    for name in layout.of_model(config):
        if experts not in name and name not in elsewhere and name not in checkpoint.tensors:
            expected = "a tensor of the model"
            yield _problem(Code.MISSING_TENSOR, checkpoint, name, "nothing", expected)


def tensor_shapes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every tensor of the model has the shape that the config implies.

    A router with fewer than E rows is the common case: experts were deleted (FMT-1).
    """
    routers = _routers(config)
    for name, shape in layout.of_model(config).items():
        entry = checkpoint.tensors.get(name)
        if entry and entry.shape != shape:
            found, expected = f"shape {show(list(entry.shape))}", show(list(shape))
            clause = "FMT-1" if name in routers else ""
            yield _problem(Code.TENSOR_SHAPE, checkpoint, name, found, expected, clause)


def tensor_dtypes(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Every tensor of the model is stored in a float type: no quantised weights."""
    for name in layout.of_model(config):
        entry = checkpoint.tensors.get(name)
        if entry and entry.dtype not in dtypes.FLOATS:
            found, expected = f"type {show(entry.dtype)}", f"one of {', '.join(dtypes.FLOATS)}"
            yield _problem(Code.TENSOR_DTYPE, checkpoint, name, found, expected)


def tied_head(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A head that is stored although it is tied must equal the embeddings.

    Loaders overwrite it, so a different one is lost without a word.
    """
    stored = EMBEDDING in checkpoint.tensors and HEAD in checkpoint.tensors
    if not config.model.tie_word_embeddings or not stored:
        return
    equal = _equal(checkpoint, EMBEDDING, HEAD)
    found = "a copy of the embeddings" if equal else "a head that differs from the embeddings"
    expected = "none: tie_word_embeddings is true"
    severity = Severity.NOTE if equal else Severity.ERROR
    yield _problem(Code.TIED_HEAD, checkpoint, HEAD, found, expected, "", severity)


def non_finite_routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A router with NaN or infinity makes routing meaningless; small enough to look at."""
    for name, values in _read_routers(config, checkpoint):
        bad = ~np.isfinite(values)  # [E, H]
        if bad.any():
            total, rows = count(int(bad.sum()), "value"), np.flatnonzero(bad.any(axis=1)).tolist()
            found = f"{total} of NaN or infinity, for experts {show(rows)}"
            code, warning = Code.NON_FINITE_ROUTER, Severity.WARNING
            yield _problem(code, checkpoint, name, found, "finite values", "", warning)


def masked_routers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A row of one huge value is meant as a mask on a logit, and is none.

    The logit is that value times the sum of the hidden state, whose sign varies: for half
    of the tokens the masked expert wins.
    """
    for name, values in _read_routers(config, checkpoint):
        first = values[:, 0]  # [E]
        huge = np.isfinite(first) & (np.abs(first) >= MASK) & (values.shape[1] > 1)
        masked = huge & (values == first[:, None]).all(axis=1)
        if masked.any():
            rows = show(np.flatnonzero(masked).tolist())
            found = f"one value beyond {MASK:g} all over the rows of experts {rows}"
            expected = "router weights: a row times a hidden state is a logit"
            code, warning = Code.ROUTER_MASK, Severity.WARNING
            yield _problem(code, checkpoint, name, found, expected, "", warning)


def _read_routers(
    config: Config, checkpoint: Checkpoint
) -> Iterator[tuple[str, NDArray[np.floating[Any]]]]:
    """Routers ``[E, H]`` of the right shape and a float type, one in memory at a time."""
    shapes = layout.of_model(config)
    for name in _routers(config):
        entry = checkpoint.tensors.get(name)
        if entry and entry.dtype in dtypes.FLOATS and entry.shape == shapes[name]:
            yield name, dtypes.decode(checkpoint.read(name), entry.dtype).reshape(entry.shape)


# -- tensors that nothing reads


def unbuilt_layers(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Tensors of layers past the last are skipped: MTP layers, for one (LOAD-4)."""
    declared = layout.constants(config)
    unbuilt = [
        name for name in checkpoint.tensors if name not in declared and not _is_built(config, name)
    ]
    if unbuilt:
        found = f"{some(unbuilt, 'tensor')} of layers that are not built"
        expected = f"layers 0 to {config.model.num_layers - 1} (others are skipped)"
        where, note = unbuilt[0], Severity.NOTE
        yield _problem(Code.UNKNOWN_TENSOR, checkpoint, where, found, expected, "LOAD-4", note)


def unknown_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Names that nothing reads, one problem per kind.

    A constant or an expert under an unread name is probably a mistake; it never stands in
    for one of the decoder's own layers (LOAD-12).
    """
    constants, experts, others = [], [], []
    for name in _unread(config, checkpoint):
        path = name.split(".")
        if path[-1] == config.model.family.constant:
            constants.append(name)
        elif "experts" in path:
            experts.append(name)
        else:
            others.append(name)
    stack = f"names in {config.model.family.stack}.N.{config.model.family.experts}.J"
    for names, kind, expected, clause, severity in (
        (constants, "constant", stack, "LOAD-12", Severity.WARNING),
        (experts, "expert tensor", stack, "", Severity.WARNING),
        (others, "tensor", "tensors of the model only", "", Severity.NOTE),
    ):
        if names:
            found = f"{some(names, kind)}, not read"
            yield _problem(
                Code.UNKNOWN_TENSOR, checkpoint, names[0], found, expected, clause, severity
            )


# -- what the rules share


def _list(config: Config) -> str:
    """Where a config lists its substituted experts."""
    return "the targets" if config.substitution.form == "explicit" else "approximate_experts"


def _constants(config: Config, checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """Stored constants of listed experts, shared ones once."""
    for name in layout.constants(config):
        entry = checkpoint.tensors.get(name)
        if entry and not _is_models_own(config, name):
            yield entry


def _readable_constants(config: Config, checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """Those whose values mean something: of the right shape and a float type."""
    for entry in _constants(config, checkpoint):
        if entry.shape == (config.model.hidden_size,) and entry.dtype in dtypes.FLOATS:
            yield entry


def _is_listed(config: Config, layer: int, expert: int | None) -> bool:
    entry = config.substitution.layers.get(layer)
    return entry is not None and expert in entry.constants


def _is_built(config: Config, name: str) -> bool:
    """False only for names of the decoder stack past its last layer."""
    layer = layer_index(config.model.family, name)
    return layer is None or layer < config.model.num_layers


def _expert_tensors(config: Config, checkpoint: Checkpoint) -> Iterator[ExpertTensor]:
    """Tensors below the experts of the layers that are built, without declared constants."""
    declared = layout.constants(config)
    for name in checkpoint.tensors:
        if name in declared:
            continue
        tensor = expert_tensor(config.model.family, name)
        if tensor and tensor.layer < config.model.num_layers:
            yield tensor


def _stray_constants(config: Config, checkpoint: Checkpoint) -> dict[tuple[int, int], str]:
    """(layer, expert) -> name of every constant by name that is not declared."""
    return {
        (tensor.layer, tensor.expert): tensor.name
        for tensor in _expert_tensors(config, checkpoint)
        if tensor.is_constant and tensor.expert is not None
    }


def _fused_layers(config: Config, checkpoint: Checkpoint) -> dict[int, list[str]]:
    """Layer -> its fused tensors; those of a substituted expert alone are leftovers."""
    fused: dict[int, list[str]] = defaultdict(list)
    for tensor in _expert_tensors(config, checkpoint):
        if tensor.is_fused and not _is_listed(config, tensor.layer, tensor.expert):
            fused[tensor.layer].append(tensor.name)
    return fused


def _is_models_own(config: Config, name: str) -> bool:
    """Whether the model has a tensor of this name, in this configuration or its untied sibling."""
    return name == HEAD or name in layout.of_model(config)


def _routers(config: Config) -> list[str]:
    family = config.model.family
    return [family.router_name(layer) for layer in config.model.moe_layers]


def _unread(config: Config, checkpoint: Checkpoint) -> Iterator[str]:
    """Names that no rule above has spoken of."""
    constants = layout.constants(config)
    for name in checkpoint.tensors:
        if name in constants or _is_models_own(config, name):
            continue
        tensor = expert_tensor(config.model.family, name)
        spoken_of = tensor is not None and (
            tensor.is_constant or tensor.is_fused or _is_listed(config, tensor.layer, tensor.expert)
        )
        if not spoken_of and _is_built(config, name):
            yield name


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors store the same values, compared piece by piece."""
    one, other = checkpoint.tensors[first], checkpoint.tensors[second]
    return (one.dtype, one.shape, one.size) == (other.dtype, other.shape, other.size) and all(
        left == right
        for left, right in zip(checkpoint.chunks(first), checkpoint.chunks(second), strict=True)
    )
