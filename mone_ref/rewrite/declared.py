"""What a checkpoint declares as substituted, with the names of its constants, in either form.

The declaration is read by the same rules for every architecture. Where the family is not in the
table, layers and paths are held against the names of the stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mone_ref import declaration, dialects, explicit
from mone_ref.checkpoint import dtypes
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.config import FILE
from mone_ref.declaration import Bounds, Named
from mone_ref.errors import Code, Problem, only_errors, show
from mone_ref.fields import Fields
from mone_ref.rewrite import names
from mone_ref.rewrite.plan import Form
from mone_ref.rewrite.settings import MTP_KEYS
from mone_ref.rewrite.structure import MoeLayer, Structure
from mone_ref.strict_json import child


@dataclass(frozen=True)
class Declared:
    """Layer -> expert -> name of its constant, in the order of the config.

    ``form`` is None where no expert is substituted. Layers past the decoder's last are in
    ``constants`` too: they are MTP layers (LOAD-6).
    """

    form: Form | None
    constants: Named

    @property
    def names(self) -> set[str]:
        """Names of all constants, each once."""
        return {name for constants in self.constants.values() for name in constants.values()}


def read(source: Structure) -> tuple[Declared, list[Problem]]:
    """The declaration, and what is wrong with it; empty where it cannot be read.

    Where the family is not in the table, the constants are held against the list too. Needs a
    layer with experts.
    """
    declared, problems = _read(source)
    if source.config is None and not only_errors(problems):
        problems += _constants(source, declared)
    return declared, problems


def _read(source: Structure) -> tuple[Declared, list[Problem]]:
    fields = Fields(source.settings.document, FILE)
    bounds = _bounds(source)
    listed = declaration.read(fields, bounds)
    named = explicit.read(fields, bounds)
    dialects.check(fields, listed, named)
    if source.config is None:
        _check_paths(source, fields)
    if fields.errors or listed is None or named is None:
        return Declared(None, {}), fields.problems
    if named:
        return Declared(Form.EXPLICIT, named), fields.problems
    derived: Named = {}
    for layer, ids in listed.items():
        path = block(source, layer)
        derived[layer] = {expert: names.constant_name(path, expert) for expert in ids}
    return Declared(Form.APPROX if derived else None, derived), fields.problems


def block(source: Structure, layer: int) -> str:
    """Module path that holds a layer's router and experts, as tensors are named.

    That of a layer without stored experts follows from the other layers.
    """
    if source.config is not None:
        return source.config.model.family.experts_path(layer).removesuffix(f".{names.EXPERTS}")
    found = layers(source)
    if layer in found:
        return found[layer].block
    other = next(iter(found.values()))
    return f"{source.main_stack}.{layer}{other.block.removeprefix(other.place.path)}"


def layers(source: Structure) -> dict[int, MoeLayer]:
    """Layers with experts of the decoder's stack by their index, stored MTP layers included."""
    main = source.main_stack
    return {layer.place.layer: layer for layer in source.layers if layer.place.stack == main}


def _bounds(source: Structure) -> Bounds:
    """What names and counts show, where the family's row does not say it."""
    last = source.settings.num_layers
    if source.config is not None or last is None:
        return Bounds(None, None, (), source.num_experts)
    stored = last + (source.settings.integer(*MTP_KEYS) or 0)
    return Bounds(None, stored, (), source.num_experts)


def _check_paths(source: Structure, fields: Fields) -> None:
    """A target path is the stored path of a layer's experts, or its end (FMT-25)."""
    for found in explicit.find(fields):
        targets = found.value.get("targets") if isinstance(found.value, dict) else None
        for path in targets if isinstance(targets, dict) else ():
            place = names.place_of(path)
            if place is None:
                continue  # reported where paths are read
            stored = f"{block(source, place.layer)}.{names.EXPERTS}"
            if f".{stored}".endswith(f".{path}"):
                continue
            where = child(child(found.path, "targets"), path)
            expected = f"{stored}, or its end"
            fields.report(Code.TARGET_UNBOUND, where, show(path), expected, "FMT-25")


def _constants(source: Structure, declared: Declared) -> Iterator[Problem]:
    """Listed layers have experts that are not fused, and constants that are what they must be."""
    stored, built = source.checkpoint.tensors, source.settings.num_layers
    known = layers(source)
    for layer, constants in declared.constants.items():
        is_built = built is None or layer < built
        if is_built and layer not in known:
            code, found = Code.LAYER_NOT_MOE, f"layer {layer}, which has no experts"
            where = block(source, layer)
            yield tensor_problem(code, source.checkpoint, where, found, "a MoE layer", "FMT-25")
            continue
        for expert, name in constants.items():
            if name in stored:
                yield from _wrong(source, name, known.get(layer))
            elif is_built:
                code, wanted = Code.MISSING_CONSTANT, f"the constant of expert {expert}"
                expected = f"{wanted} of layer {layer}"
                yield tensor_problem(code, source.checkpoint, name, "nothing", expected, "LOAD-7")
        if layer in known and known[layer].fused:
            code, name = Code.FUSED_EXPERTS, known[layer].fused[0].name
            found, expected = "a tensor of all experts", "retained experts stored one by one"
            yield tensor_problem(code, source.checkpoint, name, found, expected, "CAP-11")
    yield from _unlisted(source, declared)


def _unlisted(source: Structure, declared: Declared) -> Iterator[Problem]:
    named = declared.names
    for layer in source.decoder:
        for entry in layer.constants.values():
            if entry.name not in named:
                code, found = Code.UNLISTED_CONSTANT, "a constant that is not listed"
                expected, checkpoint = "constants of listed experts only", source.checkpoint
                yield tensor_problem(code, checkpoint, entry.name, found, expected, "LOAD-9")


def _wrong(source: Structure, name: str, layer: MoeLayer | None) -> Iterator[Problem]:
    """A constant is one vector of the hidden size in a float type (FMT-5, FMT-27)."""
    entry = source.checkpoint.tensors[name]
    hidden = layer.router.shape[1] if layer and layer.router else source.settings.hidden_size
    if len(entry.shape) != 1 or hidden not in (None, *entry.shape):
        code, found = Code.CONSTANT_SHAPE, f"shape {show(list(entry.shape))}"
        yield tensor_problem(code, source.checkpoint, name, found, f"[{hidden}]", "FMT-5")
    elif entry.dtype not in dtypes.FLOATS:
        code, expected = Code.CONSTANT_DTYPE, f"one of {', '.join(dtypes.FLOATS)}"
        found = f"type {show(entry.dtype)}"
        yield tensor_problem(code, source.checkpoint, name, found, expected, "FMT-27")
