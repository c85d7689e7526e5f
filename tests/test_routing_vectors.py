"""Every router rule worked by hand: tests/data/routing_vectors.json against both oracles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import scalar_oracle
import torch
from decimals import right

from mone_ref import moe, routing
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.families import Groups, RouterRule
from mone_ref.moe import MoeLayer, SharedExperts
from mone_ref.precision import plain

DATA = json.loads((Path(__file__).parent / "data" / "routing_vectors.json").read_text())
BY_NAME = {vector["name"]: vector for vector in DATA["vectors"]}
FACTOR = DATA["factor_on_constants"]

each_vector = pytest.mark.parametrize("name", BY_NAME)


def logits_of(vector: dict[str, Any]) -> list[float]:
    return vector.get("logits") or [math.log(odds) for odds in vector["odds"]]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@each_vector
def test_routing(name: str):
    vector = BY_NAME[name]
    groups = Groups(*vector["groups"]) if "groups" in vector else None
    rule = RouterRule(
        vector.get("scoring", "softmax"),
        vector.get("normalise", False),
        vector.get("factor", 1.0),
        groups,
    )
    bias = tensor(vector["bias"]) if "bias" in vector else None
    weights, ids = routing.route(
        tensor([logits_of(vector)]), rule, vector["top_k"], torch.float64, bias
    )
    assert right(vector["ids"], ids[0].tolist())
    assert right(vector["weights"], weights[0].tolist())


@each_vector
def test_scalar_routing(name: str):
    vector = BY_NAME[name]
    groups = scalar_oracle.Groups(*vector["groups"]) if "groups" in vector else None
    routes = scalar_oracle.route(
        logits_of(vector),
        vector["top_k"],
        vector.get("normalise", False),
        vector.get("factor", 1.0),
        vector.get("scoring", "softmax"),
        vector.get("bias"),
        groups,
    )
    assert right(vector["ids"], [i for i, _ in routes])
    assert right(vector["weights"], [w for _, w in routes])


# One layer: the factor


def mlp(gate: Any, up: Any, down: Any) -> ExpertWeights:
    return ExpertWeights(tensor([gate]), tensor([up]), tensor([down]))


def layer(normalise: bool, shared: SharedExperts | None = None) -> MoeLayer:
    return MoeLayer(
        router=tensor([[0, 0], [0, 0]]),
        experts=mlp([[0, 0]], [[0, 0]], [[0], [0]]),
        constants=tensor([FACTOR["constant"]]),
        substitution=LayerSubstitution(0, 2, (0,), {0: "constant"}),
        rule=RouterRule("softmax", normalise, FACTOR["factor"]),
        top_k=2,
        shared=shared,
    )


def answer(moe_layer: MoeLayer) -> list[float]:
    x = tensor([[1, 0]])
    return moe.forward(x, moe_layer, plain(torch.float64), lambda name, value: None)[0].tolist()


@pytest.mark.parametrize("normalise", [False, True])
def test_the_factor_reaches_constants_once(normalise: bool):
    assert right(FACTOR["routed"], answer(layer(normalise)))


@pytest.mark.parametrize("normalise", [False, True])
def test_the_factor_never_reaches_shared_experts(normalise: bool):
    shared = SharedExperts(mlp([[1, 0]], [[2, 0]], [[1], [-1]]), gate=None)
    assert right(FACTOR["with_shared"], answer(layer(normalise, shared)))


def test_a_gate_weighs_the_shared_expert_token_by_token():
    weights = mlp([[1, 0]], [[2, 0]], [[1], [-1]])
    shared = SharedExperts(weights, gate=tensor([[math.log(3), 5]]))
    # 3/4 of silu(1) * 2 = 1.462117
    assert right(["6.096588", "-11.096588"], answer(layer(False, shared)))
