"""Every rule that a checkpoint must keep, once: config, files and tensors against each other.

The rules stand in ``rules/``, one function each. The loader raises what ``check`` finds,
the command line prints it; neither knows a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mone_ref import config as config_file
from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.checkpoint.findings import most
from mone_ref.config import Config, NotModelled
from mone_ref.errors import Code, Problem, Rejected, Severity, show
from mone_ref.rules import constants, expert_weights, generic, model_tensors, naming, unread

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
    except NotModelled as limited:
        config, not_modelled = limited.config, limited.problems
        problems = [*limited.findings, *checkpoint.problems]
    except Rejected as rejected:
        problems = [*most(rejected.problems), *checkpoint.problems]
    if not checkpoint.errors:
        try:
            if config is not None:
                found = list(tensor_problems(config, checkpoint, dtype))
                limits = other_layout(config, found)
                not_modelled += limits
                problems += [problem for problem in found if problem not in limits]
            elif not_modelled:
                problems += plain_problems(checkpoint)
            problems += stored_problems(checkpoint, scan, problems)
        except Rejected as changed:  # a file changed while it was read
            problems += changed.problems
    return Report(tuple(problems), config, checkpoint, not_modelled)


def other_layout(config: Config, found: Sequence[Problem]) -> tuple[Problem, ...]:
    """Fused experts of a model in which nothing is substituted: not computed here, not broken."""
    if config.substitution.form != "none":
        return ()
    return tuple(problem for problem in found if problem.code is Code.FUSED_EXPERTS)


def tensor_problems(
    config: Config, checkpoint: Checkpoint, dtype: str | None = None
) -> Iterator[Problem]:
    """All rules between a config and the tensors of a checkpoint; those that read values last."""
    values = _value_rules(config, checkpoint, dtype)
    yield from _of_rules(config, checkpoint, (*_header_rules(config, checkpoint), *values))


def header_problems(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The rules that need names, shapes and types only: nothing but headers is read."""
    yield from _of_rules(config, checkpoint, _header_rules(config, checkpoint))


def _of_rules(
    config: Config, checkpoint: Checkpoint, rules: tuple[Iterator[Problem], ...]
) -> Iterator[Problem]:
    another_model = [
        *naming.decoder_path(config, checkpoint),
        *naming.layer_kinds(config, checkpoint),
    ]
    if another_model:  # every other rule would report every tensor
        yield from another_model
        return
    for rule in rules:
        yield from most(rule)


def _header_rules(config: Config, checkpoint: Checkpoint) -> tuple[Iterator[Problem], ...]:
    return (
        constants.missing_constants(config, checkpoint),
        constants.constant_names(config, checkpoint),
        constants.constant_shapes(config, checkpoint),
        constants.constant_dtypes(config, checkpoint),
        constants.unlisted_constants(config, checkpoint),
        expert_weights.fused_experts(config, checkpoint),
        expert_weights.retained_experts(config, checkpoint),
        expert_weights.leftover_experts(config, checkpoint),
        model_tensors.routers(config, checkpoint),
        model_tensors.model_tensors(config, checkpoint),
        model_tensors.tensor_shapes(config, checkpoint),
        model_tensors.tensor_dtypes(config, checkpoint),
        unread.unbuilt_layers(config, checkpoint),
        unread.unknown_tensors(config, checkpoint),
    )


def _value_rules(
    config: Config, checkpoint: Checkpoint, dtype: str | None
) -> tuple[Iterator[Problem], ...]:
    """Rules that read constants and routers, and tied embeddings where both are stored."""
    return (
        constants.non_finite_constants(config, checkpoint),
        constants.overflowing_constants(config, checkpoint, dtype),
        model_tensors.tied_head(config, checkpoint),
        model_tensors.non_finite_routers(config, checkpoint),
        model_tensors.masked_routers(config, checkpoint),
    )


def plain_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Rules for a plain checkpoint of a model that is not computed here."""
    yield from most(generic.expert_gaps(checkpoint))
    yield from most(generic.mixed_layouts(checkpoint))
    yield from generic.constants_without_list(checkpoint)


def stored_problems(
    checkpoint: Checkpoint, scan: bool, known: Sequence[Problem]
) -> Iterator[Problem]:
    """Rules on what is stored, whatever the config says; ``known`` is not said again."""
    yield from generic.orphaned_companions(checkpoint)
    yield from generic.missing_scales(checkpoint)
    if scan:
        reported = {problem.where for problem in known if problem.code in NON_FINITE}
        found = generic.non_finite_weights(checkpoint)
        yield from most(problem for problem in found if problem.where not in reported)
