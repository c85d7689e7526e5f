"""The shipped layer cases: their numbers are right, by fractions and by the scalar oracle."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import scalar_oracle as scalar
import torch

from mone_ref.backend import COMPUTE_TYPES
from mone_ref.fill import layer_golden
from mone_ref.fill.layer_recipe import LayerRecipeError, tensor
from mone_ref.suite import cases
from mone_ref.suite.layer_cases import LayerCase, expected_rows

ROOT = Path(__file__).resolve().parent.parent
CASES = {case.id: case for case in cases.load(ROOT) if case.layer}
DTYPES = {"each": ("float32", "bfloat16", "float16")}


def ids(with_golden: bool) -> list[str]:
    """Cases that are written down, or that have a golden."""
    asked = {name: case.layer for name, case in CASES.items() if case.layer.call != "expert_rows"}
    return [name for name, layer in asked.items() if (layer.golden is not None) is with_golden]


def tensors(layer: LayerCase) -> dict[str, torch.Tensor]:
    return layer.recipe.build()


def retained(layer: LayerCase) -> list[int]:
    return [e for e in range(layer.recipe.experts) if e not in layer.recipe.substituted]


def swiglu(layer: LayerCase, expert: int, x: list[float]) -> list[float]:
    """One expert of a layer, one scalar at a time."""
    path = f"{layer.recipe.path}.{expert}"
    gate, up, down = (
        tensors(layer)[f"{path}.{name}_proj.weight"].double().tolist()
        for name in ("gate", "up", "down")
    )
    pairs = zip(scalar.apply(gate, x), scalar.apply(up, x), strict=True)
    return scalar.apply(down, [scalar.silu(g) * u for g, u in pairs])


def exact_constants(layer: LayerCase, weights: list[float], routes: list[int]) -> list[Fraction]:
    """Constant terms of one token, without any rounding; unjudged where one is not finite."""
    total = [Fraction(0)] * layer.width
    for weight, expert in zip(weights, routes, strict=True):
        if expert in layer.recipe.substituted:
            value = tensors(layer)[f"{layer.recipe.path}.{expert}.approx_value"].tolist()
            for column, v in enumerate(value):
                total[column] += Fraction(weight) * Fraction(v)
    return total


@pytest.mark.parametrize("name", ids(with_golden=False))
def test_a_written_sum_is_exact(name):
    layer = CASES[name].layer
    if not layer.given.get("topk_ids"):
        assert layer.expected.get("constants", layer.expected.get("output")) == []
        return
    *_, weights, routes = layer.inputs(torch.float32)
    key = "constants" if "constants" in layer.expected else "output"
    expected = expected_rows(layer.expected[key], key, (len(routes), layer.width))
    for token in range(len(routes)):
        if expected.judged[token]:
            exact = exact_constants(layer, weights[token].tolist(), routes[token].tolist())
            assert [Fraction(v) for v in expected.values[token].tolist()] == exact


@pytest.mark.parametrize("name", [name for name in ids(False) if CASES[name].layer.given])
def test_a_written_output_has_no_retained_part(name):
    layer = CASES[name].layer
    if "output" not in layer.expected or not layer.given.get("topk_ids"):
        return
    x, _, routes = layer.inputs(torch.float32)
    for token, chosen in enumerate(routes.tolist()):
        for expert in set(chosen) & set(retained(layer)):
            assert not any(swiglu(layer, expert, x[token].double().tolist()))


@pytest.mark.parametrize("name", [n for n in ids(False) if "rows" in CASES[n].layer.expected])
def test_written_routes_follow_from_the_list(name):
    layer = CASES[name].layer
    weights, routes = layer.inputs(torch.float32)
    rows = {expert: row for row, expert in enumerate(retained(layer))}
    found_rows = tensor(layer.expected["rows"], "rows", tuple(routes.shape), routes.dtype)
    found = tensor(layer.expected["weights"], "weights", tuple(routes.shape), weights.dtype)
    for token, chosen in enumerate(routes.tolist()):
        assert found_rows[token].tolist() == [rows.get(expert, 0) for expert in chosen]
        kept = [w if e in rows else 0 for w, e in zip(weights[token].tolist(), chosen, strict=True)]
        assert found[token].tolist() == kept


def scalar_routes(layer: LayerCase) -> tuple[list[list[float]], list[list[tuple[int, float]]]]:
    """Activations, and (expert, weight) of every route."""
    given = [part.tolist() for part in layer.inputs(torch.float64)]
    if layer.call == "forward":
        x, logits = given
        recipe = layer.recipe
        return x, [scalar.route(row, recipe.top_k, recipe.normalise) for row in logits]
    x, weights, routes = given
    return x, [list(zip(e, w, strict=True)) for e, w in zip(routes, weights, strict=True)]


@pytest.mark.parametrize("name", ids(with_golden=True))
def test_a_golden_is_what_the_scalar_oracle_computes(name):
    layer = CASES[name].layer
    constants = {
        expert: tensors(layer)[f"{layer.recipe.path}.{expert}.approx_value"].tolist()
        for expert in layer.recipe.substituted
    }
    golden = layer.golden.output
    for token, (x, routes) in enumerate(zip(*scalar_routes(layer), strict=True)):
        inside = [(e, w) for e, w in routes if 0 <= e < layer.recipe.experts]
        vectors = constants | {e: swiglu(layer, e, x) for e, _ in inside if e not in constants}
        found = scalar.weighted_sum(inside, vectors, layer.recipe.hidden)
        difference = torch.tensor(found, dtype=torch.float64) - golden[token]
        assert difference.abs().max() <= 1e-12 * golden.abs().max()


@pytest.mark.parametrize("name", ids(with_golden=True))
def test_a_golden_is_what_its_case_fills(name):
    layer = CASES[name].layer
    filled = layer_golden.golden(layer.recipe, layer.call, layer.given, layer.sizes)
    output = torch.tensor(filled["output"], dtype=torch.float64)
    assert (output - layer.golden.output).abs().max() <= 1e-12 * output.abs().max()
    assert set(layer.golden.budgets) == set(COMPUTE_TYPES)
    for budget in layer.golden.budgets.values():
        assert budget.token.shape == (len(output),)
        assert (budget.token > 0).all()
        assert budget.maximum > 0


def test_every_golden_belongs_to_a_case():
    files = (ROOT / "conformance" / "goldens").rglob("*.json")
    stored = {
        path.relative_to(ROOT / "conformance/goldens").with_suffix("").as_posix() for path in files
    }
    assert stored == set(ids(with_golden=True))


@pytest.mark.parametrize("name", CASES)
def test_every_dtype_gets_the_same_numbers(name):
    case = CASES[name]
    values = [*tensors(case.layer).values(), *case.layer.inputs(torch.float32)]
    for dtype in DTYPES.get(case.dtypes, case.dtypes):
        held = case.layer.inputs(getattr(torch, dtype))
        kept = [*(t.to(getattr(torch, dtype)) for t in tensors(case.layer).values()), *held]
        for before, after in zip(values, kept, strict=True):
            finite = after.isfinite()
            assert (before.double() == after.double())[finite].all()


@pytest.mark.parametrize("values", [[[1.0]], [[1, 2], [3]], [["a", "b"]], [1, 2]])
def test_values_that_do_not_fit_are_an_error(values):
    with pytest.raises(LayerRecipeError):
        tensor(values, "topk_weights", (1, 2), torch.float32)


def test_a_choice_in_doubt_is_no_golden():
    clear = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    layer_golden.check_clear(clear, 2)
    layer_golden.check_clear(clear, 3)
    doubtful = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.302, 0.298]], dtype=torch.float64)
    with pytest.raises(LayerRecipeError, match="token 1"):
        layer_golden.check_clear(doubtful, 2)
