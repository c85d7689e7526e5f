"""Where rounding happens: each switch moves one step, and TF32 keeps 10 bits."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mone_ref.precision import cast_points, exact_products, plain, product, round_to_tf32


def nearest_tf32(value: float) -> float:
    """Round by hand: the two neighbours with 13 zero low bits, the nearer, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    low = bits & ~0x1FFF
    below, above = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, low + 0x2000))
    down, up = abs(value - below), abs(above - value)
    if down == up:
        return below if (low >> 13) % 2 == 0 else above
    return below if down < up else above


@given(st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126, allow_subnormal=False))
def test_tf32_rounds_to_nearest_even(value):
    assert round_to_tf32(torch.tensor([value])).item() == nearest_tf32(value)


def test_tf32_leaves_nan_and_infinity_alone():
    found = round_to_tf32(torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert found[0] == torch.inf
    assert found[1] == -torch.inf
    assert found[2].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_type_has_six_distinct_cast_points(dtype):
    points = cast_points(plain(dtype))
    assert list(points) == [
        "plain",
        "router-softmax",
        "each-route",
        "residual-wide",
        "attention-wide",
        "wide-between-products",
    ]
    assert len(set(points.values())) == 6
    assert points["plain"].wide == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_type_has_nothing_to_move(dtype):
    assert list(cast_points(plain(dtype))) == ["plain"]
    assert plain(dtype).wide == dtype


def test_a_product_rounds_its_inputs_to_the_weights_and_its_result_to_between():
    points = cast_points(plain(torch.bfloat16))
    x = torch.tensor([[1 + 2**-10]])  # not a bfloat16 number: rounds to 1
    weight = torch.tensor([[3.0]], dtype=torch.bfloat16)
    assert product(x, weight, points["plain"]).item() == 3.0
    wide = product(x, weight, points["wide-between-products"])
    assert (wide.dtype, wide.item()) == (torch.float32, 3.0)
    x = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    assert product(x, ones, points["plain"]).item() == 1.0  # 1 + 2**-8 ties to even
    assert product(x, ones, points["wide-between-products"]).item() == 1 + 2**-8


def test_exact_products_overrule_a_callers_switch_and_restore_it():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
