"""The explicit form: what is read, what is refused, where, and under which clause."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mone_ref import config
from mone_ref.errors import Code, Phase, Rejected, Severity

# Three layers of four experts.
BASE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
PLACE = "$.compression_config.transform_config.expert_substitution"
FIRST, SECOND = "model.layers.0.mlp.experts", "model.layers.2.mlp.experts"
Path = tuple[str, ...]


def replacement(name: Any) -> dict[str, Any]:
    return {"format": "constant-v1", "tensors": {"value": name}}


def target(**names: Any) -> dict[str, Any]:
    """``target(_1="a")``: expert 1 is replaced by the tensor a."""
    return {
        "num_logical_experts": 4,
        "weight_layout": "compact_retained_experts",
        "replacements": {key[1:]: replacement(name) for key, name in names.items()},
    }


def block() -> dict[str, Any]:
    return {
        "version": 1,
        "router_semantics": {
            "preserve_logical_expert_ids": True,
            "preserve_router_weights": True,
            "renormalize_after_substitution": False,
        },
        "targets": {SECOND: target(_3="shared", _0="novices.2.0"), FIRST: target(_1="shared")},
    }


def cfg(declared: Any, **changes: Any) -> bytes:
    compression = {"transform_config": {"expert_substitution": declared}}
    return json.dumps({**BASE, "compression_config": compression, **changes}).encode()


def changed(path: Path, value: Any) -> dict[str, Any]:
    """The block with one member replaced or added."""
    edited = block()
    holder(edited, path)[path[-1]] = value
    return edited


def without(path: Path) -> dict[str, Any]:
    edited = block()
    del holder(edited, path)[path[-1]]
    return edited


def holder(node: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in path[:-1]:
        node = node[key]
    return node


def named(declared: Any, **changes: Any) -> dict[int, dict[int, str]]:
    layers = config.parse(cfg(declared, **changes)).substitution.layers
    return {layer: dict(entry.constants) for layer, entry in layers.items()}


def errors(declared: Any, **changes: Any) -> list[tuple[Code, str, str]]:
    with pytest.raises(Rejected) as caught:
        config.parse(cfg(declared, **changes))
    assert {problem.phase for problem in caught.value.problems} == {Phase.PARSE}
    return [(p.code, p.where, p.clause) for p in caught.value.problems]


def findings(declared: Any, **changes: Any) -> list[tuple[Severity, Code, str, str]]:
    read = config.parse(cfg(declared, **changes))
    return [(p.severity, p.code, p.where, p.clause) for p in read.findings]


def where(*path: str) -> str:
    """JSON path below the block: names as ``.x``, all else in brackets."""
    return PLACE + "".join(f".{key}" if key.isidentifier() else f'["{key}"]' for key in path)


# -- what is read


def test_names_are_those_declared_and_may_be_shared() -> None:
    read = config.parse(cfg(block()))
    assert read.findings == ()
    assert read.substitution.form == "explicit"
    assert list(read.substitution.layers) == [0, 2]
    entry = read.substitution.layers[2]
    assert (entry.layer, entry.num_logical, entry.listed) == (2, 4, (3, 0))
    assert (entry.substituted, entry.retained) == ((0, 3), (1, 2))
    assert list(entry.constants.items()) == [(0, "novices.2.0"), (3, "shared")]
    assert read.substitution.layers[0].constants == {1: "shared"}


@pytest.mark.parametrize("declared", [None, changed(("targets",), {})], ids=["null", "targets"])
def test_nothing_declared(declared: Any) -> None:
    read = config.parse(cfg(declared))
    assert (read.substitution, read.findings) == (config.Substitution("none", {}), ())


def test_a_target_without_replacements_is_not_substituted() -> None:
    assert named(changed(("targets", FIRST, "replacements"), {})).keys() == {2}


def test_siblings_of_the_declaration_are_not_ours() -> None:
    compression = {
        "producer": {"name": "x"},
        "quant_method": "",
        "config_groups": {},
        "transform_config": {"expert_substitution": block(), "rotation": {"apply": []}},
    }
    read = config.parse(cfg(None, compression_config=compression))
    assert (list(read.substitution.layers), read.findings) == ([0, 2], ())


@pytest.mark.parametrize(
    "path",
    [
        "layers.1.mlp.experts",
        "language_model.model.layers.1.mlp.experts",
        "model.language_model.layers.1.mlp.experts",
        "language_model.layers.1.mlp.experts",
    ],
)
def test_another_spelling_of_a_path_is_understood_and_noted(path: str) -> None:
    declared = changed(("targets",), {path: target(_2="v")})
    assert named(declared) == {1: {2: "v"}}
    assert findings(declared) == [
        (Severity.NOTE, Code.TARGET_PATH, where("targets", path), "FMT-14")
    ]


@pytest.mark.parametrize(
    "path",
    [
        ("note",),
        ("targets", FIRST, "note"),
        ("targets", FIRST, "replacements", "1", "note"),
        ("targets", FIRST, "replacements", "1", "tensors", "bias"),
    ],
)
def test_unknown_keys_are_warned_about(path: Path) -> None:
    declared = changed(path, "x")
    assert named(declared) == named(block())
    assert findings(declared) == [(Severity.WARNING, Code.UNKNOWN_KEY, where(*path), "FMT-23")]


@pytest.mark.parametrize("key", ["expert_substitutions", "expertSubstitution"])
def test_a_near_miss_of_the_block_itself_is_warned_about(key: str) -> None:
    compression = {"transform_config": {key: block()}}
    place = f"$.compression_config.transform_config.{key}"
    assert findings(None, compression_config=compression) == [
        (Severity.WARNING, Code.UNKNOWN_KEY, place, "FMT-23")
    ]


def test_init_tokens_count_the_replacements() -> None:
    zeros = {"0": [0], "2": [0, 0]}
    assert findings(block(), approximate_expert_init_tokens=zeros)[0][:2] == (
        Severity.NOTE,
        Code.DIALECT,
    )
    assert errors(block(), approximate_expert_init_tokens={"0": [0]}) == [
        (Code.DIALECT, '$.approximate_expert_init_tokens["2"]', "FMT-26")
    ]


# -- what is refused

SEMANTICS = block()["router_semantics"]
ONE = ("targets", FIRST, "replacements", "1")
LEAF = (*ONE, "tensors", "value")
NOT_OBJECTS = (None, [], "x", 1, True)

BAD_MEMBERS: list[tuple[Path, Any, Code, str]] = [
    *((("version",), value, Code.VERSION, "FMT-7")
      for value in (2, 0, 1.5, "one", False, [1], {})),
    *((("version",), value, Code.VERSION, "FMT-20") for value in (True, 1.0, "1", None)),
    *((("router_semantics",), value, Code.ROUTER_SEMANTICS, "FMT-8")
      for value in (
          None, {}, [], True,
          {key: value for key, value in SEMANTICS.items() if key != "preserve_router_weights"},
          {**SEMANTICS, "renormalize_after_substitution": True},
          {**SEMANTICS, "preserve_router_weights": "true"},
          {**SEMANTICS, "preserve_router_weights": None},
          {**SEMANTICS, "temperature": None},
      )),
    *((("router_semantics",), {**SEMANTICS, key: value}, Code.ROUTER_SEMANTICS, "FMT-20")
      for key, value in (
          ("renormalize_after_substitution", 0),
          ("preserve_router_weights", 1),
          ("preserve_router_weights", 1.0),
      )),
    *((("targets",), value, Code.EXPLICIT_FORM, "FMT-20") for value in NOT_OBJECTS),
    *((("targets", FIRST), value, Code.EXPLICIT_FORM, "FMT-20") for value in NOT_OBJECTS),
    *((("targets", FIRST, "num_logical_experts"), value, Code.EXPERT_COUNT, "FMT-24")
      for value in (3, 5, 0, 4.0, "4", True, None)),
    *((("targets", FIRST, "weight_layout"), value, Code.WEIGHT_LAYOUT, "FMT-9")
      for value in ("dense", "Compact_retained_experts", "", [], True)),
    (("targets", FIRST, "weight_layout"), None, Code.WEIGHT_LAYOUT, "FMT-20"),
    *((("targets", FIRST, "replacements"), value, Code.EXPLICIT_FORM, "FMT-20")
      for value in NOT_OBJECTS),
    *((ONE, value, Code.EXPLICIT_FORM, "FMT-20") for value in NOT_OBJECTS),
    *(((*ONE, "format"), value, Code.REPLACEMENT_FORMAT, "FMT-10")
      for value in ("linear-v1", "constant-v2", "constant", "", 1)),
    ((*ONE, "format"), None, Code.REPLACEMENT_FORMAT, "FMT-20"),
    *(((*ONE, "tensors"), value, Code.EXPLICIT_FORM, "FMT-20") for value in NOT_OBJECTS),
    *((LEAF, value, Code.CONSTANT_NAME, "FMT-20") for value in (None, "", 5, True, ["a"], {})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "code", "clause"), BAD_MEMBERS, ids=lambda value: str(value)[-60:]
)
def test_a_wrong_member_is_refused_where_it_stands(
    path: Path, value: Any, code: Code, clause: str
) -> None:
    assert errors(changed(path, value)) == [(code, where(*path), clause)]


NULLS = [(path, code, clause) for path, value, code, clause in BAD_MEMBERS if value is None]
REQUIRED = [row for row in NULLS if row[0] not in (("targets", FIRST), ONE)]


@pytest.mark.parametrize(("path", "code", "clause"), REQUIRED, ids=str)
def test_a_missing_member_is_refused_as_one_that_is_null(
    path: Path, code: Code, clause: str
) -> None:
    assert errors(without(path)) == [(code, where(*path), clause)]


@pytest.mark.parametrize("value", [[], "x", 1, True])
def test_a_block_that_is_no_object_is_refused(value: Any) -> None:
    assert errors(value) == [(Code.EXPLICIT_FORM, PLACE, "FMT-20")]


BAD_PATHS: list[tuple[str, Code, str]] = [
    # No layer index, or several.
    *((path, Code.TARGET_PATH, "FMT-11")
      for path in ("mlp.experts", "", "model.layers.mlp.experts", "model.layers0.mlp.experts",
                   "model.layers.1.mtp.0.mlp.experts", "model.layers.-1.mtp.0.mlp.experts",
                   "model.layers.1.mlp.experts.3", "model.layers.\u0661.mlp.experts",
                   "model.layers.\u00b2.mlp.experts", "model.layers. 1.mlp.experts")),
    *((path, Code.TARGET_PATH, "FMT-21")
      for path in ("model.layers.01.mlp.experts", "model.layers.00.mlp.experts",
                   "model.layers.-1.mlp.experts", "model.layers.+1.mlp.experts")),
    # Another leaf, another stack.
    *((path, Code.TARGET_UNBOUND, "FMT-25")
      for path in ("model.layers.1.typo", "foo.1", "1", "1.mlp.experts", "model.1.mlp.experts",
                   "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.expert",
                   "model.layers.1.mlp.experts.w13", "model.layers.1.block_sparse_moe.experts",
                   "mtp.layers.0.mlp.experts", "model.mtp.layers.0.mlp.experts",
                   "visual.layers.1.mlp.experts", "visual.model.layers.1.mlp.experts",
                   "model.visual.layers.1.mlp.experts", "model.layers.layers.1.mlp.experts",
                   "model.Layers.1.mlp.experts", "model.layers.1.mlp.experts.", ".1.mlp.experts")),
    *((f"model.layers.{layer}.mlp.experts", Code.LAYER_NOT_MOE, "FMT-25")
      for layer in ("3", "1000000000")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "code", "clause"), BAD_PATHS)
def test_a_path_that_names_no_experts_is_refused(path: str, code: Code, clause: str) -> None:
    ((found, place, cited),) = errors(changed(("targets",), {path: target(_2="v")}))
    assert (found, cited) == (code, clause)
    assert place.startswith(f"{PLACE}.targets")


def test_a_very_long_index_is_no_layer() -> None:
    path = f"model.layers.{'9' * 5000}.mlp.experts"
    ((code, _, clause),) = errors(changed(("targets",), {path: target(_2="v")}))
    assert (code, clause) == (Code.LAYER_NOT_MOE, "FMT-25")


@pytest.mark.parametrize("replacements", [{}, {"2": replacement("v")}])
def test_two_targets_of_one_layer_are_refused(replacements: Any) -> None:
    again = "layers.0.mlp.experts"
    declared = changed(("targets", again), {**target(), "replacements": replacements})
    assert errors(declared) == [(Code.TARGET_REPEATED, where("targets", again), "FMT-21")]


@pytest.mark.parametrize(
    ("key", "code", "clause"),
    [
        *((key, Code.ID_KEY, "FMT-21")
          for key in ("01", " 1", "+1", "-1", "1.0", "1.5", "", "x", "\u0661", "true")),
        *((key, Code.ID_RANGE, "FMT-20") for key in ("4", "1000000000", "9" * 5000)),
    ],
)  # fmt: skip
def test_a_key_that_is_no_expert_is_refused(key: str, code: Code, clause: str) -> None:
    declared = changed(("targets", FIRST, "replacements"), {key: replacement("v")})
    ((found, place, cited),) = errors(declared)
    assert (found, cited) == (code, clause)
    assert place.startswith(where("targets", FIRST, "replacements"))


def test_a_layer_retains_an_expert() -> None:
    declared = changed(("targets", FIRST), target(_0="a", _1="b", _2="c", _3="d"))
    place = where("targets", FIRST, "replacements")
    assert errors(declared) == [(Code.ALL_SUBSTITUTED, place, "FMT-17")]


def test_a_repeated_replacement_is_refused() -> None:
    """JSON readers keep the last of two equal keys, and so would lose a constant (FMT-22)."""
    text = cfg(block()).decode()
    twice = text.replace('"version": 1', '"version": 1, "version": 1').encode()
    with pytest.raises(Rejected) as caught:
        config.parse(twice)
    assert [(p.code, p.where) for p in caught.value.problems] == [
        (Code.JSON_DUPLICATE_KEY, where("version"))
    ]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "$.quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
         "$.text_config.quantization_config"),
        ({"compression_config": {
            "quant_method": "compressed-tensors",
            "transform_config": {"expert_substitution": block()},
        }}, "$.compression_config.quant_method"),
    ],
)  # fmt: skip
def test_compressed_tensors_beside_the_explicit_form(changes: dict[str, Any], place: str) -> None:
    assert errors(block(), **changes) == [(Code.MODEL_FEATURE, place, "FMT-12")]


def test_another_quantisation_is_refused_for_itself() -> None:
    fp8 = {"quant_method": "fp8"}
    place = "$.quantization_config"
    assert errors(block(), quantization_config=fp8) == [(Code.MODEL_FEATURE, place, "CAP-8")]
    compressed = {"quant_method": "compressed-tensors"}
    assert errors(None, quantization_config=compressed) == [(Code.MODEL_FEATURE, place, "CAP-8")]


def test_every_error_at_once() -> None:
    declared = changed(("version",), 2)
    declared["router_semantics"] = {}
    declared["targets"]["mlp.experts"] = target(_9="v")
    declared["targets"][FIRST] = {**target(_x="", _2="v"), "weight_layout": "dense"}
    assert errors(declared, vocab_size=0) == [
        (Code.MODEL_FIELD, "$.vocab_size", ""),
        (Code.VERSION, where("version"), "FMT-7"),
        (Code.ROUTER_SEMANTICS, where("router_semantics"), "FMT-8"),
        (Code.WEIGHT_LAYOUT, where("targets", FIRST, "weight_layout"), "FMT-9"),
        (Code.CONSTANT_NAME, where("targets", FIRST, "replacements", "x", "tensors", "value"),
         "FMT-20"),
        (Code.ID_KEY, where("targets", FIRST, "replacements", "x"), "FMT-21"),
        (Code.ID_RANGE, where("targets", "mlp.experts", "replacements", "9"), "FMT-20"),
        (Code.TARGET_PATH, where("targets", "mlp.experts"), "FMT-11"),
    ]  # fmt: skip


def test_a_declaration_of_an_unknown_family_is_still_read() -> None:
    """Without sizes and names, what needs none is checked."""
    declared = changed(("targets",), {"x.7.y": target(_9="v", _x="v"), "x.y": target()})
    assert [code for code, _, _ in errors(declared, architectures=["Other"])] == [
        Code.UNKNOWN_FAMILY,
        Code.ID_KEY,
        Code.TARGET_PATH,
    ]


# -- arbitrary input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


def members(node: Any, path: Path = ()) -> Iterator[Path]:
    """Every member of every object below the block."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield (*path, key)
        yield from members(value, (*path, key))


def accepted_or_rejected(declared: Any) -> None:
    """Only ``Rejected``, with a message that can be printed; what is accepted is in range."""
    try:
        read = config.parse(cfg(declared))
    except Rejected as error:
        rejected = error
    else:
        check_range(read.substitution)
        return
    assert all(p.where.startswith("$.compression_config") for p in rejected.problems)
    message = str(rejected).replace("\n", "")
    assert message.isascii()
    assert message.isprintable()


def check_range(substitution: config.Substitution) -> None:
    for layer, entry in substitution.layers.items():
        assert 0 <= layer < 3
        assert entry.listed
        assert entry.retained
        assert {*entry.listed, *entry.retained} == {0, 1, 2, 3}
        assert entry.constants.keys() == set(entry.listed)
        assert all(isinstance(name, str) and name for name in entry.constants.values())


@given(JSON)
def test_an_arbitrary_block(declared: Any) -> None:
    accepted_or_rejected(declared)


@settings(max_examples=400)
@given(st.sampled_from(sorted(members(block()))), JSON)
def test_arbitrary_json_in_every_member(path: Path, value: Any) -> None:
    accepted_or_rejected(changed(path, value))


@settings(max_examples=200)
@given(st.sampled_from(sorted(members(block()))), st.text(max_size=40))
def test_an_arbitrary_name_for_every_member(path: Path, name: str) -> None:
    edited = copy.deepcopy(block())
    node = holder(edited, path)
    node[name] = node.pop(path[-1])
    accepted_or_rejected(edited)


PATH_PARTS = st.sampled_from(
    ["model", "language_model", "layers", "mlp", "experts", "0", "1", "01", "mtp", "", "²", "x"]
)


@settings(max_examples=400)
@given(st.lists(PATH_PARTS, max_size=8).map(".".join))
def test_a_path_binds_only_to_the_layer_it_names(path: str) -> None:
    declared = changed(("targets",), {path: target(_2="v")})
    try:
        bound = named(declared)
    except Rejected:
        return
    (layer,) = bound
    head, _, tail = path.partition(f"layers.{layer}.")
    assert tail == "mlp.experts"
    assert set(head.split(".")) <= {"", "model", "language_model"}
    assert head == "" or head.endswith(".")


@given(
    st.dictionaries(
        st.integers(0, 2),
        st.dictionaries(st.integers(0, 3), st.text(min_size=1), min_size=1, max_size=3),
    )
)
def test_every_sound_declaration_is_read_as_written(sound: dict[int, dict[int, str]]) -> None:
    targets = {
        f"model.layers.{layer}.mlp.experts": target(**{f"_{j}": name for j, name in names.items()})
        for layer, names in sound.items()
    }
    assert named(changed(("targets",), targets)) == sound
