"""The fast path: equal to the oracle whatever the sizes and routes, and no work for constants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import moe_layer
import pytest
import small_layer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG
from small_layer import PATH, tensors
from torch import Tensor
from torch.nn.functional import silu

from mone_ref import backends, layer, loading, substitution
from mone_ref.backend import LayerSpec, LoadOptions, Refused, Unavailable
from mone_ref.backends import grouped, grouped_experts, left_products
from mone_ref.backends.grouped import GroupedBackend
from mone_ref.backends.grouped_model import moved
from mone_ref.backends.reference import DTYPES
from mone_ref.errors import Phase
from mone_ref.model import decoder
from mone_ref.moe import MoeLayer

ROOT = Path(__file__).resolve().parent.parent
FLOAT32_UNIT = 2.0**-24


def spec(
    experts: int, hidden: int, inner: int, top_k: int, substituted: set[int], dtype: str
) -> LayerSpec:
    return small_layer.spec(
        num_logical_experts=experts,
        hidden_size=hidden,
        intermediate_size=inner,
        top_k=top_k,
        declared={3: tuple(sorted(substituted))},
        dtype=dtype,
    )


def scalar_layer(
    x: Tensor, weights: Tensor, ids: Tensor, whole: MoeLayer, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """SEM-1 route by route in float64, and how far rounding may move it: ``[T, H]`` twice.

    Products add in float32 and round to ``dtype``; first-order bounds of every step, carried on.
    """
    unit, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal
    x, weights = x.double(), weights.double()
    retained, substituted = whole.substitution.retained, whole.substitution.substituted

    def off(matrix: Tensor, vector: Tensor) -> Tensor:
        return (2 * unit + len(vector) * FLOAT32_UNIT) * (matrix.abs() @ vector.abs()) + least

    y, moved_by = torch.zeros_like(x), torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        w, expert = weights[token, slot], int(ids[token, slot])
        if expert in substituted:
            added = w * whole.constants[substituted.index(expert)].double()  # [H]
            changed = torch.zeros_like(added)
        elif expert in retained:
            row = retained.index(expert)
            parts = (whole.experts.gate, whole.experts.up, whole.experts.down)
            gate, up, down = (part[row].double() for part in parts)
            g, u = gate @ x[token], up @ x[token]  # [I]
            g_off, u_off = off(gate, x[token]), off(up, x[token])
            s, s_off = silu(g), 1.1 * g_off + 4 * unit * silu(g).abs() + least  # |silu'| < 1.1
            h = s * u
            h_off = s_off * (u.abs() + u_off) + s.abs() * u_off + 2 * unit * h.abs() + least
            added = w * (down @ h)  # [H]
            changed = w * (down.abs() @ h_off + off(down, h.abs() + h_off))
        else:
            continue
        y[token] += added
        # weights round to the dtype, and each sum of K terms adds up the roundings of its terms
        share = 2 * unit + (ids.shape[1] + 2) * FLOAT32_UNIT
        moved_by[token] += changed + 2 * share * (added.abs() + changed) + least
    return y, moved_by


@st.composite
def layers_and_routes(draw: st.DrawFn) -> tuple[LayerSpec, int, int]:
    """Every number of tokens, slots and substituted experts, at sizes that no kernel likes."""
    experts = draw(st.integers(1, 9))
    substituted = draw(st.sets(st.integers(0, experts - 1)) | st.just(set(range(experts))))
    asked = spec(
        experts,
        hidden=draw(st.integers(1, 20)),
        inner=draw(st.integers(1, 20)),
        top_k=draw(st.integers(1, experts) | st.just(experts)),
        substituted=substituted,
        dtype=draw(st.sampled_from(sorted(DTYPES))),
    )
    return asked, draw(st.sampled_from([0, 1, 2, 7])), draw(st.integers(0, 2**31))


@given(layers_and_routes())
@settings(max_examples=100)
def test_a_layer_answers_as_sem_1_says(drawn: tuple[LayerSpec, int, int]) -> None:
    asked, tokens, seed = drawn
    seeded = torch.Generator().manual_seed(seed)
    named, dtype = tensors(asked, seeded), DTYPES[asked.dtype]
    x = torch.randn(tokens, asked.hidden_size, generator=seeded).to(dtype)
    scores = torch.rand(tokens, asked.num_logical_experts, generator=seeded)
    weights, ids = scores.topk(asked.top_k)  # [T, K]
    session = GroupedBackend().build_layer(asked, named)

    whole = layer.build(asked, named, dtype)
    exact, allowed = scalar_layer(x, weights, ids, whole, dtype)
    answer = session.forward_routed(x, weights, ids)
    assert answer.dtype is dtype
    assert answer.shape == exact.shape
    assert ((answer.double() - exact).abs() <= allowed).all()

    kept, rows, _ = session.rewrite_routes(weights, ids)
    true_kept, true_rows = substitution.rewrite_routes(weights, ids, whole.substitution)
    assert torch.equal(kept, true_kept)
    assert torch.equal(rows, true_rows)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_wrong_layer_is_outside_the_bound(dtype: str) -> None:
    asked = spec(6, 7, 5, 3, {1, 4}, dtype)
    seeded = torch.Generator().manual_seed(5)
    named = tensors(asked, seeded)
    x = torch.randn(4, 7, generator=seeded).to(DTYPES[dtype])
    weights, ids = torch.rand(4, 6, generator=seeded).topk(3)
    whole = layer.build(asked, named, DTYPES[dtype])
    exact, allowed = scalar_layer(x, weights, ids, whole, DTYPES[dtype])
    named[f"{PATH}.0.up_proj.weight"], named[f"{PATH}.2.up_proj.weight"] = (
        named[f"{PATH}.2.up_proj.weight"],
        named[f"{PATH}.0.up_proj.weight"],
    )
    swapped = GroupedBackend().build_layer(asked, named).forward_routed(x, weights, ids)
    assert ((swapped.double() - exact).abs() > allowed).any()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_only_retained_routes_are_multiplied(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled: list[int] = []
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_experts.grouped_product

    def watched(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        scheduled.append(len(x))
        return product(x, matrices, ends)

    monkeypatch.setattr(grouped_experts, "grouped_product", watched)
    asked = spec(4, 8, 8, 2, {1, 3}, dtype)
    session = GroupedBackend().build_layer(asked, tensors(asked, 1))
    x = torch.ones(3, 8, dtype=DTYPES[dtype])
    weights = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.0]])
    session.forward_routed(x, weights, torch.tensor([[0, 1], [1, 3], [2, 0]]))
    assert scheduled == [2, 2]  # tokens 0 and 2, one route each: gate and up, then down


@pytest.mark.parametrize("has_operator", [True, False])
def test_many_rows_in_float32_go_expert_by_expert_where_torch_can(
    has_operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[int] = []
    product: Callable[[Tensor, Tensor], Tensor] = left_products.left

    def watched(matrix: Tensor, rows: Tensor) -> Tensor:
        multiplied.append(len(rows))
        return product(matrix, rows)

    if not left_products.available():
        pytest.fail("torch has lost the operator: docs/fast-path.md promises more than it keeps")
    monkeypatch.setattr(left_products, "left", watched)
    monkeypatch.setattr(left_products, "available", lambda: has_operator)
    asked = spec(4, 7, 5, 2, {1, 3}, "float32")
    named = tensors(asked, 1)
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(2))
    weights = torch.full((8, 2), 0.5)
    ids = torch.tensor([[0, 2]] * 3 + [[0, 1]] * 2 + [[1, 3]] * 3)
    answer = GroupedBackend().build_layer(asked, named).forward_routed(x, weights, ids)
    assert multiplied == ([5, 5, 3, 3] if has_operator else [])  # gate and up, then down

    exact, allowed = scalar_layer(x, weights, ids, layer.build(asked, named, x.dtype), x.dtype)
    assert ((answer.double() - exact).abs() <= allowed).all()


def test_it_is_known_by_name_and_computes_in_the_dtype_it_is_given() -> None:
    backend = backends.find("grouped")
    assert isinstance(backend, GroupedBackend)
    assert dict(backend.describe().compute) == {dtype: dtype for dtype in DTYPES}


def test_a_torch_without_grouped_mm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(backends.BackendError, match="has no grouped_mm: "):
        backends.find("grouped")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(engine_args={"kernel": 1}), "no engine arguments are known, got kernel"),
        (LoadOptions(tensor_parallel=2), "a whole model in one process"),
        (LoadOptions(pipeline_parallel=2), "a whole model in one process"),
    ],
)
def test_options_that_it_has_no_use_for(options: LoadOptions, message: str, approx: Path) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedBackend().load(approx, options)


def test_features_are_refused(approx: Path) -> None:
    with pytest.raises(Refused) as raised:
        GroupedBackend().load(approx, LoadOptions(features=frozenset({"eplb"})))
    assert raised.value.phase is Phase.INIT


def test_devices_that_are_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert grouped.usable("auto") == "cpu"
    with pytest.raises(Unavailable, match="no GPU that torch can use"):
        grouped.usable("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(Unavailable, match=r"compute capability 8\.0 or later"):
        grouped.usable("auto")


@pytest.mark.parametrize("name", ["olmoe-approx", "deepseek2-approx", "deepseek3-approx"])
def test_attention_makes_every_tensor_on_the_device_of_the_model(name: str, fixtures: Path) -> None:
    model = loading.load(fixtures / name / "checkpoint")
    meta = torch.device("meta")  # refuses to meet a tensor of the CPU, as a GPU does
    first = moved(model.weights.layers[0], meta)
    with torch.inference_mode(), meta:
        x = torch.empty(5, model.config.model.hidden_size)
        y = decoder.attend(x, first.attention, model.config.model, model.precision)
    assert y.device == meta
    assert y.shape == x.shape


def test_the_stacks_are_the_only_copy_of_the_experts(approx: Path) -> None:
    session = GroupedBackend().load(approx, LoadOptions())
    assert isinstance(session, grouped.GroupedSession)
    for index, stacked in session.model.moe.items():
        held = session.model.model.weights.moe_layers[index].experts
        for part in (held.gate, held.up):
            assert part.untyped_storage().data_ptr() == stacked.gate_up.untyped_storage().data_ptr()
        assert held.down.untyped_storage().data_ptr() == stacked.down.untyped_storage().data_ptr()


def test_every_family_conforms() -> None:
    command = [sys.executable, "-c", "from mone_ref.cli import main; main()", "conform"]
    asked = ["--backend=grouped", "--dtype=bfloat16", "--case=outputs/*-approx", "--case=update/*"]
    done = subprocess.run(
        [*command, *asked], capture_output=True, text=True, cwd=ROOT, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ok\n" in done.stdout


def test_the_benchmark_runs_and_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", "--quick", "--threads=1"])
    moe_layer.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "| grouped" in line]
    assert len(rows) == len(moe_layer.DTYPES) * len(moe_layer.TOKENS) * 2


@pytest.mark.parametrize("dtype", moe_layer.DTYPES)
def test_the_benchmark_stops_at_a_wrong_answer(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    sizes = moe_layer.Sizes(64, 32, 16, 4)
    half = moe_layer.substituted(moe_layer.made(sizes, dtype))
    asked = moe_layer.evenly_routed(sizes, dtype, 8)
    answer = grouped_experts.forward_routed(
        asked.x, asked.weights, asked.ids, grouped_experts.build(half)
    )
    moe_layer.check("right", answer, asked, half)
    with pytest.raises(SystemExit, match="wrong: error"):
        moe_layer.check("wrong", answer.roll(1, dims=0), asked, half)
