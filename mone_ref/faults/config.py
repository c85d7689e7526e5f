"""Wrong reading of a config: what an engine takes it to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from mone_ref import config, declaration, dialects, explicit
from mone_ref.declaration import Bounds, Listed, Named, Substitution
from mone_ref.errors import Code, Phase, Problem, Rejected, Severity, show
from mone_ref.families import Family
from mone_ref.faults import plant
from mone_ref.faults.loading import LEFT_UNFILLED, UNLISTED
from mone_ref.faults.plant import Patch
from mone_ref.fields import ROOT, Fields, Found
from mone_ref.model_config import ModelConfig

# The right steps, bound before anything is planted.
_read_map = declaration.read_map
_read_ids = declaration.read_ids
_read_id = declaration.read_id
_layer_index = declaration.layer_index
_moe_layer = declaration.moe_layer
_check_one_form = dialects.check_one_form
_check_fixed = explicit.check_fixed
_check_router_semantics = explicit.check_router_semantics
_index_place = explicit.index_place
_expert_key = explicit.expert_key
_warn_unknown = explicit.warn_unknown
_warn_near_misses = dialects.warn_near_misses
_check_init_tokens = dialects.check_init_tokens
_bind = config.bind


# -- the list


def converted_ids(fields: Fields, where: str, item: Any, num_experts: int | None) -> int | None:
    """Pass every id through ``int()``."""
    convertible = isinstance(item, str | float | bool)
    return _read_id(fields, where, int(item) if convertible else item, num_experts)


def ids_from_the_end(fields: Fields, where: str, item: Any, num_experts: int | None) -> int | None:
    """Count a negative id from the end, as an index into a Python list does."""
    negative = type(item) is int and item < 0
    return _read_id(fields, where, item + (num_experts or 0) if negative else item, num_experts)


def only_ids_in_range(fields: Fields, where: str, item: Any, num_experts: int | None) -> int | None:
    """Skip ids that no expert has."""
    if type(item) is int and not 0 <= item < (num_experts or 0):
        return None
    return _read_id(fields, where, item, num_experts)


def distinct_ids(fields: Fields, path: str, value: Any, num_experts: int | None) -> tuple[int, ...]:
    """Make the list a set."""
    if isinstance(value, list):
        value = [item for place, item in enumerate(value) if item not in value[:place]]
    return _read_ids(fields, path, value, num_experts)


def anything_iterated(
    fields: Fields, path: str, value: Any, num_experts: int | None
) -> tuple[int, ...]:
    """Iterate over whatever is there: the characters of a text, the keys of an object."""
    if isinstance(value, str | dict):
        value = [int(item) for item in value]
    return _read_ids(fields, path, value, num_experts)


def falsy_is_empty(
    fields: Fields, path: str, value: Any, num_experts: int | None
) -> tuple[int, ...]:
    """Take every value that Python takes for false as an empty list."""
    return _read_ids(fields, path, value or None, num_experts)


def ids_in_order_only(
    fields: Fields, path: str, value: Any, num_experts: int | None
) -> tuple[int, ...]:
    """Refuse ids that do not ascend."""
    ids = _read_ids(fields, path, value, num_experts)
    if list(ids) != sorted(ids):
        fields.report(Code.NOT_A_LIST, path, show(value), "ascending ids")
    return ids


def no_empty_list(
    fields: Fields, path: str, value: Any, num_experts: int | None
) -> tuple[int, ...]:
    """Refuse a layer that is listed and substitutes nothing."""
    ids = _read_ids(fields, path, value, num_experts)
    if not ids:
        fields.report(Code.NOT_A_LIST, path, show(value), "at least one id")
    return ids


def any_number_substituted(
    fields: Fields, where: str, substituted: int, num_experts: int | None
) -> None:
    """Leave a layer without a retained expert."""


def converted_keys(fields: Fields, path: str, key: str, bounds: Bounds) -> int | None:
    """Pass layer keys through ``int()``: "01", " 1" and "+1" are layer 1, the last one counts."""
    with suppress(ValueError):
        key = str(int(key))
    return _layer_index(fields, path, key, bounds)


def layers_from_the_end(fields: Fields, path: str, key: str, bounds: Bounds) -> int | None:
    """Count a negative layer from the end."""
    if key.startswith("-") and key[1:].isdecimal():
        key = str(int(key) + (bounds.num_layers or 0))
    return _layer_index(fields, path, key, bounds)


def only_layers_with_experts(fields: Fields, where: str, index: str, bounds: Bounds) -> int | None:
    """Skip entries of layers that the model does not have, or that are dense."""
    layer = int(index)
    if layer >= (bounds.num_layers or 0) or layer in bounds.dense_layers:
        return None
    return _moe_layer(fields, where, index, bounds)


def nth_moe_layer(fields: Fields, path: str, key: str, bounds: Bounds) -> int | None:
    """Count layers with experts only."""
    layers = [n for n in range(bounds.num_layers or 0) if n not in bounds.dense_layers]
    if declaration.CANONICAL.fullmatch(key):
        key = str(dict(enumerate(layers)).get(int(key), bounds.num_layers))
    return _layer_index(fields, path, key, bounds)


def list_unread(fields: Fields, bounds: Bounds) -> Listed | None:
    """Never look for the approx form."""
    return {}


def explicit_unread(fields: Fields, bounds: Bounds) -> Named | None:
    """Never look for the explicit form."""
    return {}


def position_is_layer(fields: Fields, found: Found, bounds: Bounds) -> Listed | None:
    """Read an array as a map from positions."""
    if isinstance(found.value, list):
        by_position = {str(layer): ids for layer, ids in enumerate(found.value)}
        found = Found(found.path, by_position)
    return _read_map(fields, found, bounds)


def map_from_text(fields: Fields, found: Found, bounds: Bounds) -> Listed | None:
    """Parse a map that was written as text."""
    if isinstance(found.value, str):
        found = Found(found.path, json.loads(found.value))
    return _read_map(fields, found, bounds)


# -- which form, and where


def one_form_unchecked(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Accept two forms at once."""


def empty_form_absent(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Take a form that substitutes nothing for one that is not there."""
    if listed and named:
        _check_one_form(fields, listed, named)


def null_form_present(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Take a list that is null for one that is there."""
    listing = any(declaration.APPROX in holder for _, holder in fields.holders)
    if listing and explicit.find(fields):
        fields.report(Code.BOTH_FORMS, explicit.PLACE, "both forms", "one form")


def empty_explicit_refused(fields: Fields, listed: Listed | None, named: Named | None) -> None:
    """Refuse an explicit form that substitutes nothing."""
    _check_one_form(fields, listed, named)
    if explicit.find(fields) and named == {}:
        fields.report(Code.EXPLICIT_FORM, explicit.PLACE, "no replacement", "at least one")


def list_first(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Prefer the approx form."""
    return _bind(model, listed, {} if listed else named)


def misplaced_unchecked(fields: Fields) -> None:
    """Look for the explicit form in its own place only."""


def other_dialect_unchecked(fields: Fields) -> None:
    """Leave a ``mone`` block unread."""


def init_tokens_unread(fields: Fields, listed: Listed) -> None:
    """Leave the counts of tokens unread."""


def no_init_tokens(fields: Fields, listed: Listed) -> None:
    """Refuse counts of tokens, zeros too."""
    _check_init_tokens(fields, listed)
    for found in fields.find(dialects.INIT_TOKENS):
        fields.report(Code.DIALECT, found.path, show(found.value), "no such key")


def no_like_keys(fields: Fields) -> None:
    """Refuse a key that resembles one of the format's."""
    before = len(fields.problems)
    _warn_near_misses(fields)
    harden(fields, before)


def no_unknown_keys(fields: Fields, found: Found, known: tuple[str, ...]) -> None:
    """Refuse members that the format does not define."""
    before = len(fields.problems)
    _warn_unknown(fields, found, known)
    harden(fields, before)


def harden(fields: Fields, first: int) -> None:
    """Report the problems from ``first`` on once more, as errors."""
    for problem in fields.problems[first:]:
        if problem.severity is Severity.WARNING:
            fields.report(problem.code, problem.where, problem.found, problem.expected)


def repeated_unseen(pairs: list[tuple[str, Any]]) -> list[str]:
    """Read JSON as Python does: of equal keys the last one counts."""
    return []


# -- the explicit form


def unread(code: Code) -> Callable[..., None]:
    """Never read one of the values that the format fixes, named by the code for a wrong one."""
    ignored = code

    def check_fixed(fields: Fields, found: Found, only: Any, code: Code, clause: str) -> None:
        if code is not ignored:
            _check_fixed(fields, found, only, code, clause)

    return check_fixed


def fixed_by_equality(fields: Fields, found: Found, only: Any, code: Code, clause: str) -> None:
    """Compare with Python's ``==``, by which ``true`` and 1.0 are 1."""
    if found.value != only:
        _check_fixed(fields, found, only, code, clause)


def version_from_text(fields: Fields, found: Found, only: Any, code: Code, clause: str) -> None:
    """Compare the text of both: "1" is 1."""
    if str(found.value) != str(only):
        _check_fixed(fields, found, only, code, clause)


def semantics_unread(fields: Fields, found: Found) -> None:
    """Never read the routing rules."""


def semantics_by_equality(fields: Fields, found: Found) -> None:
    """Compare with Python's ``==``, by which 0 is ``false``."""
    if found.value != explicit.ROUTER_SEMANTICS:
        _check_router_semantics(fields, found)


def known_semantics_only(fields: Fields, found: Found) -> None:
    """Look at the keys that are known, each with its right value as default."""
    given = found.value if isinstance(found.value, dict) else {}
    known = {key: given.get(key, right) for key, right in explicit.ROUTER_SEMANTICS.items()}
    _check_router_semantics(fields, Found(found.path, known))


def count_unread(fields: Fields, found: Found, num_experts: int | None) -> None:
    """Never read the number of logical experts."""


def integers(parts: list[str]) -> list[int]:
    """Places of a path's integers."""
    return [place for place, part in enumerate(parts) if explicit.INTEGER.fullmatch(part)]


def first_integer(fields: Fields, where: str, parts: list[str]) -> int | None:
    """Take the first of several integers."""
    places = integers(parts)
    return places[0] if places else _index_place(fields, where, parts)


def last_integer(fields: Fields, where: str, parts: list[str]) -> int | None:
    """Take the last of several integers."""
    places = integers(parts)
    return places[-1] if places else _index_place(fields, where, parts)


def converted_index(fields: Fields, where: str, parts: list[str]) -> int | None:
    """Pass the layer index of a target through ``int()``."""
    converted = [str(int(part)) if part.isdecimal() else part for part in parts]
    return _index_place(fields, where, converted)


def any_module(family: Family, parts: list[str], at: int) -> bool:
    """Never compare the text of a path with the names of modules."""
    return True


def stored_path_only(family: Family, parts: list[str], at: int) -> bool:
    """Take a path as stored, and no other spelling of it."""
    return ".".join(parts) == family.experts_path(int(parts[at]))


def layer_claimed_again(fields: Fields, where: str, layer: int, paths: Mapping[int, str]) -> None:
    """Let a later target of a layer replace an earlier one."""


def converted_expert(fields: Fields, where: str, key: str, num_experts: int | None) -> int | None:
    """Pass the id of a replacement through ``int()``."""
    return _expert_key(fields, where, str(int(key)) if key.isdecimal() else key, num_experts)


# -- what the model can be


def refusal(code: Code, found: str, expected: str) -> Rejected:
    """One error at the root of the config."""
    return Rejected([Problem(code, Phase.PARSE, ROOT, found, expected)])


def all_layers_listed(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Refuse a declaration that leaves out a MoE layer."""
    bound = _bind(model, listed, named)
    if bound.layers and list(bound.layers) != model.moe_layers:
        found, expected = f"layers {list(bound.layers)}", f"layers {model.moe_layers}"
        raise refusal(Code.LAYER_NOT_MOE, found, expected)
    return bound


def top_k_retained(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Refuse to route to more experts than a layer retains."""
    bound = _bind(model, listed, named)
    for layer in bound.layers.values():
        if len(layer.retained) < model.top_k:
            found, expected = f"{len(layer.retained)} experts", f"at least top-k = {model.top_k}"
            raise refusal(Code.ALL_SUBSTITUTED, found, expected)
    return bound


def one_owner(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Refuse one name for the constants of several experts."""
    names = [name for layer in named.values() for name in layer.values()]
    if len(set(names)) < len(names):
        found, expected = "a constant of several experts", "one constant for each"
        raise refusal(Code.CONSTANT_NAME, found, expected)
    return _bind(model, listed, named)


def renamed_constants(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Rename constants along with the projections that the engine joins."""
    renamed = {
        layer: {expert: name.replace("q_proj", "qkv_proj") for expert, name in names.items()}
        for layer, names in named.items()
    }
    return _bind(model, listed, renamed)


def derived_names(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Look for the constants of the explicit form under the names of the approx form."""
    return _bind(model, listed or {layer: tuple(ids) for layer, ids in named.items()}, {})


# -- the faults

MAP = "mone_ref.declaration", "read_map"
IDS = "mone_ref.declaration", "read_ids"
ID = "mone_ref.declaration", "read_id"
LAYER = "mone_ref.declaration", "moe_layer"
LAYER_KEY = "mone_ref.declaration", "layer_index"
BIND = "mone_ref.config", "bind"
ONE_FORM = "mone_ref.dialects", "check_one_form"
INIT_TOKENS = "mone_ref.dialects", "check_init_tokens"
FIXED = "mone_ref.explicit", "check_fixed"
SEMANTICS = "mone_ref.explicit", "check_router_semantics"
INDEX = "mone_ref.explicit", "index_place"
TARGET_TEXT = Patch("mone_ref.explicit", "names_experts", any_module)

fault = partial(plant.fault, stage="parse", group="config")

FAULTS = (
    # -- the list
    fault(
        "list-unread",
        "approximate_experts is not read, and experts without weights are not filled.",
        "FMT-2",
        Patch("mone_ref.declaration", "read", list_unread),
        UNLISTED,
        *LEFT_UNFILLED,
    ),
    fault(
        "position-is-layer",
        "An array in place of the map is read by position.",
        "FMT-20",
        Patch(*MAP, position_is_layer),
    ),
    fault(
        "map-from-text",
        "A map that is written as text is parsed.",
        "FMT-20",
        Patch(*MAP, map_from_text),
    ),
    fault(
        "layer-keys-through-int",
        'Layer keys pass through int(): "01", " 1" and "+1" are layer 1, and the last one counts.',
        "FMT-21",
        Patch(*LAYER_KEY, converted_keys),
    ),
    fault(
        "layers-from-the-end",
        "A negative layer key counts from the last layer.",
        "FMT-21",
        Patch(*LAYER_KEY, layers_from_the_end),
    ),
    fault(
        "unknown-layer-skipped",
        "An entry of a layer that does not exist, or has no experts, is skipped.",
        "FMT-25",
        Patch(*LAYER, only_layers_with_experts),
    ),
    fault(
        "list-counts-layers-with-experts",
        "Key N of the list is the layer after N others that have experts.",
        "FMT-2",
        Patch(*LAYER_KEY, nth_moe_layer),
    ),
    fault(
        "ids-through-int",
        'Ids pass through int(): 5.5 is 5, true is 1, "1" is 1.',
        "FMT-20",
        Patch(*ID, converted_ids),
    ),
    fault(
        "ids-from-the-end",
        "A negative id counts from the last expert.",
        "FMT-20",
        Patch(*ID, ids_from_the_end),
    ),
    fault(
        "unknown-id-skipped",
        "Ids that no expert has are skipped.",
        "FMT-20",
        Patch(*ID, only_ids_in_range),
    ),
    fault(
        "duplicate-ids-collapse",
        "An id that is listed twice counts once.",
        "FMT-20",
        Patch(*IDS, distinct_ids),
    ),
    fault(
        "anything-is-iterated",
        "A text or an object in place of a list is iterated over.",
        "FMT-20",
        Patch(*IDS, anything_iterated),
    ),
    fault(
        "false-is-an-empty-list",
        "Whatever Python takes for false is an empty list.",
        "FMT-20",
        Patch(*IDS, falsy_is_empty),
    ),
    fault(
        "descending-ids-refused",
        "Ids that do not ascend are refused.",
        "FMT-2",
        Patch(*IDS, ids_in_order_only),
    ),
    fault(
        "empty-list-refused",
        "A layer whose list is empty or null is refused.",
        "FMT-19",
        Patch(*IDS, no_empty_list),
    ),
    fault(
        "unlisted-layer-refused",
        "A list that leaves out a MoE layer is refused.",
        "FMT-2",
        Patch(*BIND, all_layers_listed),
    ),
    fault(
        "all-substituted-accepted",
        "A layer without a retained expert is accepted.",
        "FMT-17",
        Patch("mone_ref.declaration", "check_retained", any_number_substituted),
    ),
    fault(
        "fewer-than-top-k-refused",
        "A layer that retains fewer experts than top-k is refused.",
        "FMT-18",
        Patch(*BIND, top_k_retained),
    ),
    # -- which form, and where
    fault(
        "explicit-form-wins",
        "Of two forms the approx form goes unread.",
        "FMT-13",
        Patch(*ONE_FORM, one_form_unchecked),
    ),
    fault(
        "approx-form-wins",
        "Of two forms the explicit form goes unread.",
        "FMT-13",
        Patch(*ONE_FORM, one_form_unchecked),
        Patch(*BIND, list_first),
    ),
    fault(
        "empty-form-is-absent",
        "A form that substitutes nothing counts as absent beside the other.",
        "FMT-30",
        Patch(*ONE_FORM, empty_form_absent),
    ),
    fault(
        "null-form-is-present",
        "A list that is null counts as present beside the explicit form.",
        "FMT-19",
        Patch(*ONE_FORM, null_form_present),
    ),
    fault(
        "empty-explicit-form-refused",
        "An explicit form that substitutes nothing is refused.",
        "FMT-19",
        Patch(*ONE_FORM, empty_explicit_refused),
    ),
    fault(
        "misplaced-form-unread",
        "An explicit form in another place is not read, and experts without weights are not"
        " filled.",
        "FMT-16",
        Patch("mone_ref.dialects", "check_misplaced", misplaced_unchecked),
        *LEFT_UNFILLED,
    ),
    fault(
        "mone-block-unread",
        "A mone block is taken for a model without substitution.",
        "FMT-26",
        Patch("mone_ref.dialects", "check_mone_block", other_dialect_unchecked),
    ),
    fault(
        "init-tokens-unread",
        "Token counts that make constants evolve are not read.",
        "FMT-26",
        Patch(*INIT_TOKENS, init_tokens_unread),
    ),
    fault(
        "init-tokens-refused",
        "Token counts are refused, zeros too.",
        "FMT-26",
        Patch(*INIT_TOKENS, no_init_tokens),
    ),
    fault(
        "unknown-keys-refused",
        "Keys that the format does not define are refused.",
        "FMT-23",
        Patch("mone_ref.dialects", "warn_near_misses", no_like_keys),
        Patch("mone_ref.explicit", "warn_unknown", no_unknown_keys),
    ),
    fault(
        "last-json-key-wins",
        "Of equal keys in config.json the last one counts.",
        "FMT-22",
        Patch("mone_ref.strict_json", "repeated_keys", repeated_unseen),
    ),
    # -- the explicit form
    fault(
        "explicit-form-unread",
        "The explicit form is not read, and experts without weights are not filled.",
        "FMT-6",
        Patch("mone_ref.explicit", "read", explicit_unread),
        *LEFT_UNFILLED,
    ),
    fault(
        "version-unread",
        "The version of the explicit form is not read.",
        "FMT-7",
        Patch(*FIXED, unread(Code.VERSION)),
    ),
    fault(
        "version-by-equality",
        "The version is compared with Python's ==, by which true and 1.0 are 1.",
        "FMT-20",
        Patch(*FIXED, fixed_by_equality),
    ),
    fault(
        "version-from-text",
        'The version is compared as text: "1" is 1.',
        "FMT-20",
        Patch(*FIXED, version_from_text),
    ),
    fault(
        "semantics-unread",
        "router_semantics is not read, a renormalisation that it demands included.",
        "FMT-8",
        Patch(*SEMANTICS, semantics_unread),
    ),
    fault(
        "semantics-by-equality",
        "router_semantics is compared with Python's ==, by which 0 is false.",
        "FMT-20",
        Patch(*SEMANTICS, semantics_by_equality),
    ),
    fault(
        "known-semantics-only",
        "Of router_semantics only the known keys are read, and one that is missing is right.",
        "FMT-8",
        Patch(*SEMANTICS, known_semantics_only),
    ),
    fault(
        "layout-unread",
        "weight_layout is not read.",
        "FMT-9",
        Patch(*FIXED, unread(Code.WEIGHT_LAYOUT)),
    ),
    fault(
        "format-unread",
        "The format of a replacement is not read.",
        "FMT-10",
        Patch(*FIXED, unread(Code.REPLACEMENT_FORMAT)),
    ),
    fault(
        "count-unread",
        "num_logical_experts is not read.",
        "FMT-24",
        Patch("mone_ref.explicit", "check_count", count_unread),
    ),
    fault(
        "target-by-first-integer",
        "The layer of a target is the first integer in its path, whatever else the path says.",
        "FMT-11",
        Patch(*INDEX, first_integer),
        TARGET_TEXT,
    ),
    fault(
        "target-by-last-integer",
        "The layer of a target is the last integer in its path, whatever else the path says.",
        "FMT-11",
        Patch(*INDEX, last_integer),
        TARGET_TEXT,
    ),
    fault(
        "target-index-through-int",
        "The layer index of a target passes through int(): 01 is 1.",
        "FMT-21",
        Patch(*INDEX, converted_index),
    ),
    fault(
        "target-text-unread",
        "A target binds by its layer index; the rest of its path is not read.",
        "FMT-25",
        TARGET_TEXT,
    ),
    fault(
        "target-as-stored-only",
        "A target whose path is cut or extended at the front is refused.",
        "FMT-25",
        Patch("mone_ref.explicit", "names_experts", stored_path_only),
    ),
    fault(
        "later-target-wins",
        "Of two targets for one layer the later one counts.",
        "FMT-21",
        Patch("mone_ref.explicit", "check_unclaimed", layer_claimed_again),
    ),
    fault(
        "replacement-keys-through-int",
        'Ids of replacements pass through int(): "02" is 2.',
        "FMT-21",
        Patch("mone_ref.explicit", "expert_key", converted_expert),
    ),
    fault(
        "declared-names-unread",
        "The explicit form's constants are looked for under the names of the approx form.",
        "FMT-6",
        Patch(*BIND, derived_names),
    ),
    fault(
        "declared-names-rewritten",
        "Names of constants are rewritten as those of joined projections are, and found no more.",
        "FMT-14",
        Patch(*BIND, renamed_constants),
    ),
    fault(
        "shared-constant-refused",
        "A constant with more than one owner is refused.",
        "FMT-29",
        Patch(*BIND, one_owner),
    ),
)
