"""Whatever names and shapes a header holds, inspect and a dry run answer with problems."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import handmade
from hypothesis import given, settings
from hypothesis import strategies as st

from mone_ref.rewrite import make
from mone_ref.rewrite.inspection import inspect
from mone_ref.rewrite.plan import Kind, LayerPlan, Plan

STACK = st.sampled_from(["model.layers", "mtp.layers", "layers", "", "model.layers.0.extra"])
LAYER = st.sampled_from(["0", "1", "2", "00", "x"])
BLOCK = st.sampled_from(["mlp", "block_sparse_moe", "", "mlp.experts"])
EXPERT = st.sampled_from(["0", "1", "2", "01", "999999999", "-1", ""])
PART = st.sampled_from(
    ["gate_proj.weight", "up_proj", "w2.weight_scale", "approx_value", "odd", "gate_up_proj_blocks"]
)
INNER = st.one_of(
    st.tuples(st.just("experts"), EXPERT, PART).map(".".join),
    st.tuples(st.just("experts"), PART).map(".".join),
    st.sampled_from(["gate.weight", "gate.bias", "router.weight", "shared_experts.up_proj.weight"]),
    st.sampled_from(["expert_bias", "input_linear.weight", "norm.weight"]),
)
NAMES = st.tuples(STACK, LAYER, BLOCK, INNER).map(lambda words: ".".join(filter(None, words)))
# With a size of zero somewhere a tensor takes no bytes, however large the others are.
SHAPES = st.lists(st.sampled_from([1, 2, 3, 2**40]), max_size=2).map(lambda sizes: [*sizes, 0])
NUMBERS = st.one_of(
    st.none(), st.integers(-1, 10**12), st.booleans(), st.lists(st.integers(0, 4), max_size=2)
)
CONFIGS = st.dictionaries(
    st.sampled_from(["num_experts", "num_experts_per_tok", "num_hidden_layers", "hidden_size"])
    | st.sampled_from(["n_group", "topk_group", "approximate_experts", "model_type"]),
    NUMBERS | st.just({"0": [0]}),
)


@settings(max_examples=150)
@given(st.dictionaries(NAMES, SHAPES, max_size=8), CONFIGS, st.sampled_from(Kind))
def test_no_header_and_no_config_raises(
    shapes: dict[str, list[int]], config: dict[str, Any], kind: Kind
) -> None:
    stored = {name: ("BF16", shape, b"") for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as scratch:
        directory = handmade.write(
            Path(scratch),
            {"config.json": config, "model.safetensors": handmade.safetensors(stored)},
        )
        found = inspect(directory)
        assert found.tensors == len(stored)
        assert found.size == 0
        made = make.blueprint(directory, Plan(kind, {"0": LayerPlan((0,)), "1": LayerPlan((1,))}))
        assert made.blueprint is not None or made.problems
