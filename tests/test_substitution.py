"""The constant sum and the rewritten routes, against a scalar loop over routes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mone_ref import experts, substitution
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.precision import plain

HIDDEN = 3


@st.composite
def routed(draw):
    """A layer with at least one retained expert, and any routes, invalid and repeated included."""
    count = draw(st.integers(2, 8))
    listed = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count - 1))
    top_k = draw(st.integers(1, count))
    tokens = draw(st.integers(0, 4))
    ids = draw(
        st.lists(
            st.lists(st.integers(-2, count + 1), min_size=top_k, max_size=top_k),
            min_size=tokens,
            max_size=tokens,
        )
    )
    # Integers below 2**8 and quarters: every product and sum is exact in float32.
    weights = torch.tensor(
        [[draw(st.integers(0, 16)) / 4 for _ in row] for row in ids], dtype=torch.float32
    )
    values = torch.tensor(
        [[draw(st.integers(-200, 200)) for _ in range(HIDDEN)] for _ in listed],
        dtype=torch.float32,
    )
    layer = LayerSubstitution(0, count, tuple(listed), {})
    return (
        layer,
        weights.reshape(tokens, top_k),
        torch.tensor(ids, dtype=torch.int64).reshape(tokens, top_k),
        values.reshape(len(listed), HIDDEN),
    )


@given(routed())
def test_constant_sum_is_the_sum_over_substituted_routes(case):
    layer, weights, ids, values = case
    found = substitution.constant_sum(weights, ids, values, layer.substituted)
    expected = [[0.0] * HIDDEN for _ in range(len(ids))]
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert in layer.listed:
                constant = values[sorted(layer.listed).index(expert)].tolist()
                for h in range(HIDDEN):
                    expected[token][h] += weights[token, slot].item() * constant[h]
    assert found.tolist() == expected
    assert found.dtype == torch.float32


@given(routed())
def test_rewritten_routes_are_rows_and_keep_their_shape(case):
    layer, weights, ids, _ = case
    before = weights.clone(), ids.clone()
    kept, rows = substitution.rewrite_routes(weights, ids, layer)
    assert kept.shape == rows.shape == ids.shape
    assert (kept.dtype, rows.dtype) == (weights.dtype, ids.dtype)
    retained = [j for j in range(layer.num_logical) if j not in layer.listed]
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            here = kept[token, slot].item(), rows[token, slot].item()
            if expert in retained:
                assert here == (weights[token, slot].item(), retained.index(expert))
            else:
                assert here == (0.0, 0)
    assert torch.equal(weights, before[0])
    assert torch.equal(ids, before[1])


def test_an_invalid_route_contributes_nothing_even_with_a_nan_weight():
    layer = LayerSubstitution(0, 4, (0,), {})
    weights = torch.tensor([[torch.nan, torch.nan, 0.5]])
    ids = torch.tensor([[-1, 4, 0]])
    values = torch.tensor([[2.0, -4.0]])
    assert substitution.constant_sum(weights, ids, values, (0,)).tolist() == [[1.0, -2.0]]
    kept, rows = substitution.rewrite_routes(weights, ids, layer)
    assert kept.tolist() == [[0.0, 0.0, 0.0]]
    assert rows.tolist() == [[0, 0, 0]]


def test_a_non_finite_constant_reaches_only_the_tokens_that_route_to_it():
    values = torch.tensor([[torch.inf], [1.0]])
    ids = torch.tensor([[0, 2], [1, 2]])
    weights = torch.full((2, 2), 0.5)
    found = substitution.constant_sum(weights, ids, values, (0, 1))
    assert found[0].isinf().all()
    assert found[1].tolist() == [0.5]


def test_row_zero_that_overflows_stays_without_effect():
    # SEM-5: substituted routes become zero-weight routes to row 0.
    huge = torch.full((1, 2, 2), 1e30)
    weights = ExpertWeights(gate=huge, up=huge, down=huge.clone())
    kept, rows = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64)
    found = experts.weighted_sum(torch.ones(1, 2), kept, rows, weights, plain(torch.float32))
    assert found.tolist() == [[0.0, 0.0]]
