"""Routing: what SPEC says of weights and ids, for any logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mone_ref import routing
from mone_ref.families import RouterRule

PLAIN = RouterRule(scoring="softmax", normalise=False)
NORMALISED = RouterRule(scoring="softmax", normalise=True)

logits = st.integers(1, 12).flatmap(
    lambda experts: st.tuples(
        st.lists(
            st.lists(st.floats(-30, 30, width=32), min_size=experts, max_size=experts),
            min_size=1,
            max_size=5,
        ).map(lambda rows: torch.tensor(rows, dtype=torch.float64)),
        st.integers(1, experts),
    )
)


@given(logits)
def test_routes_are_the_best_k_distinct_experts_in_falling_order(case):
    scores, top_k = case
    weights, ids = routing.route(scores, PLAIN, top_k, torch.float64)
    for row, chosen, paid in zip(scores.tolist(), ids.tolist(), weights.tolist(), strict=True):
        # Python's own sort is stable: equal scores keep the lower id first. Equality is judged
        # on the softmax scores, since distinct logits may round to one score.
        probabilities = torch.softmax(torch.tensor(row, dtype=torch.float64), 0).tolist()
        expected = sorted(range(len(row)), key=lambda j: -probabilities[j])[:top_k]
        assert chosen == expected
        assert paid == [probabilities[j] for j in expected]


@given(logits)
def test_plain_weights_keep_the_full_softmax_and_normalised_ones_sum_to_one(case):
    scores, top_k = case
    plain, ids = routing.route(scores, PLAIN, top_k, torch.float64)
    normalised, same_ids = routing.route(scores, NORMALISED, top_k, torch.float64)
    assert torch.equal(ids, same_ids)
    assert (plain.sum(-1) <= 1 + len(scores[0]) * torch.finfo(torch.float64).eps).all()
    rounding = top_k * torch.finfo(torch.float64).eps
    assert ((normalised.sum(-1) - 1).abs() <= rounding).all()
    assert ((normalised * plain.sum(-1, keepdim=True) - plain).abs() <= rounding).all()


def test_ties_go_to_the_lower_id_every_time():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    for _ in range(20):
        assert routing.route(scores, PLAIN, 2, torch.float32)[1].tolist() == [[1, 2]]


def test_a_nan_row_stays_distinct_and_alone():
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 1.0], [2.0, 1.0, 0.0]])
    weights, ids = routing.route(scores, PLAIN, 2, torch.float32)
    clean, clean_ids = routing.route(scores[[0, 2]], PLAIN, 2, torch.float32)
    assert torch.equal(weights[[0, 2]], clean)
    assert torch.equal(ids[[0, 2]], clean_ids)
    assert weights[1].isnan().all()
    assert len(set(ids[1].tolist())) == 2


def test_selection_runs_in_the_score_dtype_that_is_asked_for():
    # .2510 and .2515 are one bfloat16 number; only a wider softmax can tell them apart.
    scores = torch.tensor([[0.2510, 0.2515, 0.2490, 0.2485]]).log()
    assert routing.route(scores, PLAIN, 1, torch.float32)[1].tolist() == [[1]]
    assert routing.route(scores, PLAIN, 1, torch.bfloat16)[1].tolist() == [[0]]


def test_an_unknown_rule_is_refused():
    rule = RouterRule(scoring="cosine", normalise=False)
    with pytest.raises(ValueError, match="cosine"):
        routing.route(torch.zeros(1, 2), rule, 1, torch.float32)
