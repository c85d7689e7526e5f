"""A plan held against a checkpoint: which experts of which layer stay, and every objection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mone_ref import explicit
from mone_ref.checkpoint.findings import most
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.config import FILE
from mone_ref.declaration import APPROX
from mone_ref.errors import Code, Problem, show
from mone_ref.fields import ROOT, Fields
from mone_ref.rewrite.plan import Form, Kind, LayerPlan, Mtp, Plan
from mone_ref.rewrite.settings import MTP_KEYS, integers
from mone_ref.rewrite.structure import MoeLayer, Structure
from mone_ref.strict_json import child

LAYERS = child(ROOT, "layers")


@dataclass(frozen=True)
class Choice:
    """The experts of one layer that stay, ascending."""

    layer: MoeLayer
    kept: tuple[int, ...]

    @property
    def gone(self) -> tuple[int, ...]:
        """The others, ascending."""
        return tuple(sorted(set(range(self.layer.num_experts)) - set(self.kept)))


@dataclass(frozen=True)
class Decisions:
    """What a plan means for a checkpoint; reliable only where ``problems`` is empty.

    ``choices`` are the layers that change, in the order of the checkpoint.
    """

    choices: tuple[Choice, ...]
    drops_mtp: bool
    problems: tuple[Problem, ...]


def decide(plan: Plan, structure: Structure) -> Decisions:
    """Every decision of a plan, and every reason why it does not fit, all at once."""
    layers, problems = _by_key(plan, structure)
    choices: list[Choice] = []
    for key, layer in layers.items():
        wrong = list(most(_list_problems(plan, key, layer)))
        problems += wrong
        if not wrong:
            choices.append(Choice(layer, _kept(plan.layers[key], layer)))
    problems += _already_substituted(plan, structure)
    drops = plan.mtp is Mtp.DROP and _has_mtp(structure)
    if plan.kind is Kind.PRUNE:
        problems += _left_out(plan, structure)
        problems += _counts(plan, structure, choices)
    else:
        problems += _other_stacks(plan, structure, layers)
    problems += _mtp(plan, structure, layers)
    order = {layer.block: at for at, layer in enumerate(structure.layers)}
    choices.sort(key=lambda choice: order[choice.layer.block])
    choices = [choice for choice in choices if choice.gone]
    routes = plan.top_k is not None and plan.top_k != structure.settings.top_k
    if not problems and not (choices or drops or routes):
        listed = count(len(plan.layers), "layer")
        expected = "a layer in which some expert is not kept"
        problems.append(plan.problem(Code.PLAN_EMPTY, LAYERS, f"{listed}, all complete", expected))
    return Decisions(tuple(choices), drops, tuple(problems))


def _by_key(plan: Plan, structure: Structure) -> tuple[dict[str, MoeLayer], list[Problem]]:
    """The plan's layers that exist, and a problem for each key that names none, or several."""
    keys = Counter(structure.key(layer) for layer in structure.layers)
    known = {structure.key(layer): layer for layer in structure.layers}
    problems = []
    for key in plan.layers:
        if keys[key] != 1:
            found = f"{keys[key]} blocks with experts in this layer" if key in keys else show(key)
            expected = f"one of the layers with experts: {_span(list(known))}"
            problems.append(plan.problem(Code.PLAN_LAYER, child(LAYERS, key), found, expected))
    return {key: known[key] for key in plan.layers if keys[key] == 1}, problems


def _span(keys: list[str]) -> str:
    """``0 to 15``, or a few of them."""
    return f"{keys[0]} to {keys[-1]}, {len(keys)} in all" if len(keys) > 3 else ", ".join(keys)


def _list_problems(plan: Plan, key: str, layer: MoeLayer) -> Iterator[Problem]:
    """What is wrong with one layer's list by itself."""
    one, path = plan.layers[key], plan.path(key)
    if plan.kind is Kind.PRUNE and not one.is_kept:
        expected = "keep: a prune plan substitutes nothing"
        yield plan.problem(Code.PLAN_FIELD, path, one.word, expected)
        return
    seen: set[int] = set()
    for at, expert in enumerate(one.listed):
        if not 0 <= expert < layer.num_experts:
            expected = f"an id below {layer.num_experts}, the experts of this layer"
            yield plan.problem(Code.PLAN_EXPERTS, child(path, at), show(expert), expected)
        elif expert in seen:
            found = f"{expert} again"
            yield plan.problem(Code.PLAN_EXPERTS, child(path, at), found, "each id once")
        seen.add(expert)
    if not _kept(one, layer):
        found = "no expert kept"
        yield plan.problem(Code.PLAN_EXPERTS, path, found, "at least one expert in every layer")


def _kept(one: LayerPlan, layer: MoeLayer) -> tuple[int, ...]:
    listed = set(one.listed)
    kept = listed if one.is_kept else set(range(layer.num_experts)) - listed
    return tuple(sorted(kept))


def _already_substituted(plan: Plan, structure: Structure) -> Iterator[Problem]:
    """A list or constants in the source: its ids have gaps, and the lists would have to merge."""
    constants = [entry.name for layer in structure.layers for entry in layer.constants.values()]
    fields = Fields(structure.settings.document, FILE)
    declared = [found.path for found in (*fields.find(APPROX), *explicit.find(fields))]
    if constants or declared:
        found = some(constants, "constant") if constants else f"a list at {declared[0]}"
        expected = "a source in which no expert is substituted"
        yield plan.problem(Code.ALREADY_SUBSTITUTED, ROOT, found, expected)


def _other_stacks(
    plan: Plan, structure: Structure, layers: Mapping[str, MoeLayer]
) -> Iterator[Problem]:
    """The approx form names layers by an index in the decoder's stack only (R11)."""
    for key, layer in layers.items():
        if plan.form is Form.APPROX and layer.place.stack != structure.main_stack:
            expected = f"layers of {structure.main_stack}: approx lists cannot name another stack"
            yield plan.problem(Code.PLAN_LAYER, child(LAYERS, key), plain(key), expected)


def _left_out(plan: Plan, structure: Structure) -> Iterator[Problem]:
    """Layers that would keep the old width: the config has one count for all (E05)."""
    left = [key for layer in structure.decoder if (key := structure.key(layer)) not in plan.layers]
    if left:
        found = f"nothing for {some(left, 'layer')}"
        expected = "a list for every layer with experts: the config has one count for all"
        yield plan.problem(Code.PLAN_LAYER, LAYERS, found, expected)
    if structure.others:
        stacks = sorted({layer.place.stack for layer in structure.others})
        found = f"experts in {some(stacks, 'other stack')}"
        expected = "one stack with experts: whose counts the config means cannot be told"
        yield plan.problem(Code.PLAN_LAYER, LAYERS, found, expected)


def _has_mtp(structure: Structure) -> bool:
    """Whether MTP layers are stored, or counted in the config without being stored."""
    counted = structure.settings.find(MTP_KEYS)
    is_counted = any(any(integers(found.value)) for found in counted)
    return is_counted or any(map(structure.is_mtp, structure.checkpoint.tensors))


def _mtp(plan: Plan, structure: Structure, layers: Mapping[str, MoeLayer]) -> Iterator[Problem]:
    """One policy for MTP layers, and lists only where it wants them."""
    where = child(ROOT, "mtp")
    keys = [structure.key(layer) for layer in structure.mtp]
    listed = [key for key in keys if key in layers]
    if plan.mtp is Mtp.PRUNE:
        missing = [key for key in keys if key not in layers]
        if missing or not keys:
            found = f"prune, and no list for {some(missing, 'MTP layer')}"
            found = found if keys else "prune, and no MTP layer with experts"
            yield plan.problem(Code.MTP_POLICY, where, found, "a list for each MTP layer")
    elif listed:
        found = f"{plan.mtp or 'nothing'}, and lists for {some(listed, 'MTP layer')}"
        yield plan.problem(Code.MTP_POLICY, where, found, "prune, or no list for MTP layers")
    elif keys and plan.mtp is None and plan.kind is Kind.PRUNE:
        found = f"nothing, and {some(keys, 'MTP layer')} with experts"
        expected = "keep, prune or drop: engines size MTP layers by the config's one count"
        yield plan.problem(Code.MTP_POLICY, where, found, expected)


def _counts(plan: Plan, structure: Structure, choices: list[Choice]) -> Iterator[Problem]:
    """One count in all layers, enough experts for the routes, and whole groups."""
    counts = Counter(len(choice.kept) for choice in choices)
    if len(counts) > 1:
        (usual, _), *_ = counts.most_common(1)
        for choice in choices:
            if len(choice.kept) != usual:
                path = plan.path(structure.key(choice.layer))
                found, expected = count(len(choice.kept), "expert"), f"{usual}, as in other layers"
                yield plan.problem(Code.PLAN_COUNTS, path, found, expected)
        return
    if not counts:
        return
    kept = next(iter(counts))
    top_k = plan.top_k or structure.settings.top_k
    if top_k is None:
        expected = "the number of routes per token, which config.json does not tell"
        yield plan.problem(Code.PLAN_TOP_K, child(ROOT, "top_k"), "nothing", expected)
    elif top_k > kept:
        where, expected = child(ROOT, "top_k"), f"at most {kept}, the experts kept per layer"
        source = "" if plan.top_k else ", from config.json"
        yield plan.problem(Code.PLAN_TOP_K, where, f"{top_k}{source}", expected)
    else:
        yield from _groups(plan, structure, choices, kept, top_k)


def _groups(
    plan: Plan, structure: Structure, choices: list[Choice], kept: int, top_k: int
) -> Iterator[Problem]:
    """Groups are equal runs of ids: each must keep as many experts as every other (B11)."""
    groups, chosen = structure.settings.groups()
    if groups <= 1:
        return
    for choice in choices:
        size, rest = divmod(choice.layer.num_experts, groups)
        members = Counter(expert // max(size, 1) for expert in choice.kept)
        if rest or kept % groups:
            found, expected = count(kept, "expert"), f"a multiple of {show(groups)}, the groups"
        elif len(members) < groups or len(set(members.values())) > 1:
            each = [members[group] for group in range(groups)]
            found, expected = f"{show(each)} per group", f"{kept // groups} in each of {groups}"
        else:
            continue
        path = plan.path(structure.key(choice.layer))
        yield plan.problem(Code.PLAN_GROUPS, path, found, expected)
    reachable = (chosen or groups) * (kept // groups)
    if kept % groups == 0 and top_k > reachable:
        expected = f"at most {reachable}, the experts in {chosen} of {groups} groups"
        yield plan.problem(Code.PLAN_TOP_K, child(ROOT, "top_k"), str(top_k), expected)
    best = structure.config.model.family.group_best if structure.config else 0
    if kept % groups == 0 and kept // groups < best:
        expected = f"{best} or more: a group stands by its {best} best experts"
        found = f"{kept // groups} per group"
        yield plan.problem(Code.PLAN_GROUPS, LAYERS, found, expected)
