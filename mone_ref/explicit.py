"""The explicit form: substituted experts beside the names of their constants (FMT-6).

The same facts as the approx form, spelt out. Every value that the format fixes is
compared, never converted: a version or a routing rule that is not understood would
change answers without a word (FMT-7 to FMT-11).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mone_ref import declaration
from mone_ref.declaration import CANONICAL, MAX_DIGITS, Bounds, Named
from mone_ref.errors import Code, Severity, show
from mone_ref.families import Family
from mone_ref.fields import ROOT, Fields, Found
from mone_ref.strict_json import child

PATH = ("compression_config", "transform_config", "expert_substitution")
PLACE = ".".join((ROOT, *PATH))

VERSION = 1
ROUTER_SEMANTICS = {
    "preserve_logical_expert_ids": True,
    "preserve_router_weights": True,
    "renormalize_after_substitution": False,
}
WEIGHT_LAYOUT = "compact_retained_experts"
FORMAT = "constant-v1"

INTEGER = re.compile(r"[+-]?[0-9]+")
"""A layer index in a path, in any spelling; ``CANONICAL`` is the one that is accepted."""

TEXT_DECODER = "language_model"
"""Outer module under which a multimodal model holds its decoder."""


def find(fields: Fields) -> list[Found]:
    """The explicit declarations of a config, misplaced ones too; ``{}`` declares, null does not."""
    return [
        found
        for path, node in fields.holders
        if (found := _last(Found(path, node))) and found.value is not None
    ]


def _last(found: Found) -> Found | None:
    """The member at the end of ``PATH`` below one holder; None where the way there ends early."""
    for key in PATH:
        if not isinstance(found.value, dict):
            return None
        found = _member(found, key)
    return found


def read(fields: Fields, bounds: Bounds) -> Named | None:
    """The names of all constants; empty without a declaration at the top level (FMT-16).

    None with the problems in ``fields`` when any part of the declaration is wrong.
    """
    before = len(fields.errors)
    for found in _way(fields):
        if found.value is not None:
            _is_object(fields, found)  # another value would hide a declaration
    named: Named = {}
    for block in find(fields):
        if block.path == PLACE:
            named = _read_block(fields, block, bounds)
    return named if len(fields.errors) == before else None


def way(fields: Fields) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects on the way to a declaration, below every holder."""
    return [(found.path, found.value) for found in _way(fields) if isinstance(found.value, dict)]


def _way(fields: Fields) -> Iterator[Found]:
    for path, node in fields.holders:
        found = Found(path, node)
        for key in PATH[:-1]:
            if not isinstance(found.value, dict):
                break
            found = _member(found, key)
            yield found


def _read_block(fields: Fields, block: Found, bounds: Bounds) -> Named:
    """The declaration itself."""
    if not _is_object(fields, block):
        return {}
    version = _member(block, "version")
    check_fixed(fields, version, VERSION, Code.VERSION, "FMT-7")
    check_router_semantics(fields, _member(block, "router_semantics"))
    targets = _member(block, "targets")
    warn_unknown(fields, block, ("version", "router_semantics", "targets"))
    if not _is_object(fields, targets):
        return {}
    named: Named = {}
    paths: dict[int, str] = {}  # layer -> the target that claimed it
    for key in targets.value:
        target = _member(targets, key)
        constants = _read_target(fields, target, bounds)
        layer = target_layer(fields, target.path, key, bounds)
        if layer is None:
            continue
        check_unclaimed(fields, target.path, layer, paths)
        paths[layer] = key
        if constants:
            named[layer] = constants
    return named


def check_unclaimed(fields: Fields, where: str, layer: int, paths: Mapping[int, str]) -> None:
    """No earlier target claims the layer (FMT-21)."""
    if layer in paths:
        found = f"layer {layer} again, after {show(paths[layer])}"
        fields.report(Code.TARGET_REPEATED, where, found, "one target a layer", "FMT-21")


def check_router_semantics(fields: Fields, found: Found) -> None:
    """Compared as a whole, with JSON booleans: an unknown key may announce another routing."""
    value = found.value
    known = isinstance(value, dict) and value.keys() == ROUTER_SEMANTICS.keys()
    if not known or any(value[key] is not flag for key, flag in ROUTER_SEMANTICS.items()):
        expected = f"exactly {show(ROUTER_SEMANTICS, limit=200)}"
        clause = "FMT-20" if value == ROUTER_SEMANTICS else "FMT-8"  # 0 equals False
        fields.report(Code.ROUTER_SEMANTICS, found.path, _seen(found), expected, clause)


# -- targets


def target_layer(fields: Fields, where: str, path: str, bounds: Bounds) -> int | None:
    """The decoder layer whose experts a path names; None with a problem."""
    parts = path.split(".")
    at = index_place(fields, where, parts)
    if at is None:
        return None
    if bounds.family and not names_experts(bounds.family, parts, at):
        expected = f"{bounds.family.stack}.N.{bounds.family.experts}, the experts of a layer"
        fields.report(Code.TARGET_UNBOUND, where, show(path), expected, "FMT-25")
        return None
    layer = declaration.moe_layer(fields, where, parts[at], bounds)
    if layer is None:
        return None
    _note_spelling(fields, where, path, bounds.family, layer)
    return layer


def index_place(fields: Fields, where: str, parts: list[str]) -> int | None:
    """Which component of a path is its one layer index; None with a problem."""
    places = [place for place, part in enumerate(parts) if INTEGER.fullmatch(part)]
    if len(places) != 1:
        found, expected = f"{len(places)} layer indices", "a path with exactly one layer index"
        fields.report(Code.TARGET_PATH, where, found, expected, "FMT-11")
        return None
    (at,) = places
    if not CANONICAL.fullmatch(parts[at]):
        expected = "a decimal layer index without sign or leading zero"
        fields.report(Code.TARGET_PATH, where, f"index {show(parts[at])}", expected, "FMT-21")
        return None
    return at


def names_experts(family: Family, parts: list[str], at: int) -> bool:
    """Whether a path with its index at ``at`` ends in the experts of the decoder's stack.

    The path may be cut at the front, down to the stack's own name, or stand below the
    module of the text decoder. Any other outer name is another stack (LOAD-12).
    """
    *outer, stack = family.stack.split(".")
    return (
        parts[at + 1 :] == family.experts.split(".")
        and parts[max(at - 1, 0) : at] == [stack]
        and set(parts[: max(at - 1, 0)]) <= {*outer, TEXT_DECODER}
    )


def _note_spelling(
    fields: Fields, where: str, path: str, family: Family | None, layer: int
) -> None:
    """Note a path that is understood although it is not the stored one (FMT-14)."""
    if family and path != (stored := family.experts_path(layer)):
        expected = f"{stored}, the path as stored; it is taken for that"
        fields.report(Code.TARGET_PATH, where, show(path), expected, "FMT-14", Severity.NOTE)


def _read_target(fields: Fields, target: Found, bounds: Bounds) -> dict[int, str]:
    """Substituted id -> name of its constant, for one target; empty: nothing is substituted."""
    if not _is_object(fields, target):
        return {}
    check_count(fields, _member(target, "num_logical_experts"), bounds.num_experts)
    layout = _member(target, "weight_layout")
    check_fixed(fields, layout, WEIGHT_LAYOUT, Code.WEIGHT_LAYOUT, "FMT-9")
    replacements = _member(target, "replacements")
    warn_unknown(fields, target, ("num_logical_experts", "weight_layout", "replacements"))
    if not _is_object(fields, replacements):
        return {}
    named: dict[int, str] = {}
    for key in replacements.value:
        replacement = _member(replacements, key)
        name = read_replacement(fields, replacement)
        expert = expert_key(fields, replacement.path, key, bounds.num_experts)
        if expert is not None:
            named[expert] = name
    declaration.check_retained(fields, replacements.path, len(named), bounds.num_experts)
    return named


def check_count(fields: Fields, found: Found, num_experts: int | None) -> None:
    """The target was made for a model with as many logical experts."""
    known = found.value if num_experts is None else num_experts
    if type(found.value) is not int or found.value != known:
        expected = "the expert count" if num_experts is None else str(num_experts)
        fields.report(
            Code.EXPERT_COUNT, found.path, _seen(found), f"{expected}, an integer", "FMT-24"
        )


# -- replacements


def expert_key(fields: Fields, where: str, key: str, num_experts: int | None) -> int | None:
    """The logical id of a replacement's key; one spelling per expert (FMT-21)."""
    if not CANONICAL.fullmatch(key):
        expected = "a decimal expert id without sign, space or leading zero"
        fields.report(Code.ID_KEY, where, show(key), expected, "FMT-21")
        return None
    expert = int(key) if len(key) <= MAX_DIGITS else None
    if expert is None or (num_experts is not None and expert >= num_experts):
        bound = "of the model" if num_experts is None else f"from 0 to {num_experts - 1}"
        fields.report(Code.ID_RANGE, where, show(key), f"an expert id {bound}", "FMT-20")
        return None
    return expert


def read_replacement(fields: Fields, replacement: Found) -> str:
    """The name of a constant; empty when there is a problem."""
    if not _is_object(fields, replacement):
        return ""
    kind = _member(replacement, "format")
    check_fixed(fields, kind, FORMAT, Code.REPLACEMENT_FORMAT, "FMT-10")
    tensors = _member(replacement, "tensors")
    warn_unknown(fields, replacement, ("format", "tensors"))
    if not _is_object(fields, tensors):
        return ""
    name = _member(tensors, "value")
    warn_unknown(fields, tensors, ("value",))
    if isinstance(name.value, str) and name.value:
        return name.value
    fields.report(Code.CONSTANT_NAME, name.path, _seen(name), "the name of a tensor", "FMT-20")
    return ""


# -- what the rules share


def _member(found: Found, key: str) -> Found:
    """One member of an object, by its path; None where it is absent."""
    return Found(child(found.path, key), found.value.get(key))


def _seen(found: Found) -> str:
    return "nothing" if found.value is None else show(found.value, limit=200)


def _is_object(fields: Fields, found: Found) -> bool:
    if isinstance(found.value, dict):
        return True
    fields.report(Code.EXPLICIT_FORM, found.path, _seen(found), "a JSON object", "FMT-20")
    return False


def check_fixed(fields: Fields, found: Found, only: Any, code: Code, clause: str) -> None:
    """Report a value that is not the one the format has; 1.0 and ``true`` are not 1.

    Under ``clause``, or under FMT-20 where nothing or that value in another type is given.
    """
    if type(found.value) is not type(only) or found.value != only:
        meant = found.value in (None, only, str(only))
        fields.report(code, found.path, _seen(found), show(only), "FMT-20" if meant else clause)


def warn_unknown(fields: Fields, found: Found, known: tuple[str, ...]) -> None:
    """Warn about members that the format does not define (FMT-23)."""
    expected = f"{' or '.join(known)}; this key is not read"
    for key in found.value:
        if key not in known:
            where = child(found.path, key)
            fields.report(Code.UNKNOWN_KEY, where, show(key), expected, "FMT-23", Severity.WARNING)
