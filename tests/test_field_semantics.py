"""Faults of routing and substitution met in the field, in numbers that one can check by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decimals import right
from torch import Tensor

from mone_ref import moe, routing, substitution
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.families import RouterRule
from mone_ref.moe import MoeLayer, SharedExperts
from mone_ref.precision import plain

SOFTMAX = RouterRule("softmax", normalise=False)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_mlp(gate: float, up: float, down: float) -> ExpertWeights:
    """One row with hidden size 2 and one column inside; it sees the first element only."""
    return ExpertWeights(tensor([[[gate, 0]]]), tensor([[[up, 0]]]), tensor([[[down], [down]]]))


def answer(shared: SharedExperts | None) -> list[float]:
    """Four experts, all logits zero: 0 and 1 are chosen, at a quarter each.

    Both are substituted. Rows 0 and 1 hold experts 2 and 3, which would answer in the millions.
    """
    loud = one_mlp(1e3, 1e3, 1e3)
    layer = MoeLayer(
        router=torch.zeros(4, 2, dtype=torch.float64),
        experts=ExpertWeights(
            *(part.expand(2, -1, -1) for part in (loud.gate, loud.up, loud.down))
        ),
        constants=tensor([[4, -8], [8, 2]]),
        substitution=LayerSubstitution(0, 4, (0, 1), {0: "a", 1: "b"}),
        rule=SOFTMAX,
        top_k=2,
        shared=shared,
    )
    x = tensor([[1, 5]])
    y = moe.forward(x, layer, plain(torch.float64), lambda name, value: None)
    return y[0].tolist()


def test_b12_a_token_without_a_retained_route_gets_constants_alone() -> None:
    """(4, -8) / 4 + (8, 2) / 4, exactly: row 0 does not leak."""
    assert answer(None) == [3, -1.5]


def test_b20_and_its_shared_expert_once_and_unweighted() -> None:
    """silu(4) = 4 / (1 + exp(-4)) = 3.928055 on top of both elements."""
    shared = SharedExperts(one_mlp(4, 1, 1), gate=None)
    assert right(["6.928055", "2.428055"], answer(shared))


def test_b15_every_vector_is_paid_by_its_route() -> None:
    """Two routes of a quarter to 4 and 8 give 3, not 12."""
    weights, ids = tensor([[0.25, 0.25]]), torch.tensor([[2, 0]])
    total = substitution.constant_sum(weights, ids, tensor([[4], [8]]), (0, 2))
    assert total.tolist() == [[3]]


@pytest.mark.parametrize("hidden", [1, 7, 16, 255, 257, 300])
def test_b17_every_element_of_a_constant_arrives(hidden: int) -> None:
    weights, ids = tensor([[1.0]]), torch.tensor([[0]])
    ones = torch.ones(1, hidden, dtype=torch.float64)
    assert substitution.constant_sum(weights, ids, ones, (0,)).tolist() == [[1.0] * hidden]


def test_b19_a_masked_row_wins_the_routing() -> None:
    """A row of -1e9 meant as a mask is a logit of +1e9 where the hidden state sums to -1."""
    router = torch.ones(6, 4, dtype=torch.float64)
    router[3] = -1e9
    x = tensor([[-0.25] * 4, [0.25] * 4])
    weights, ids = routing.route(x @ router.T, SOFTMAX, 1, torch.float64)
    assert ids.tolist() == [[3], [0]]
    assert weights[0].tolist() == [1.0]
