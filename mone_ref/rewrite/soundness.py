"""What must be true of a checkpoint's expert layers before anybody counts or cuts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from mone_ref import explicit
from mone_ref.checkpoint import TensorEntry
from mone_ref.checkpoint.findings import most
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.config import FILE
from mone_ref.declaration import APPROX
from mone_ref.errors import Code, Phase, Problem, show
from mone_ref.fields import ROOT, Fields
from mone_ref.rewrite import names
from mone_ref.rewrite.settings import CHOSEN_KEYS, COUNT_KEYS, GROUP_KEYS, TOP_K_KEYS, conflicts
from mone_ref.rewrite.structure import Layout, MoeLayer, Structure
from mone_ref.strict_json import child

MOST_EXPERTS = 10**5
"""Of one layer. Beyond any model; lists of all ids are made of what is below."""


def problems(structure: Structure) -> Iterator[Problem]:
    """Every disagreement between names, shapes and config; nothing where files are broken."""
    if structure.errors:
        return
    yield from conflicts(structure.settings, COUNT_KEYS)
    yield from conflicts(structure.settings, TOP_K_KEYS)
    yield from conflicts(structure.settings, GROUP_KEYS)
    yield from conflicts(structure.settings, CHOSEN_KEYS)
    yield from unrecognised(structure)
    yield from no_experts(structure)
    if structure.layers:
        yield from counts(structure)
        yield from no_top_k(structure)
        yield from most(layer_kinds(structure))
        yield from no_router(structure)
        for layer in structure.layers:
            yield from most(incomplete(structure, layer))


def unrecognised(structure: Structure) -> Iterator[Problem]:
    """Tensors below ``experts`` that the grammar does not know (D13)."""
    if structure.unrecognised:
        first = structure.unrecognised[0]
        found = f"{some(structure.unrecognised, 'tensor')} below experts"
        expected = "experts.<id>.<projection> or experts.<projection>"
        code = Code.UNKNOWN_TENSOR
        yield tensor_problem(code, structure.checkpoint, first, found, expected)


def no_experts(structure: Structure) -> Iterator[Problem]:
    """A config that counts experts, and no tensor that is one (D10)."""
    experts = structure.settings.num_experts
    if structure.layers or not experts or structure.unrecognised:
        return
    near = [
        name
        for name in structure.checkpoint.tensors
        if sum(part.isdecimal() for part in name.split(".")) > 1
    ]
    found = "no tensor of an expert"
    found += f"; {some(near, 'tensor')} with a number below a layer" if near else ""
    expected = f"{experts} experts per layer, as config.json says"
    where = near[0] if near else "experts"
    yield tensor_problem(Code.MISSING_EXPERT, structure.checkpoint, where, found, expected)


def no_router(structure: Structure) -> Iterator[Problem]:
    """Layers with experts and without a router: more likely a name that is not known (D01)."""
    bare = [layer for layer in structure.layers if layer.router is None]
    if not bare:
        return
    near = [entry.name for entry in _like_routers(structure, bare[0])]
    found = f"{count(len(bare), 'layer')} with experts and no router: a naming mismatch?"
    found += f" {some(near, 'tensor')} with one row per expert" if near else ""
    where = f"{bare[0].block}.{names.ROUTERS[0]}.weight"
    expected = f"a router weight [{bare[0].num_experts}, hidden] in each"
    yield tensor_problem(Code.MISSING_TENSOR, structure.checkpoint, where, found, expected)


def _like_routers(structure: Structure, layer: MoeLayer) -> list[TensorEntry]:
    prefix = f"{layer.place.path}."
    experts = {entry.name for entry in layer.expert_tensors}
    return [
        entry
        for name, entry in structure.checkpoint.tensors.items()
        if name.startswith(prefix)
        and name not in experts
        and len(entry.shape) == 2
        and entry.shape[0] == layer.num_experts
    ]


def counts(structure: Structure) -> Iterator[Problem]:
    """The config's count is the one that routers and experts show (E01)."""
    for layer in structure.layers:
        if layer.num_experts > MOST_EXPERTS:
            found, expected = f"{layer.num_experts} experts", f"at most {MOST_EXPERTS}"
            code, where = Code.TENSOR_SHAPE, layer.block
            yield tensor_problem(code, structure.checkpoint, where, found, expected)
    said = structure.settings.find(COUNT_KEYS)
    shown = Counter(layer.num_experts for layer in structure.decoder)
    if said and shown and structure.settings.num_experts not in shown:
        (most_common, _), *_ = shown.most_common(1)
        found = f"{show(said[0].value)}, and {most_common} experts in the tensors"
        code, expected = Code.MODEL_FIELD_CONFLICT, "one count"
        yield Problem(code, Phase.LOAD, said[0].path, found, expected)


def no_top_k(structure: Structure) -> Iterator[Problem]:
    """Routes per token have many names, and no default (E02)."""
    if structure.settings.top_k is None:
        expected = f"routes per token under {', '.join(TOP_K_KEYS[:3])} or another known name"
        where = child(ROOT, TOP_K_KEYS[0])
        yield Problem(Code.MODEL_FIELD, Phase.PARSE, where, "nothing", expected)


def layer_kinds(structure: Structure) -> Iterator[Problem]:
    """The layers with experts are those that the config of a known family implies (E06)."""
    if structure.config is None:
        return
    expected = set(structure.config.model.moe_layers)
    found = {layer.place.layer for layer in structure.decoder}
    if found != expected:
        extra, absent = sorted(found - expected), sorted(expected - found)
        text = f"experts in {show(extra)} beyond them" if extra else f"none in {show(absent)}"
        wanted = f"experts in layers {show(sorted(expected))}, as config.json says"
        where = structure.main_stack
        yield tensor_problem(Code.LAYER_KINDS, structure.checkpoint, where, text, wanted)


def incomplete(structure: Structure, layer: MoeLayer) -> Iterator[Problem]:
    """One layout in a layer, every expert stored or substituted, each with the same parts."""
    checkpoint, path = structure.checkpoint, f"{layer.block}.{names.EXPERTS}"
    if layer.layout is Layout.BOTH:
        first, found = layer.fused[0].name, "a tensor of all experts beside tensors of one"
        yield tensor_problem(Code.FUSED_EXPERTS, checkpoint, first, found, "one layout in a layer")
        return
    if layer.fused:
        return
    if layer.num_experts > MOST_EXPERTS:
        return
    declared = _substituted(structure, layer)
    for expert in range(layer.num_experts):
        if expert not in layer.experts and expert not in declared:
            found, expected = "no tensor of this expert", "its weights, or a substituted expert"
            where = f"{path}.{expert}"
            yield tensor_problem(Code.MISSING_EXPERT, checkpoint, where, found, expected)
    yield from _unequal(structure, layer)


def _unequal(structure: Structure, layer: MoeLayer) -> Iterator[Problem]:
    """An expert that lacks a part which others have."""
    parts = {
        expert: _parts(f"{layer.block}.{names.EXPERTS}.{expert}.", stored)
        for expert, stored in layer.experts.items()
    }
    full = set[str]().union(*parts.values())
    for expert, own in parts.items():
        if own != full:
            lacking = sorted(full - own)
            where = f"{layer.block}.{names.EXPERTS}.{expert}"
            found, expected = f"no {plain(lacking[0])}", "the parts that other experts have"
            code = Code.MISSING_EXPERT
            yield tensor_problem(code, structure.checkpoint, where, found, expected)


def _parts(prefix: str, stored: Iterable[TensorEntry]) -> set[str]:
    return {entry.name.removeprefix(prefix) for entry in stored}


def _substituted(structure: Structure, layer: MoeLayer) -> set[int]:
    """Experts of a layer that constants or the config's list say are substituted.

    Only ids are looked at: whether the list itself is right is for ``validate``.
    """
    gone = set(layer.constants)
    fields = Fields(structure.settings.document, FILE)
    for found in fields.find(APPROX):
        listed = found.value.get(str(layer.place.layer)) if isinstance(found.value, dict) else None
        gone |= {one for one in listed if type(one) is int} if isinstance(listed, list) else set()
    for found in explicit.find(fields):
        targets = found.value.get("targets") if isinstance(found.value, dict) else None
        for path, target in targets.items() if isinstance(targets, dict) else ():
            place = names.place_of(path)
            if place and place.layer == layer.place.layer and isinstance(target, dict):
                replaced = target.get("replacements")
                keys = replaced if isinstance(replaced, dict) else {}
                gone |= {int(key) for key in keys if key.isdecimal() and len(key) < 10}
    return gone
