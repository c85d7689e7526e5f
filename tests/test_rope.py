"""Rotary embeddings: which elements turn together, how fast, and how far YaRN slows them."""

from __future__ import annotations

import pytest
import torch
from decimals import right

from mone_ref.model import rope
from mone_ref.rope_config import Rope, Yarn, log_scale

HEAD = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # [1, 1, 4]


def quarter_turn(pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, pairs), torch.ones(1, pairs)  # cos, sin: (a, b) -> (-b, a)


@pytest.mark.parametrize(
    ("given", "turned"),
    [
        (Rope(1e4, 4), [-3, -4, 1, 2]),
        (Rope(1e4, 4, neighbours=True), [-2, 1, -4, 3]),
        (Rope(1e4, 2), [-2, 1, 3, 4]),
        (Rope(1e4, 2, neighbours=True), [-2, 1, 3, 4]),
    ],
    ids=["halves", "neighbours", "leading part", "leading neighbours"],
)
def test_which_elements_turn_together(given: Rope, turned: list[float]):
    cos, sin = quarter_turn(given.size // 2)
    assert rope.rotate(HEAD, cos, sin, given).flatten().tolist() == turned


def test_every_pair_has_its_speed():
    # theta^(-2 i / 8) with theta = 10^4
    assert right(["1.0000", "0.1000", "0.0100", "0.0010"], rope.frequencies(Rope(1e4, 8)).tolist())


def test_a_table_holds_the_angle_of_every_position():
    cos, sin = rope.table(3, Rope(1e4, 4), torch.float64)  # [3, 2]
    # Angles 0, 1, 2 of the fast pair and 0, 0.01, 0.02 of the slow one.
    assert right(
        [
            ["1.000000000000", "1.000000000000"],
            ["0.540302305868", "0.999950000417"],
            ["-0.416146836547", "0.999800006667"],
        ],
        cos.tolist(),
    )
    assert right(
        [
            ["0.000000000000", "0.000000000000"],
            ["0.841470984808", "0.009999833334"],
            ["0.909297426826", "0.019998666693"],
        ],
        sin.tolist(),
    )


# With theta = 10^4 and size 8, pair p turns original / (2 pi 10^p) times, so the pair that turns
# n times is log10(original / (2 pi n)). For 4096: 1.309 at 32 turns, 2.814 at one.
YARN = Yarn(factor=4, original=4096, beta_fast=32, beta_slow=1, table_scale=1.5, score_scale=1)


def test_yarn_keeps_fast_pairs_and_slows_the_others():
    # Pairs up to 1 keep their speed, from 3 on they lose the factor, pair 2 is half way:
    # 0.01 * (1 + 1/4) / 2 and 0.001 / 4.
    speeds = rope.frequencies(Rope(1e4, 8, yarn=YARN)).tolist()
    assert right(["1.00000", "0.10000", "0.00625", "0.00025"], speeds)


def test_yarn_with_a_short_original_slows_everything_but_its_ramp():
    # log10(16 / (2 pi 32)) = -1.099 -> 0, log10(16 / (2 pi)) = 0.406 -> 1: the first pair keeps
    # its speed, all others lose the factor.
    short = Yarn(factor=4, original=16, beta_fast=32, beta_slow=1, table_scale=1, score_scale=1)
    speeds = rope.frequencies(Rope(1e4, 8, yarn=short)).tolist()
    assert right(["1.000000", "0.025000", "0.002500", "0.000250"], speeds)


def test_yarn_scales_the_table():
    cos, sin = rope.table(1, Rope(1e4, 8, yarn=YARN), torch.float64)
    assert cos.tolist() == [[1.5] * 4]
    assert sin.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("factor", "weight", "expected"),
    [
        (40, 1.0, "1.368888"),  # 1 + 0.1 ln 40
        (40, 0.707, "1.260804"),  # 1 + 0.0707 ln 40
        (4, 0.0, "1.000000"),
        (1, 1.0, "1.000000"),
        (0.5, 1.0, "1.000000"),  # a shorter context sharpens nothing
    ],
)
def test_how_much_attention_sharpens(factor: float, weight: float, expected: str):
    assert right(expected, log_scale(factor, weight))
