"""Which experts a config declares as substituted: the approx form (FMT-2, FMT-3).

Strict on purpose: a list that is misread means experts that are silently never
loaded. Everything that looks like a declaration and is not read is an error or a
warning, by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mone_ref.errors import Code, Severity, show
from mone_ref.families import Family
from mone_ref.fields import ROOT, TEXT_CONFIG, Fields, Found
from mone_ref.strict_json import child

APPROX = "approximate_experts"
INIT_TOKENS = "approximate_expert_init_tokens"
EXPLICIT = ("compression_config", "transform_config", "expert_substitution")

LAYER_KEY = re.compile(r"0|[1-9][0-9]*", re.ASCII)
LAYER_DIGITS = 9
"""A layer key with more digits is beyond any model, and int() refuses very long ones."""

Listed = dict[int, tuple[int, ...]]
"""Layer index -> substituted ids in the config's order; no empty entries."""


@dataclass(frozen=True)
class LayerSubstitution:
    """Substituted experts of one MoE layer.

    ``listed`` keeps the order of the config; everything else is ascending
    (EXEC-2). ``constants`` maps each substituted id to the name of its tensor.
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

    Layers without substituted experts are absent. ``form`` is ``approx``, or
    ``none`` when nothing is substituted.
    """

    form: str
    layers: Mapping[int, LayerSubstitution]

    def layer(self, layer: int, num_logical: int) -> LayerSubstitution:
        """The entry of one MoE layer; a layer that is not listed retains every expert."""
        return self.layers.get(layer) or LayerSubstitution(layer, num_logical, (), {})


def bind(listed: Listed, family: Family, num_experts: int) -> Substitution:
    """The declaration with the names of its constants (FMT-5), layers ascending."""
    layers = {
        layer: LayerSubstitution(
            layer,
            num_experts,
            ids,
            {expert: family.constant_name(layer, expert) for expert in sorted(ids)},
        )
        for layer, ids in sorted(listed.items())
    }
    return Substitution("approx" if layers else "none", layers)


def read(fields: Fields, num_layers: int | None, num_experts: int | None) -> Listed:
    """The substituted ids of each layer; problems go to ``fields``.

    ``num_layers`` and ``num_experts`` are None when the model part of the config is
    broken: what needs them is then not checked.
    """
    approx = fields.find(APPROX)
    _check_forms(fields, approx)
    _check_other_dialects(fields)
    _check_other_holders(fields)
    _warn_near_misses(fields)
    copies = [_read_map(fields, found, num_layers, num_experts) for found in approx]
    listed = _agreed(fields, approx, copies)
    if listed is not None:
        _check_init_tokens(fields, listed)
    return listed or {}


# -- the map of layers


def _read_map(
    fields: Fields, found: Found, num_layers: int | None, num_experts: int | None
) -> Listed | None:
    """One copy of the map, or None when any part of it is wrong."""
    if not isinstance(found.value, dict):
        expected = "an object that maps layer indices to arrays of expert ids"
        fields.report(Code.NOT_A_MAPPING, found.path, show(found.value), expected, "FMT-2")
        return None
    before = len(fields.problems)
    listed: Listed = {}
    for key, value in found.value.items():
        path = child(found.path, key)
        layer = _layer_index(fields, path, key, num_layers)
        ids = _read_ids(fields, path, value, num_experts)
        if layer is not None and ids:
            listed[layer] = ids
    return listed if len(fields.problems) == before else None


def _layer_index(fields: Fields, path: str, key: str, num_layers: int | None) -> int | None:
    """The integer of a layer key. One spelling per layer, so no layer is listed twice (FMT-21)."""
    if not LAYER_KEY.fullmatch(key):
        expected = "a decimal layer index without sign, space or leading zero"
        fields.report(Code.LAYER_KEY, path, show(key), expected, "FMT-21")
        return None
    layer = int(key) if len(key) <= LAYER_DIGITS else None
    if layer is None or (num_layers is not None and layer >= num_layers):
        bound = "of the model" if num_layers is None else f"from 0 to {num_layers - 1}"
        fields.report(
            Code.LAYER_NOT_MOE, path, f"layer {show(key)}", f"a MoE layer {bound}", "FMT-25"
        )
        return None
    return layer


def _read_ids(fields: Fields, path: str, value: Any, num_experts: int | None) -> tuple[int, ...]:
    """Ids of one layer in the config's order; null and [] mean not substituted (FMT-19)."""
    if value is None:
        return ()
    if not isinstance(value, list):
        expected = "an array of expert ids, or null"
        fields.report(Code.NOT_A_LIST, path, show(value), expected, "FMT-2")
        return ()
    ids: dict[int, None] = {}
    for position, item in enumerate(value):
        where = child(path, position)
        if type(item) is not int:
            fields.report(Code.ID_TYPE, where, show(item), "a JSON integer", "FMT-20")
        elif item < 0 or (num_experts is not None and item >= num_experts):
            bound = "at least 0" if num_experts is None else f"from 0 to {num_experts - 1}"
            fields.report(Code.ID_RANGE, where, show(item), f"an expert id {bound}", "FMT-20")
        elif item in ids:
            fields.report(Code.ID_DUPLICATE, where, f"{show(item)} again", "each id once", "FMT-20")
        else:
            ids[item] = None
    if len(ids) == num_experts:
        fields.report(
            Code.ALL_SUBSTITUTED,
            path,
            f"all {num_experts} experts",
            "at least one expert that is retained",
            "FMT-17",
        )
    return tuple(ids)


def _agreed(fields: Fields, approx: list[Found], copies: list[Listed | None]) -> Listed | None:
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


# -- everything else that looks like a declaration


def _check_forms(fields: Fields, approx: list[Found]) -> None:
    """Refuse the explicit form: beside the approx form, misplaced, or alone."""
    explicit = [found for holder in fields.holders if (found := _explicit(fields, *holder))]
    if approx and explicit:
        both = " and ".join(found.path for found in (*approx, *explicit))
        fields.report(Code.BOTH_FORMS, explicit[0].path, both, "one form", "FMT-13")
    for found in explicit:
        if not found.path.startswith(f"{ROOT}.{EXPLICIT[0]}"):
            expected = f"the explicit form at the top level, as {'.'.join((ROOT, *EXPLICIT))}"
            fields.report(Code.MISPLACED, found.path, "the explicit form", expected, "FMT-16")
        elif not approx:
            expected = f"{APPROX}: this release reads the approx form only"
            fields.report(Code.EXPLICIT_FORM, found.path, "the explicit form", expected, "FMT-6")


def _explicit(fields: Fields, path: str, node: Mapping[str, Any]) -> Found | None:
    """The explicit declaration below one holder; ``{}`` declares, null does not."""
    for key in EXPLICIT:
        value, path = node.get(key), child(path, key)
        if value is None:
            return None
        if key == EXPLICIT[-1]:
            return Found(path, value)
        if not isinstance(value, dict):
            fields.report(Code.EXPLICIT_FORM, path, show(value), "a JSON object", "FMT-6")
            return None
        node = value
    return None


def _check_other_dialects(fields: Fields) -> None:
    """Refuse the ``mone`` block of earlier engine branches, which lists the same thing."""
    for found in fields.find("mone"):
        expected = f"{APPROX}: a mone block is recognised but not read"
        fields.report(Code.DIALECT, found.path, show(found.value), expected, "FMT-26")


def _check_other_holders(fields: Fields) -> None:
    """Refuse a list in any other object of the config, where no engine would look (FMT-3)."""
    for path, holder in fields.holders:
        for key, value in holder.items():
            if key != TEXT_CONFIG and isinstance(value, dict) and value.get(APPROX) is not None:
                where = child(child(path, key), APPROX)
                expected = f"the list at {ROOT}.{APPROX} or {ROOT}.{TEXT_CONFIG}.{APPROX}"
                fields.report(Code.MISPLACED, where, show(value[APPROX]), expected, "FMT-3")


def _check_init_tokens(fields: Fields, listed: Listed) -> None:
    """Accept all-zero counts beside the list; anything else makes constants evolve (FMT-26)."""
    for found in fields.find(INIT_TOKENS):
        shape = "an object with one count per listed expert, layer by layer"
        if not isinstance(found.value, dict):
            fields.report(Code.DIALECT, found.path, show(found.value), shape, "FMT-26")
            continue
        before = len(fields.problems)
        lengths = {str(layer): len(ids) for layer, ids in listed.items()}
        for key in [*found.value, *(key for key in lengths if key not in found.value)]:
            counts, where = found.value.get(key), child(found.path, key)
            counts = [] if counts is None else counts
            if not isinstance(counts, list) or any(type(count) is not int for count in counts):
                fields.report(Code.DIALECT, where, show(counts), "an array of integers", "FMT-26")
            elif len(counts) != lengths.get(key, 0):
                expected = f"{lengths.get(key, 0)} counts, one per listed expert"
                fields.report(Code.DIALECT, where, f"{len(counts)} counts", expected, "FMT-26")
            elif any(counts):
                expected = "zeros: constants that change while the model runs are not supported"
                fields.report(Code.EVOLVING, where, show(counts), expected, "FMT-26")
        if len(fields.problems) == before:
            fields.report(
                Code.DIALECT, found.path, "zeros only", "nothing; the key is not needed",
                "FMT-26", Severity.NOTE,
            )  # fmt: skip


def _warn_near_misses(fields: Fields) -> None:
    """Warn about keys that were probably meant as one of ours: they would go unread (FMT-23)."""
    ours = {_letters(key): key for key in (APPROX, INIT_TOKENS, EXPLICIT[-1])}
    for path, holder in fields.holders:
        for key in holder:
            if key in (APPROX, INIT_TOKENS) or len(key) > 2 * len(INIT_TOKENS):
                continue
            for match in difflib.get_close_matches(_letters(key), ours, n=1, cutoff=0.8):
                expected = f"{ours[match]}, if that was meant; this key is not read"
                fields.report(
                    Code.UNKNOWN_KEY,
                    child(path, key),
                    show(key),
                    expected,
                    "FMT-23",
                    Severity.WARNING,
                )


def _letters(key: str) -> str:
    return re.sub(r"[^a-z]", "", key.lower())
