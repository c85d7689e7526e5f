"""Prune: experts that are not kept are deleted, and the ids of the others are compacted.

Everything with one row per expert is cut with the one list: router weight and bias, every
spelling of the correction bias, fused experts and their companions.
"""

from __future__ import annotations

from collections.abc import Iterator

from mone_ref.checkpoint import TensorEntry
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import some
from mone_ref.config import FILE
from mone_ref.errors import Code, Phase, Problem, Severity, show
from mone_ref.fields import ROOT
from mone_ref.rewrite import config_edit, cut, expert_patterns, names
from mone_ref.rewrite.blueprint import OutputTensor
from mone_ref.rewrite.config_edit import Document
from mone_ref.rewrite.decisions import Choice, Decisions
from mone_ref.rewrite.plan import Mtp, Plan
from mone_ref.rewrite.settings import COUNT_KEYS, TOP_K_KEYS
from mone_ref.rewrite.structure import Structure
from mone_ref.strict_json import child

KERNEL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576)
"""Expert counts for which vLLM's fused router kernels are built (vLLM issue 50982)."""


def edits(structure: Structure, decisions: Decisions) -> dict[str, list[OutputTensor]]:
    """What becomes of every tensor that does not pass as it is."""
    changed: dict[str, list[OutputTensor]] = {}
    for choice in decisions.choices:
        changed.update(_experts(structure, choice))
        changed.update(_rows(structure, choice))
    return changed


def _experts(structure: Structure, choice: Choice) -> dict[str, list[OutputTensor]]:
    """Experts stored one by one: renamed with all that belongs to them, or deleted."""
    changed: dict[str, list[OutputTensor]] = {}
    new = {old: at for at, old in enumerate(choice.kept)}
    path = f"{choice.layer.block}.{names.EXPERTS}"
    directory = structure.checkpoint.directory
    for expert, stored in choice.layer.experts.items():
        if expert not in new:
            changed.update((entry.name, []) for entry in stored)
        elif new[expert] != expert:
            before, after = f"{path}.{expert}.", f"{path}.{new[expert]}."
            for entry in stored:
                name = after + entry.name.removeprefix(before)
                changed[entry.name] = [cut.whole(entry, directory, name)]
    return changed


def _rows(structure: Structure, choice: Choice) -> Iterator[tuple[str, list[OutputTensor]]]:
    """Tensors with one row per expert."""
    directory, experts = structure.checkpoint.directory, choice.layer.num_experts
    for entry in (*choice.layer.row_tensors, *choice.layer.fused):
        if cut.has_rows(entry, experts):
            yield entry.name, [cut.rows(entry, directory, choice.kept, experts)]


def problems(structure: Structure, decisions: Decisions) -> Iterator[Problem]:
    """Tensors that cannot be cut, and counts that would stay as they are."""
    yield from _uncounted(structure, decisions)
    yield from expert_patterns.problems(structure, decisions)
    for choice in decisions.choices:
        yield from _uncut(structure, choice)


def _uncounted(structure: Structure, decisions: Decisions) -> Iterator[Problem]:
    """Counts of experts or routes where ``config_edit.with_counts`` does not reach them."""
    code, settings = Code.MODEL_FIELD, structure.settings
    listed = settings.find_in_lists((*COUNT_KEYS, *TOP_K_KEYS))
    if listed:
        found, expected = show(listed[0].value), "no counts in a list of objects: they would stay"
        yield Problem(code, Phase.PARSE, listed[0].path, found, expected, FILE)
    elif decisions.choices and settings.num_experts is None:
        expected = f"the number of experts under {', '.join(COUNT_KEYS[:3])} or another known name"
        yield Problem(code, Phase.PARSE, child(ROOT, COUNT_KEYS[0]), "nothing", expected, FILE)


def _uncut(structure: Structure, choice: Choice) -> Iterator[Problem]:
    """Whatever has, or may have, an expert axis and would stay at the old width."""
    layer, experts = choice.layer, choice.layer.num_experts
    is_whole = layer.block == layer.place.path  # experts lie in the layer, beside attention
    tables = [f"{layer.block}.{table}" for table in names.EXPERT_TABLES]
    for entry in layer.beside:
        if entry.name in tables:
            yield _cannot(structure, entry, "a table of expert ids, which would all change")
        elif is_whole and names.is_dense(entry.name.removeprefix(f"{layer.block}.")):
            continue
        elif experts in entry.shape:
            found = f"{show(list(entry.shape))}, of which one axis may be that of the experts"
            yield _cannot(structure, entry, found)
    for entry in (*layer.fused, *layer.row_tensors):
        if not cut.has_rows(entry, experts) and (experts in entry.shape or entry.size > 8):
            shape = f"{entry.dtype} {show(list(entry.shape))}"
            yield _cannot(structure, entry, f"{shape}, not {experts} rows of whole bytes")


def _cannot(structure: Structure, entry: TensorEntry, found: str) -> Problem:
    expected = "known tensors with one row per expert in the first dimension"
    return tensor_problem(Code.CANNOT_CUT, structure.checkpoint, entry.name, found, expected)


def limits(structure: Structure, plan: Plan, decisions: Decisions) -> Iterator[Problem]:
    """Outputs that engines are known not to load."""
    if not decisions.choices:
        return
    kept = len(decisions.choices[0].kept)
    if kept not in KERNEL_COUNTS:
        found = f"{kept} experts per layer"
        expected = f"a count that router kernels are built for: {show(KERNEL_COUNTS, 120)}"
        yield _limit("$.layers", found, expected, plan.file)
    if plan.mtp is Mtp.KEEP and structure.mtp:
        found = some([layer.place.path for layer in structure.mtp], "MTP layer")
        expected = f"{kept} experts there too: engines size them by the config's one count"
        yield _limit("$.mtp", f"{found} at full width", expected, plan.file)


def _limit(where: str, found: str, expected: str, file: str) -> Problem:
    code = Code.ENGINE_LIMIT
    return Problem(code, Phase.PARSE, where, found, expected, file, Severity.WARNING)


def config(structure: Structure, plan: Plan, decisions: Decisions) -> Document:
    """config.json of the output."""
    document = structure.settings.document
    changed = [choice for choice in decisions.choices if not choice.layer.is_mtp]
    count = len(changed[0].kept) if changed else structure.num_experts
    return config_edit.with_counts(document, count, plan.top_k)
