"""What a layer answered against its case: exactly, within a derived bound, or by budget."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mone_ref.families import OLMOE
from mone_ref.fill.layer_recipe import tensor
from mone_ref.suite.compare import (
    Comparison,
    kind,
    number_flaw,
    same,
    summary,
    value_flaw,
)
from mone_ref.suite.layer_cases import LayerCase, LayerGolden, Rows, expected_rows

FLOAT32_ROUNDOFF = 2.0**-24


def compare_answer(case: LayerCase, answer: list[Tensor], dtype: str, compute: str) -> Comparison:
    """Judge what ``case.call`` returned, in the order of its ``ANSWERS``, at one dtype."""
    if case.call == "expert_rows":
        expected, found = case.expected["allocated"], int(answer[0])
        return Comparison("" if found == expected else f"{found} rows, expected {expected}")
    if case.golden is not None:
        return against_golden(answer[0], case.golden, compute)
    weights, ids = routes(case, dtype)  # [T, K]
    if case.call == "rewrite_routes":
        flaw = routes_flaw(case, answer[0], answer[1], weights, ids)
        if flaw:
            return Comparison(flaw)
    return constants(case, answer[-1], weights, ids, dtype)


def routes(case: LayerCase, dtype: str) -> tuple[Tensor, Tensor]:
    """The routes ``[T, K]`` that a case writes down."""
    given = case.inputs(getattr(torch, dtype))
    if case.call == "forward":  # only without a token is its answer no golden
        return torch.empty(0, case.recipe.top_k), torch.empty(0, case.recipe.top_k)
    return given[-2], given[-1]


def routes_flaw(
    case: LayerCase, weights: Tensor, rows: Tensor, given_weights: Tensor, given_ids: Tensor
) -> str:
    """Rewritten routes ``[T, K]`` compare exactly; rows may be integers of any width (EXEC-3)."""
    if weights.dtype != given_weights.dtype or weights.shape != given_weights.shape:
        return f"weights: {form(weights)}, expected {form(given_weights)}"
    if not is_integer(rows) or rows.shape != given_ids.shape:
        return f"rows: {form(rows)}, expected integers {list(given_ids.shape)}"
    for name, found in (("weights", weights), ("rows", rows.long())):
        if name not in case.expected:
            continue
        expected = tensor(case.expected[name], name, tuple(found.shape), found.dtype)  # [T, K]
        if not same(expected, found):
            token = int((expected != found).any(dim=1).nonzero()[0])
            return (
                f"{name} of token {token}: {found[token].tolist()}, "
                f"expected {expected[token].tolist()}"
            )
    return ""


def is_integer(value: Tensor) -> bool:
    """Whether a tensor holds integers of any width; truth values are none."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def form(value: Tensor) -> str:
    """Dtype and shape, for a message."""
    return f"{kind(value)} {list(value.shape)}"


def constants(
    case: LayerCase, found: Tensor, weights: Tensor, ids: Tensor, dtype: str
) -> Comparison:
    """Judge an answer ``[T, W]`` that consists of constant terms alone.

    ``weights`` and ``ids`` ``[T, K]`` are what the layer was given.
    """
    name = "constants" if "constants" in case.expected else "output"
    expected = expected_rows(case.expected[name], name, (len(ids), case.width))
    flaw = output_form_flaw(found, expected.values)
    if flaw:
        return Comparison(flaw)
    bound = constant_bound(case, weights, ids, expected.values, getattr(torch, dtype))
    return Comparison(beyond(found.double(), expected, bound, name))


def output_form_flaw(found: Tensor, expected: Tensor) -> str:
    """A float tensor of the expected shape, or what it is instead."""
    if not found.is_floating_point() or found.shape != expected.shape:
        return f"the answer is {form(found)}, expected floats {list(expected.shape)}"
    return ""


def beyond(found: Tensor, expected: Rows, bound: Tensor, name: str) -> str:
    """The first judged number that is not within its bound; NaN never is."""
    off = ~((found - expected.values).abs() <= bound) & expected.judged[:, None]  # [T, W]
    if not off.any():
        return ""
    token, column = off.nonzero()[0].tolist()
    return (
        f"{name} of token {token}, column {column}: {float(found[token, column]):.9g}, expected "
        f"{float(expected.values[token, column]):.9g} within {float(bound[token, column]):.3g}"
    )


def constant_bound(
    case: LayerCase, weights: Tensor, ids: Tensor, expected: Tensor, dtype: torch.dtype
) -> Tensor:
    """How far the constants' sum ``[T, W]`` may honestly be from the exact one (SEM-3).

    ``n`` float32 products added in any order err by at most ``g * sum |w v|`` with
    ``g = n u / (1 - n u)`` and ``u = 2**-24``; then one rounding to ``dtype``, which is
    half its spacing, is allowed. A token without a constant term gets exactly zero.
    """
    tensors, recipe = case.recipe.build(), case.recipe
    terms = torch.zeros(len(ids), case.width, dtype=torch.float64)  # [T, W]
    count = torch.zeros(len(ids), 1, dtype=torch.float64)  # [T, 1]
    for expert in recipe.substituted:
        value = tensors[f"{recipe.path}.{expert}.{OLMOE.constant}"].to(dtype).double()  # [H]
        here = ids == expert  # [T, K]
        paid = torch.where(here, weights.double().abs(), 0.0).sum(dim=1, keepdim=True)  # [T, 1]
        # 0 * inf: a constant that is not finite is no part of the other tokens' bounds.
        reached = torch.where(paid > 0, paid * value.abs(), 0.0)  # [T, H]
        terms[:, : recipe.hidden] += reached
        count += here.sum(dim=1, keepdim=True)
    share = count * FLOAT32_ROUNDOFF
    in_float32 = share / (1 - share) * terms  # [T, W]
    limits = torch.finfo(dtype)
    rounding = limits.eps / 2 * (expected.abs() + in_float32) + limits.tiny * limits.eps
    return torch.where(terms > 0, in_float32 + rounding, 0.0)


def against_golden(found: Tensor, golden: LayerGolden, compute: str) -> Comparison:
    """Judge an output ``[T, H]`` by the number rule."""
    flaw = output_form_flaw(found, golden.output) or value_flaw(found.double(), golden.output)
    if flaw:
        return Comparison(flaw)
    budget = golden.budgets[compute]
    error = (found.double() - golden.output).abs()  # [T, H]
    rms = error.square().mean(dim=1).sqrt()  # [T]
    numbers = summary(
        rms, budget.token, float(error.max()), budget.maximum, found.double(), golden.output
    )
    # There is no likeliest id in a layer's output.
    numbers = replace(numbers, argmax=float("nan"))
    return Comparison(number_flaw(numbers, "rms"), numbers)
