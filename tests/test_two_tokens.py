"""Expert substitution worked by hand: tests/data/two_tokens.json against both oracles.

Two oracles that agree may share a mistake, so these numbers come from a pocket
calculator. The first token, in full (the file holds the working of every other number):

    experts 0..3, top-2; 0 and 3 are substituted, 1 and 2 are rows 0 and 1
    router logits  ln 4, ln 2, 0, 0       scores  4/8, 2/8, 1/8, 1/8
    routes         0 at 0.5, 1 at 0.25    no renormalisation
    expert 1       silu(1) * 2 * [1, -1]             = [1.462117, -1.462117]
    y              0.5 * [4, -2] + 0.25 * expert 1   = [2.365529, -1.365529]
    rewritten      rows 0, 0 at weights 0, 0.25      (the zero-weight route runs row 0)

In the file a number is exact and a string is a decimal, right to half a unit in its
last place. Decimals are compared in float64, where roundoff is far below a printed digit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scalar_oracle
import torch
from decimals import right

from mone_ref import routing, substitution
from mone_ref.config import LayerSubstitution
from mone_ref.families import RouterRule

DATA = json.loads((Path(__file__).parent / "data" / "two_tokens.json").read_text())
BY_NAME = {vector["name"]: vector for vector in DATA["routing"]}
RULES = {"plain": False, "normalised": True}  # the value of norm_topk_prob

each_rule = pytest.mark.parametrize("rule", RULES)
each_token = pytest.mark.parametrize("token", DATA["layer"]["tokens"], ids=["first", "second"])
each_routing = pytest.mark.parametrize("name", BY_NAME)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def route(logits: list[float], top_k: int, normalise: bool, dtype: torch.dtype = torch.float64):
    """One token through ``mone_ref``: weights and ids ``[1, K]``."""
    rule = RouterRule(scoring="softmax", normalise=normalise)
    return routing.route(tensor([logits], dtype), rule, top_k, dtype)


def layer_of(num_experts: int, substituted: list[int]) -> LayerSubstitution:
    names = {expert: f"experts.{expert}.approx_value" for expert in substituted}
    return LayerSubstitution(0, num_experts, tuple(substituted), names)


# What "right" means


@pytest.mark.parametrize(
    ("expected", "actual", "answer"),
    [
        ("0.25", 0.2549, True),
        ("0.25", 0.2551, False),
        ("-1.0", -1.06, False),
        ("0.5", float("nan"), False),
        (0.25, 0.25, True),
        (0.25, 0.25000000000000006, False),
        ([1, 2], [1], False),
        ([1, "0.5"], [1, 0.7], False),
    ],
)
def test_the_comparison_is_to_half_a_unit(expected: Any, actual: Any, answer: bool):
    assert right(expected, actual) is answer


# One MoE layer


@each_rule
@each_token
def test_scalar_layer(token: dict[str, Any], rule: str):
    layer, expected = DATA["layer"], token[rule]
    config = {
        "model_type": "olmoe",
        "num_experts_per_tok": layer["top_k"],
        "norm_topk_prob": RULES[rule],
    }
    tensors, ids = layer["tensors"], layer["substituted"]

    logits = scalar_oracle.apply(tensors["mlp.gate.weight"], token["x"])
    routes = scalar_oracle.route(logits, layer["top_k"], RULES[rule])
    constants = {i: tensors[f"mlp.experts.{i}.approx_value"] for i in ids}
    path, names = f"mlp.experts.{token['retained']['id']}", scalar_oracle.ARCHITECTURES["olmoe"]
    retained = scalar_oracle.swiglu(tensors, path, names, token["x"])

    assert right(token["router_logits"], logits)
    assert right(token["ids"], [i for i, _ in routes])
    assert right(expected["weights"], [w for _, w in routes])
    assert right(token["retained"]["output"], retained)
    assert right(expected["constant"], scalar_oracle.constant_sum(routes, constants, 2))
    assert right(expected["y"], scalar_oracle.moe(config, tensors, "mlp", constants, token["x"]))


@each_rule
@each_token
def test_layer(token: dict[str, Any], rule: str):
    data, expected = DATA["layer"], token[rule]
    layer = layer_of(4, data["substituted"])
    values = tensor([data["tensors"][f"mlp.{name}"] for name in layer.constants.values()])
    logits = tensor(data["tensors"]["mlp.gate.weight"]) @ tensor(token["x"])

    weights, ids = route(logits.tolist(), data["top_k"], RULES[rule])
    constant = substitution.constant_sum(weights, ids, values, layer.substituted)
    row_weights, rows = substitution.rewrite_routes(weights, ids, layer)

    assert right(token["ids"], ids[0].tolist())
    assert right(expected["weights"], weights[0].tolist())
    assert right(expected["constant"], constant[0].tolist())
    assert right(token["rows"], rows[0].tolist())
    assert right(expected["row_weights"], row_weights[0].tolist())


# Routing


@each_routing
def test_scalar_routing(name: str):
    vector = BY_NAME[name]
    routes = scalar_oracle.route(vector["logits"], vector["top_k"], vector["normalise"])
    assert right(vector["ids"], [i for i, _ in routes])
    assert right(vector["weights"], [w for _, w in routes])


@each_routing
def test_routing(name: str):
    vector = BY_NAME[name]
    weights, ids = route(vector["logits"], vector["top_k"], vector["normalise"])
    assert right(vector["ids"], ids[0].tolist())
    assert right(vector["weights"], weights[0].tolist())


@each_routing
def test_routing_in_float32_selects_the_same_experts(name: str):
    vector = BY_NAME[name]
    _, ids = route(vector["logits"], vector["top_k"], vector["normalise"], torch.float32)
    assert right(vector["ids"], ids[0].tolist())


def test_the_near_tie_is_a_tie_in_bfloat16():
    first, second = tensor([0.2510, 0.2515], torch.bfloat16).tolist()
    assert first == second == 0.251953125


# Weights keep their value whatever is substituted


@each_rule
def test_scalar_weights_are_never_renormalised(rule: str):
    data = DATA["never_renormalised"]
    routes = scalar_oracle.route(data["logits"], data["top_k"], RULES[rule])
    constant = scalar_oracle.constant_sum(routes, {0: data["constant"]}, 1)
    retained = [w for i, w in routes if i != 0]
    check_weights(rule, constant, retained)


@each_rule
def test_weights_are_never_renormalised(rule: str):
    data = DATA["never_renormalised"]
    layer = layer_of(4, [0])
    weights, ids = route(data["logits"], data["top_k"], RULES[rule])
    constant = substitution.constant_sum(weights, ids, tensor([data["constant"]]), (0,))
    row_weights, _ = substitution.rewrite_routes(weights, ids, layer)
    check_weights(rule, constant[0].tolist(), [w for w in row_weights[0].tolist() if w != 0])


def check_weights(rule: str, constant: list[float], retained: list[float]) -> None:
    data = DATA["never_renormalised"]
    assert right([data[rule]["constant_weight"]], constant)
    assert right([data[rule]["retained_weight"]], retained)
    assert not any(right(data["pruned_weight"], weight) for weight in constant + retained)


# Route rewriting, ids outside [0, E) included


def test_scalar_constants():
    data = DATA["rewriting"]
    constants = {int(expert): value for expert, value in data["substituted"].items()}
    for token in data["tokens"]:
        routes = list(zip(token["ids"], token["weights"], strict=True))
        assert right(token["constant"], scalar_oracle.constant_sum(routes, constants, 2))


def rewrite(weights: torch.Tensor, ids: torch.Tensor):
    """The constants and rewritten routes of the six-expert layer."""
    data = DATA["rewriting"]
    layer = layer_of(data["num_experts"], [int(expert) for expert in data["substituted"]])
    values = tensor(list(data["substituted"].values()))
    constant = substitution.constant_sum(weights, ids, values, layer.substituted)
    return constant, *substitution.rewrite_routes(weights, ids, layer)


def test_route_rewriting():
    tokens = DATA["rewriting"]["tokens"]
    ids = tensor([token["ids"] for token in tokens], torch.int64)
    constant, row_weights, rows = rewrite(tensor([token["weights"] for token in tokens]), ids)

    assert rows.dtype == ids.dtype
    assert constant.tolist() == [token["constant"] for token in tokens]
    assert rows.tolist() == [token["rows"] for token in tokens]
    assert row_weights.tolist() == [token["row_weights"] for token in tokens]


def test_an_id_outside_the_layer_adds_nothing_whatever_its_weight():
    weights, ids = tensor([[float("nan"), 0.5]]), tensor([[-1, 4]], torch.int64)
    constant, row_weights, rows = rewrite(weights, ids)
    assert constant.tolist() == [[4, 0.25]]
    assert rows.tolist() == [[0, 0]]
    assert row_weights.tolist() == [[0, 0]]


def test_no_tokens():
    nothing = torch.empty(0, 2)
    constant, row_weights, rows = rewrite(nothing.double(), nothing.long())
    assert constant.shape == (0, 2)
    assert row_weights.shape == rows.shape == (0, 2)


# Nearly cancelling constants


def test_scalar_cancelling_constants():
    data = DATA["cancelling"]
    constants = {int(expert): value for expert, value in data["substituted"].items()}
    routes = list(zip(data["ids"], data["weights"], strict=True))
    assert scalar_oracle.constant_sum(routes, constants, 1) == data["constant"]


@pytest.mark.parametrize("name", DATA["cancelling"]["rounded"])
def test_cancelling_constants(name: str):
    data, dtype = DATA["cancelling"], getattr(torch, name)
    ids = tensor([data["ids"]], torch.int64)
    weights = tensor([data["weights"]], torch.float32)
    values = tensor(list(data["substituted"].values()), dtype)
    constant = substitution.constant_sum(weights, ids, values, (1, 3))

    assert constant[0].tolist() == data["constant"]
    assert constant[0].to(dtype).item() == data["rounded"][name]
    # The vector sees a weight rounded too early: both would be one half.
    assert weights.to(dtype).tolist() == [[0.5, 0.5]]
