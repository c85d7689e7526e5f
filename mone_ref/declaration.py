"""Which experts a config declares as substituted, and the approx form (FMT-2, FMT-3).

Strict on purpose: a list that is misread means experts that are silently never
loaded (FMT-17 to FMT-21).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mone_ref.errors import Code, Severity, show
from mone_ref.families import Family
from mone_ref.fields import Fields, Found
from mone_ref.strict_json import child

APPROX = "approximate_experts"

CANONICAL = re.compile(r"0|[1-9][0-9]*")
MAX_DIGITS = 9
"""An index with more digits is beyond any model, and int() refuses very long ones."""

Listed = dict[int, tuple[int, ...]]
"""Layer index -> substituted ids in the config's order; no empty entries."""

Named = dict[int, dict[int, str]]
"""Layer index -> substituted id -> name of its constant, in the config's order."""


@dataclass(frozen=True)
class LayerSubstitution:
    """Substituted experts of one MoE layer.

    ``listed`` keeps the order of the config; everything else is ascending
    (EXEC-2). ``constants`` maps each substituted id to the name of its tensor; the
    explicit form may give one name to several experts.
    """

    layer: int
    num_logical: int
    listed: tuple[int, ...]
    constants: Mapping[int, str]

    @property
    def substituted(self) -> tuple[int, ...]:
        """Substituted logical ids, ascending."""
        return tuple(sorted(self.listed))

    @property
    def retained(self) -> tuple[int, ...]:
        """Retained logical ids, ascending: position is the physical row (EXEC-2)."""
        return tuple(sorted(set(range(self.num_logical)) - set(self.listed)))


@dataclass(frozen=True)
class Substitution:
    """The whole declaration: layer index -> its substituted experts.

    Layers without substituted experts are absent. ``form`` is ``approx``, ``explicit``,
    or ``none`` when nothing is substituted. ``unbuilt`` are layers past the decoder's last,
    MTP layers stored in its stack: what they list changes no layer that is built (LOAD-6).
    """

    form: str
    layers: Mapping[int, LayerSubstitution]
    unbuilt: Mapping[int, LayerSubstitution] = field(default_factory=dict)

    def layer(self, layer: int, num_logical: int) -> LayerSubstitution:
        """The entry of one MoE layer; a layer that is not listed retains every expert."""
        listed = self.layers.get(layer) or self.unbuilt.get(layer)
        return listed or LayerSubstitution(layer, num_logical, (), {})


def bind(form: str, named: Named, num_experts: int, num_layers: int) -> Substitution:
    """A declaration that was read in one ``form``, layers and ids ascending."""
    entries = {
        layer: LayerSubstitution(layer, num_experts, tuple(names), dict(sorted(names.items())))
        for layer, names in sorted(named.items())
    }
    built = {layer: entry for layer, entry in entries.items() if layer < num_layers}
    unbuilt = {layer: entry for layer, entry in entries.items() if layer >= num_layers}
    return Substitution(form if entries else "none", built, unbuilt)


def derived_names(listed: Listed, family: Family) -> Named:
    """The names that the approx form gives to the constants of a list (FMT-5)."""
    return {
        layer: {expert: family.constant_name(layer, expert) for expert in ids}
        for layer, ids in listed.items()
    }


@dataclass(frozen=True)
class Bounds:
    """What a declaration is held against; None where that part of the config is broken.

    ``num_layers`` counts the layers of the stack, MTP layers included (LOAD-6).
    """

    family: Family | None
    num_layers: int | None
    dense_layers: Collection[int]
    num_experts: int | None


def read(fields: Fields, bounds: Bounds) -> Listed | None:
    """The substituted ids of each layer, or None with the problems in ``fields``."""
    approx = fields.find(APPROX)
    copies = [read_map(fields, found, bounds) for found in approx]
    return agreed(fields, approx, copies)


def read_map(fields: Fields, found: Found, bounds: Bounds) -> Listed | None:
    """One copy of the map, or None when any part of it is wrong."""
    if not isinstance(found.value, dict):
        expected = "an object that maps layer indices to arrays of expert ids"
        fields.report(Code.NOT_A_MAPPING, found.path, show(found.value), expected, "FMT-20")
        return None
    before = len(fields.problems)
    listed: Listed = {}
    for key, value in found.value.items():
        path = child(found.path, key)
        layer = layer_index(fields, path, key, bounds)
        ids = read_ids(fields, path, value, bounds.num_experts)
        if layer is not None and ids:
            listed[layer] = ids
    return listed if len(fields.problems) == before else None


def layer_index(fields: Fields, path: str, key: str, bounds: Bounds) -> int | None:
    """The integer of a layer key. One spelling per layer, so no layer is listed twice (FMT-21)."""
    if not CANONICAL.fullmatch(key):
        expected = "a decimal layer index without sign, space or leading zero"
        fields.report(Code.LAYER_KEY, path, show(key), expected, "FMT-21")
        return None
    return moe_layer(fields, path, key, bounds)


def moe_layer(fields: Fields, where: str, index: str, bounds: Bounds) -> int | None:
    """The MoE layer that a canonical decimal ``index`` names; None with a problem (FMT-25)."""
    layer = int(index) if len(index) <= MAX_DIGITS else None
    if layer is None or (bounds.num_layers is not None and layer >= bounds.num_layers):
        count = bounds.num_layers
        bound = "of the model" if count is None else f"from 0 to {count - 1}"
        found, expected = f"layer {show(index)}", f"a MoE layer {bound}"
        fields.report(Code.LAYER_NOT_MOE, where, found, expected, "FMT-25")
        return None
    if layer in bounds.dense_layers:
        found, expected = f"layer {layer}, which has no experts", "a MoE layer"
        fields.report(Code.LAYER_NOT_MOE, where, found, expected, "FMT-25")
        return None
    return layer


def read_ids(fields: Fields, path: str, value: Any, num_experts: int | None) -> tuple[int, ...]:
    """Ids of one layer in the config's order; null and [] mean not substituted (FMT-19)."""
    if value is None:
        return ()
    if not isinstance(value, list):
        expected = "an array of expert ids, or null"
        fields.report(Code.NOT_A_LIST, path, show(value), expected, "FMT-20")
        return ()
    ids: dict[int, None] = {}
    for position, item in enumerate(value):
        where = child(path, position)
        expert = read_id(fields, where, item, num_experts)
        if expert in ids:
            fields.report(Code.ID_DUPLICATE, where, f"{show(item)} again", "each id once", "FMT-20")
        elif expert is not None:
            ids[expert] = None
    check_retained(fields, path, len(ids), num_experts)
    return tuple(ids)


def read_id(fields: Fields, where: str, item: Any, num_experts: int | None) -> int | None:
    """One logical id of a list; None with a problem (FMT-20)."""
    if type(item) is not int:
        fields.report(Code.ID_TYPE, where, show(item), "a JSON integer", "FMT-20")
        return None
    if item < 0 or (num_experts is not None and item >= num_experts):
        bound = "at least 0" if num_experts is None else f"from 0 to {num_experts - 1}"
        fields.report(Code.ID_RANGE, where, show(item), f"an expert id {bound}", "FMT-20")
        return None
    return item


def check_retained(fields: Fields, where: str, substituted: int, num_experts: int | None) -> None:
    """A layer retains at least one expert (FMT-17)."""
    if substituted == num_experts:
        found, expected = f"all {substituted} experts", "at least one expert that is retained"
        fields.report(Code.ALL_SUBSTITUTED, where, found, expected, "FMT-17")


def agreed(fields: Fields, approx: list[Found], copies: list[Listed | None]) -> Listed | None:
    """The one list that all copies declare (FMT-15); None when a copy is wrong or differs."""
    sound = [copy for copy in copies if copy is not None]
    if len(sound) != len(copies):
        return None
    if len(sound) < 2:
        return sound[0] if sound else {}
    first, second = ({layer: set(ids) for layer, ids in copy.items()} for copy in sound)
    places = f"{approx[0].path} and {approx[1].path}"
    if first == second:
        found, expected = f"the same list at {places}", "one place is enough"
        fields.report(Code.PLACEMENT_COPY, approx[0].path, found, expected, "FMT-15", Severity.NOTE)
        return sound[0]
    layers = sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))
    fields.report(
        Code.PLACEMENT_CONFLICT,
        approx[0].path,
        f"other ids at {places} for layers {show(layers)}",
        "the same list in both places, or one list",
        "FMT-15",
    )
    return None
