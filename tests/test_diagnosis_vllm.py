"""A real engine with one function replaced at run time is diagnosed from its scores alone.

Needs the environment of ``conformance/engines/setup-vllm.sh``; run with ``-m vllm``. Nothing
that is installed changes: each mistake wraps a function of vLLM in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mone_ref.backends.exact import ExactBackend
from mone_ref.backends.vllm import VllmBackend
from mone_ref.suite import cases as case_files
from mone_ref.suite import data, errormap
from mone_ref.suite.bench import Options
from mone_ref.suite.cases import Kind
from mone_ref.suite.diagnosis import FAR, NEAR, Diagnosis, Diagnostician
from mone_ref.suite.runner import Harness
from mone_ref.suite.simulate import Simulated, Simulator

pytestmark = pytest.mark.vllm

ROOT = data.root()
CASES = {case.id: case for case in case_files.load(ROOT)}
OUTPUT = "outputs/olmoe-twelve"

Transform = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmBackend]:
    backend = VllmBackend()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def doctor() -> Iterator[Diagnostician]:
    simulator = Simulator(ROOT, ExactBackend())
    yield Diagnostician(simulator)
    simulator.close()


def failure(engine: VllmBackend, case: str, dtype: str) -> Simulated:
    """What vLLM does with a case that it fails; its base model is right (controls/*)."""
    error_map = errormap.load(ROOT / "conformance" / "error_maps" / "vllm.toml")
    harness = Harness(engine, engine.describe(), ROOT, Options(error_map=error_map))
    asked = CASES[case]
    if asked.kind is Kind.OUTPUT:
        asked = replace(asked, kind=Kind.CONTROL)
    result, judgement = harness.judge(asked, dtype)
    assert result.outcome.failed, f"{result.outcome}: {result.found}"
    return Simulated(result, judgement.answers, judgement.parts)


def diagnosed(doctor: Diagnostician, case: str, dtype: str, seen: Simulated) -> Diagnosis:
    told = doctor.diagnose(CASES[case], dtype, dtype, seen)
    assert told is not None
    return told


# -- mistakes in the rewriting of routes: weights and ids are changed in place by the right one


def dropped(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(right(layer, x, weights, ids))


def twice(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return 2 * right(layer, x, weights, ids)


def unweighted(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    constants = right(layer, x, torch.ones_like(weights), ids.clone())
    right(layer, x, weights, ids)
    return constants


def weight_squared(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    constants = right(layer, x, weights.square(), ids.clone())
    right(layer, x, weights, ids)
    return constants


def over_top_k(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return right(layer, x, weights, ids) / ids.shape[1]


def descending(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    stored = layer.values.data.clone()
    layer.values.data.copy_(stored.flip(0))
    constants = right(layer, x, weights, ids)
    layer.values.data.copy_(stored)
    return constants


def renormalised(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    whole = weights.sum(dim=1, keepdim=True)
    constants = right(layer, x, weights, ids)
    share = weights.sum(dim=1, keepdim=True)
    weights.copy_(torch.where(share > 0, weights * whole / share, weights))
    return constants


def row_off_by_one(right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    constants = right(layer, x, weights, ids)
    last = layer.num_compute_experts - 1
    ids.copy_(torch.where(weights != 0, (ids + 1).clamp(max=last), ids))
    return constants


def row_0_keeps_weight(
    right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    before = weights.clone()
    constants = right(layer, x, weights, ids)
    weights.copy_(before)
    return constants


def logical_id_as_row(
    right: Transform, layer: Any, x: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    logical = ids.clone()
    constants = right(layer, x, weights, ids)
    last = layer.num_compute_experts - 1
    ids.copy_(torch.where(weights != 0, logical.clamp(max=last), ids))
    return constants


MISTAKES = {
    "dropped": dropped,
    "twice": twice,
    "unweighted": unweighted,
    "constant-weight-squared": weight_squared,
    "constants-over-top-k": over_top_k,
    "constants-in-descending-order": descending,
    "renormalised": renormalised,
    "row-off-by-one": row_off_by_one,
    "row-0-keeps-weight": row_0_keeps_weight,
    "logical-id-as-row": logical_id_as_row,
}


@contextmanager
def transforming(mistake: Callable[..., Tensor]) -> Iterator[None]:
    """vLLM with another step in place of its rewriting of routes."""
    from vllm.model_executor.layers.fused_moe.expert_substitution import ConstantExpertSubstitution

    right = ConstantExpertSubstitution.transform_routes

    def wrapped(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return mistake(right, layer, x, weights, ids)

    with mock.patch.object(ConstantExpertSubstitution, "transform_routes", wrapped):
        yield


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_forward_pass(
    engine: VllmBackend, doctor: Diagnostician, name: str
) -> None:
    with transforming(MISTAKES[name]):
        seen = failure(engine, OUTPUT, "float32")
    told = diagnosed(doctor, OUTPUT, "float32", seen)
    assert told.kind == "known-fault", told
    assert name in told.faults
    assert told.distance is not None
    assert told.distance <= NEAR
    assert told.runner_up is None or told.runner_up.distance >= FAR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mistake_is_told_from_rounding_of_16_bits(
    engine: VllmBackend, doctor: Diagnostician, dtype: str
) -> None:
    with transforming(row_0_keeps_weight):
        seen = failure(engine, OUTPUT, dtype)
    told = diagnosed(doctor, OUTPUT, dtype, seen)
    assert (told.kind, told.faults[:1]) == ("known-fault", ("row-0-keeps-weight",))


def test_constants_in_the_row_of_a_neighbour(engine: VllmBackend, doctor: Diagnostician) -> None:
    from vllm.model_executor.layers.fused_moe.expert_substitution import ConstantExpertSubstitution

    right = ConstantExpertSubstitution.weight_loader

    def next_row(layer: Any, param: Any, loaded: Tensor, expert_id: int) -> None:
        ids = layer.substituted_expert_ids
        right(layer, param, loaded, ids[(ids.index(expert_id) + 1) % len(ids)])

    with mock.patch.object(ConstantExpertSubstitution, "weight_loader", next_row):
        seen = failure(engine, OUTPUT, "float32")
    assert "neighbour" in diagnosed(doctor, OUTPUT, "float32", seen).faults


def test_a_missing_constant_that_is_read_as_zero(
    engine: VllmBackend, doctor: Diagnostician
) -> None:
    from vllm.model_executor.layers.fused_moe.expert_substitution import ConstantExpertSubstitution

    def unchecked(layer: Any, prefix: str) -> None:
        layer.values.data.nan_to_num_(0.0)

    with mock.patch.object(ConstantExpertSubstitution, "validate_loaded_values", unchecked):
        seen = failure(engine, "load/missing-constant", "float32")
    told = diagnosed(doctor, "load/missing-constant", "float32", seen)
    assert told.faults[:1] == ("missing-constant-is-zero",)


def test_what_vllm_itself_does_with_ids_that_are_strings(
    engine: VllmBackend, doctor: Diagnostician
) -> None:
    seen = failure(engine, "format/id-string", "float32")
    told = diagnosed(doctor, "format/id-string", "float32", seen)
    assert told.kind == "known-fault"
    assert "ids-through-int" in told.faults
