"""Substitute: constants take the place of experts, and every id and the router stay (MoNE)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mone_ref.checkpoint import TensorEntry, dtypes, header
from mone_ref.checkpoint.findings import most
from mone_ref.checkpoint.opening import open_regular
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.errors import Code, Phase, Problem, Severity, only_errors, show
from mone_ref.rewrite import config_edit, cut, fused, names
from mone_ref.rewrite.blueprint import OutputTensor
from mone_ref.rewrite.config_edit import Document
from mone_ref.rewrite.decisions import Choice, Decisions
from mone_ref.rewrite.plan import Form, Plan
from mone_ref.rewrite.structure import Structure


@dataclass(frozen=True)
class Constants:
    """The constants that a plan needs, by name, and where their file lies."""

    entries: Mapping[str, TensorEntry]
    directory: Path


def edits(structure: Structure, decisions: Decisions) -> dict[str, list[OutputTensor]]:
    """What becomes of every tensor that does not pass as it is."""
    changed: dict[str, list[OutputTensor]] = {}
    for choice in decisions.choices:
        for expert in choice.gone:
            changed.update((entry.name, []) for entry in choice.layer.experts.get(expert, ()))
        for entry in choice.layer.fused:
            if fused.reason_not_split(structure, entry, choice) is None:
                changed[entry.name] = fused.split(structure, entry, choice)
    return changed


def read_constants(plan: Plan, decisions: Decisions) -> tuple[Constants, list[Problem]]:
    """The plan's constants, headers only, and whether they are those that are needed."""
    needed = {name: choice for choice in decisions.choices for name, _ in constant_names(choice)}
    if plan.constants is None:
        found, expected = "nothing", f"a file with {len(needed)} constants"
        problem = plan.problem(Code.PLAN_CONSTANTS, "$.constants", found, expected)
        return Constants({}, Path()), [problem] if needed else []
    read = header.read(plan.constants, plan.constants.name)
    problems = only_errors(read.problems)
    entries = {entry.name: entry for entry in read.entries}
    if not problems:
        problems += _absent(plan, entries, list(needed))
        for name, choice in needed.items():
            if name in entries:
                problems += _wrong(entries[name], choice)
        unused = [name for name in entries if name not in needed]
        if unused:
            expected, warning = "constants of substituted experts only", Severity.WARNING
            found, file = some(unused, "other tensor"), plan.constants.name
            problems.append(_constant(unused[0], found, expected, file, warning))
    wanted = {name: entries[name] for name in needed if name in entries}
    return Constants(wanted, plan.constants.parent), list(most(problems))


def constant_names(choice: Choice) -> Iterator[tuple[str, int]]:
    """Name of the constant of each expert that goes, and its id."""
    for expert in choice.gone:
        yield names.constant_name(choice.layer.block, expert), expert


def non_finite(plan: Plan, constants: Constants) -> Iterator[Problem]:
    """Constants that hold NaN or infinity (R8): the one thing for which values are read."""
    if plan.constants is None:
        return
    with open_regular(plan.constants) as file:
        for entry in constants.entries.values():
            file.seek(entry.begin)
            bad = dtypes.non_finite(file.read(entry.size), entry.dtype)
            if bad:
                found, expected = f"{count(bad, 'value')} of NaN or infinity", "finite values"
                yield replace(
                    _constant(entry.name, found, expected, entry.file),
                    code=Code.NON_FINITE_CONSTANT,
                )


def _absent(plan: Plan, entries: Mapping[str, TensorEntry], needed: list[str]) -> list[Problem]:
    assert plan.constants is not None
    absent = [name for name in needed if name not in entries]
    if not absent:
        return []
    found = f"no constant for {some(absent, 'expert')}"
    return [_constant(absent[0], found, "one per substituted expert", plan.constants.name)]


def _wrong(entry: TensorEntry, choice: Choice) -> Iterator[Problem]:
    """A constant is one vector of the hidden size in a float type (FMT-5)."""
    hidden = choice.layer.router.shape[1] if choice.layer.router else None
    if len(entry.shape) != 1 or hidden not in (None, *entry.shape):
        expected = f"[{hidden}]"
        yield _constant(entry.name, show(list(entry.shape)), expected, entry.file)
    elif entry.dtype not in dtypes.FLOATS:
        yield _constant(entry.name, show(entry.dtype), ", ".join(dtypes.FLOATS), entry.file)


def _constant(
    where: str, found: str, expected: str, file: str, severity: Severity = Severity.ERROR
) -> Problem:
    code = Code.PLAN_CONSTANTS
    return Problem(code, Phase.PARSE, plain(where), found, expected, plain(file), severity)


def added(constants: Constants, choice: Choice) -> Iterator[OutputTensor]:
    """The constants of one layer, ids ascending."""
    for name, _ in constant_names(choice):
        yield cut.whole(constants.entries[name], constants.directory)


def problems(structure: Structure, decisions: Decisions) -> Iterator[Problem]:
    """Fused experts that cannot be taken apart."""
    expected = "experts stored one by one, or fused as rows [experts, out, in]"
    for choice in decisions.choices:
        for entry in choice.layer.fused:
            reason = fused.reason_not_split(structure, entry, choice)
            if reason:
                checkpoint, code = structure.checkpoint, Code.CANNOT_CUT
                yield tensor_problem(code, checkpoint, entry.name, reason, expected)


def limits(structure: Structure, plan: Plan, decisions: Decisions) -> Iterator[Problem]:
    """Outputs that engines are known not to load."""
    quantised = [
        entry.name
        for choice in decisions.choices
        for entry in choice.layer.expert_tensors
        if names.is_companion(entry.name)
    ]
    if quantised:
        found, expected = some(quantised, "scale"), "experts that are not quantised (CAP-8)"
        code, warning, file = Code.ENGINE_LIMIT, Severity.WARNING, plan.file
        yield Problem(code, Phase.PARSE, "$.layers", found, expected, file, warning)


def config(structure: Structure, plan: Plan, decisions: Decisions) -> Document:
    """config.json of the output, in the plan's form."""
    document = structure.settings.document
    if plan.form is Form.APPROX:
        listed = {choice.layer.place.layer: choice.gone for choice in decisions.choices}
        return config_edit.with_approx(document, listed)
    targets = {
        f"{choice.layer.block}.{names.EXPERTS}": (
            choice.layer.num_experts,
            {expert: name for name, expert in constant_names(choice)},
        )
        for choice in decisions.choices
    }
    return config_edit.with_explicit(document, targets)
