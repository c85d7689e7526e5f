"""A checkpoint and a plan -> the blueprint of the output, or every reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mone_ref.errors import Problem, only_errors
from mone_ref.rewrite import (
    auxiliary,
    config_edit,
    cut,
    output,
    prune,
    soundness,
    structure,
    substitute,
)
from mone_ref.rewrite.blueprint import Blueprint, OutputTensor
from mone_ref.rewrite.decisions import Decisions, decide
from mone_ref.rewrite.plan import Kind, Plan
from mone_ref.rewrite.structure import Structure
from mone_ref.rewrite.substitute import Constants
from mone_ref.rewrite.uncollected import uncollected


@dataclass(frozen=True)
class Made:
    """The outcome: a blueprint where no problem is an error, else None."""

    structure: Structure
    blueprint: Blueprint | None
    problems: tuple[Problem, ...]


@uncollected
def blueprint(directory: Path | str, plan: Plan, *, scan: bool = False) -> Made:
    """Read headers and config.json of ``directory`` and apply a plan; writes nothing.

    With ``scan`` the values of the constants are read too, for NaN and infinity. Codes: those
    of a broken checkpoint, PLAN and REWRITE, and NON_FINITE_CONSTANT.
    """
    source = structure.read(directory)
    problems = [*source.problems, *soundness.problems(source)]
    if only_errors(problems):
        return Made(source, None, tuple(problems))
    decisions = decide(plan, source)
    problems += decisions.problems
    constants = Constants({}, Path())
    if plan.kind is Kind.PRUNE:
        problems += prune.problems(source, decisions)
    else:
        constants, found = substitute.read_constants(plan, decisions)
        problems += [*found, *substitute.problems(source, decisions)]
        if scan and not only_errors(problems):
            problems += substitute.non_finite(plan, constants)
    copies, omitted = auxiliary.find(source.checkpoint.directory)
    problems += omitted
    if only_errors(problems):
        return Made(source, None, tuple(problems))
    module = prune if plan.kind is Kind.PRUNE else substitute
    problems += module.limits(source, plan, decisions)
    config = module.config(source, plan, decisions)
    if decisions.drops_mtp:
        config = config_edit.without_mtp(config)
    tensors = _tensors(source, decisions, module.edits(source, decisions), constants)
    made = output.assemble(source.checkpoint, tensors, config, copies)
    return Made(source, made, tuple(problems))


def _tensors(
    source: Structure,
    decisions: Decisions,
    edits: Mapping[str, list[OutputTensor]],
    constants: Constants,
) -> dict[str, list[OutputTensor]]:
    """Source file -> its tensors in the output; constants join the file of their layer."""
    directory = source.checkpoint.directory
    files: dict[str, list[OutputTensor]] = {file: [] for file in source.checkpoint.files}
    for name, entry in source.checkpoint.tensors.items():
        if decisions.drops_mtp and source.is_mtp(name):
            continue
        if name in edits:
            files[entry.file] += edits[name]
        else:
            files[entry.file].append(cut.whole(entry, directory))
    if constants.entries:
        for file, tensor in _constants(decisions, constants):
            files[file].append(tensor)
    return files


def _constants(decisions: Decisions, constants: Constants) -> Iterator[tuple[str, OutputTensor]]:
    for choice in decisions.choices:
        beside = choice.layer.router or next(choice.layer.expert_tensors)
        for tensor in substitute.added(constants, choice):
            yield beside.file, tensor
