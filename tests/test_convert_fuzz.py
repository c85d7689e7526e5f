"""Whatever a config and a header hold, a conversion is refused, or says the same experts."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import small_moe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_inspect_fuzz import CONFIGS, NAMES, SHAPES

from mone_ref.rewrite import convert, writer
from mone_ref.rewrite import declared as declarations
from mone_ref.rewrite.plan import Form

ODD = st.sampled_from(
    [None, True, -1, 0, 1.5, 10**12, "", "0", "model.layers.0.mlp.experts", [], [0], [1, 1], {}]
)


@settings(max_examples=100)
@given(
    shapes=st.dictionaries(NAMES, SHAPES, max_size=8),
    config=CONFIGS,
    listed=st.none() | ODD | st.dictionaries(st.sampled_from(["0", "1", "x"]), ODD),
    form=st.sampled_from(Form),
)
def test_no_header_and_no_list_raises(
    shapes: dict[str, list[int]], config: dict[str, Any], listed: Any, form: Form
) -> None:
    stored = {name: ("BF16", shape, b"") for name, shape in shapes.items()}
    declared = {**config, "approximate_experts": listed}
    files = {"config.json": declared, "model.safetensors": handmade.safetensors(stored)}
    with tempfile.TemporaryDirectory() as scratch:
        made = convert.blueprint(handmade.write(Path(scratch), files), form)
        assert made.blueprint is not None or made.problems


PATHS = st.lists(st.integers(0, 5), min_size=1, max_size=9)


def spoil(node: Any, path: list[int], value: Any, drops: bool) -> None:
    """Follow a path of positions into objects and arrays, and replace or drop what is there."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    if not keys:
        return
    key = keys[path[0] % len(keys)]
    if len(path) > 1 and isinstance(node[key], dict | list):
        spoil(node[key], path[1:], value, drops)
    elif drops:
        del node[key]
    else:
        node[key] = value


def unknown(form: Form) -> dict[str, Any]:
    """A sound config of a family without a row, and its tensors, in one form."""
    tensors = small_moe.per_expert()
    gone = "model.layers.0.mlp.experts.1"
    tensors = {name: one for name, one in tensors.items() if f"{gone}." not in name}
    if form is Form.APPROX:
        tensors |= small_moe.named({f"{gone}.approx_value": [small_moe.HIDDEN]})
        document = {**small_moe.config(), "approximate_experts": {"0": [1]}}
    else:
        tensors |= small_moe.named({"novice": [small_moe.HIDDEN]})
        declared = copy.deepcopy(handmade.explicit({1: "novice"}))
        target = declared["transform_config"]["expert_substitution"]["targets"]
        target["model.layers.0.mlp.experts"]["num_logical_experts"] = 6
        document = {"compression_config": declared, **small_moe.config()}
    return {"config.json": document, "model.safetensors": handmade.safetensors(tensors)}


def known(form: Form) -> dict[str, Any]:
    """The same for a family of the table."""
    document, tensors = handmade.config(), handmade.tensors()
    if form is Form.EXPLICIT:
        del document["approximate_experts"]
        named = {expert: f"novices.{expert}" for expert in (1, 3)}
        document["compression_config"] = copy.deepcopy(handmade.explicit(named))
        for expert, name in named.items():
            tensors[name] = tensors.pop(f"model.layers.0.mlp.experts.{expert}.approx_value")
    return {"config.json": document, "model.safetensors": handmade.safetensors(tensors)}


@settings(max_examples=200)
@example(
    sound=unknown, form=Form.APPROX, path=[0, 0], value=[], drops=False, spoils=True
)  # architectures
@given(
    sound=st.sampled_from([unknown, known]),
    form=st.sampled_from(Form),
    path=PATHS,
    value=ODD,
    drops=st.booleans(),
    spoils=st.booleans(),
)
def test_what_is_converted_declares_the_same_experts(
    sound: Callable[[Form], dict[str, Any]],
    form: Form,
    path: list[int],
    value: Any,
    drops: bool,
    spoils: bool,
) -> None:
    files = sound(form)
    if spoils:
        spoil(files["config.json"], path, value, drops)
    other = Form.EXPLICIT if form is Form.APPROX else Form.APPROX
    with tempfile.TemporaryDirectory() as scratch:
        source = handmade.write(Path(scratch) / "in", files)
        made = convert.blueprint(source, other)
        if made.blueprint is None:
            assert spoils
            assert made.problems
            return
        writer.write(made.blueprint, Path(scratch) / "out")
        before, _ = declarations.read(made.structure)
        back = convert.blueprint(Path(scratch) / "out", form)
        assert back.blueprint, [str(problem) for problem in back.problems]
        after, _ = declarations.read(back.structure)
        assert after.form == other
        assert {layer: list(one) for layer, one in after.constants.items()} == {
            layer: list(one) for layer, one in before.constants.items()
        }
