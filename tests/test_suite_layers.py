"""Judging single layers: what adapters may say, what they may not, and every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mone_ref import layer
from mone_ref.backend import (
    Backend,
    BackendInfo,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Refused,
    Session,
    Unavailable,
)
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.errors import Code, Phase
from mone_ref.suite import cases, layer_compare
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.runner import Harness

ROOT = Path(__file__).resolve().parent.parent
CASES = {case.id: case for case in cases.load(ROOT) if case.layer}
Answer = Callable[[LayerSession, LayerSpec, str, tuple[Tensor, ...]], Any]


def honestly(inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]) -> Any:
    return getattr(inner, name)(*given)


@dataclass
class Layers(Backend):
    """The reference's layers, with ``answer`` between them and the judge."""

    answer: Answer = honestly
    built: Callable[[LayerSpec], None] = lambda spec: None
    in_place: bool = False

    def describe(self) -> BackendInfo:
        return replace(ReferenceBackend().describe(), name="fake")

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        raise NotImplementedError

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        self.built(layer)
        inner, answer = ReferenceBackend().build_layer(layer, tensors), self.answer

        class Between(LayerSession):
            in_place = self.in_place

            def forward(self, *given: Tensor) -> Tensor:
                return answer(inner, layer, "forward", given)

            def forward_routed(self, *given: Tensor) -> Tensor:
                return answer(inner, layer, "forward_routed", given)

            def rewrite_routes(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                return answer(inner, layer, "rewrite_routes", given)

        return Between()


def judged(case: str, backend: Backend, dtype: str = "float32") -> Result:
    harness = Harness(backend, backend.describe(), ROOT)
    return harness.run(CASES[case], dtype)


def changed(index: int, change: Callable[[Tensor], Tensor]) -> Answer:
    """One of the tensors of a rewriting, changed."""

    def answer(inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]) -> Any:
        parts = list(getattr(inner, name)(*given))
        parts[index] = change(parts[index])
        return tuple(parts)

    return answer


def test_the_honest_layers_pass_between():
    for case in ("layer/routes", "layer/mixed", "layer/ranks-reduced"):
        assert judged(case, Layers()).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("index", "change", "found"),
    [
        (0, lambda t: t + 1e-7, "weights of token 0"),
        (0, lambda t: t.double(), "weights: torch.float64"),
        (1, lambda t: t.flip(1), "rows of token 0"),
        (1, lambda t: t.float(), "rows: torch.float32 [5, 2], expected integers [5, 2]"),
        (1, lambda t: t != 0, "rows: torch.bool [5, 2], expected integers"),
        (1, lambda t: (t + 1).int(), "rows of token 0"),
        (1, lambda t: t[:, :1], "rows: torch.int64 [5, 1]"),
        (2, lambda t: t * 1.001, "constants of token 0, column 0: 4.004"),
        (2, lambda t: t[:, :1], "floats [5, 2]"),
        (2, lambda t: t.long(), "the answer is torch.int64"),
        (2, lambda t: t.where(t != 0, torch.nan), "constants of token 3, column 0: nan"),
        (2, lambda t: t.where(t != 0, 1e-38), "expected 0 within 0"),
    ],
)
def test_a_changed_answer_is_a_mismatch(index, change, found):
    result = judged("layer/routes", Layers(changed(index, change)))
    assert result.outcome is Outcome.MISMATCH
    assert found in result.found


@pytest.mark.parametrize("case", ["layer/routes", "layer/routes-in-other-dtypes"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_rows_may_be_integers_of_any_width(case, dtype):
    assert judged(case, Layers(changed(1, lambda t: t.to(dtype)))).outcome is Outcome.OK


def test_a_row_that_is_not_judged_may_be_anything():
    def poisoned(inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]) -> Any:
        output = getattr(inner, name)(*given).clone()
        output[1] = torch.nan
        return output

    assert judged("layer/infinite-constant", Layers(poisoned)).outcome is Outcome.OK


def test_a_sum_passes_at_its_bound_and_fails_beyond():
    case = CASES["layer/sum-that-cancels"].layer
    weights, ids = case.inputs(torch.float32)
    exact = torch.tensor([[3.9326171875]], dtype=torch.float64)
    bound = layer_compare.constant_bound(case, weights, ids, exact, torch.float32)
    n, terms = 2, 32768 * float(weights.double().sum())
    in_float32 = n * 2.0**-24 / (1 - n * 2.0**-24) * terms
    assert float(bound) == in_float32 + 2.0**-24 * (3.9326171875 + in_float32)
    for factor, passes in ((0.999, True), (1.001, False)):
        found = layer_compare.constants(case, exact + factor * bound, weights, ids, "float32")
        assert (found.flaw == "") is passes


def test_a_changed_input_must_be_announced():
    def in_place(inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]) -> Any:
        answer = getattr(inner, name)(*given)
        given[1].zero_()
        return answer

    result = judged("layer/routes", Layers(in_place))
    assert result.outcome is Outcome.ERRORED
    assert result.found == "rewrite_routes() changed its argument 1: declare in_place"
    assert judged("layer/routes", Layers(in_place, in_place=True)).outcome is Outcome.OK


# -- what an adapter may say


def unavailable(*_: Any) -> Any:
    raise Unavailable("no kernel takes two columns")


def test_what_is_unavailable_is_not_applicable_with_its_reason():
    for backend in (Layers(built=unavailable), Layers(unavailable)):
        result = judged("layer/routes", backend)
        assert result.outcome is Outcome.NOT_APPLICABLE
        assert result.found == "no kernel takes two columns"


def test_a_method_that_is_not_there_is_not_applicable():
    class Nothing(LayerSession):
        pass

    class Bare(Layers):
        def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
            return Nothing()

    result = judged("layer/routes", Bare())
    assert result.outcome is Outcome.NOT_APPLICABLE
    assert result.found == "the engine's layers have no rewrite_routes()"


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("case", "error", "outcome"),
    [
        ("layer/routes", RuntimeError("no kernel"), Outcome.ERRORED),
        ("layer/routes", Refused("no", code=Code.UNSUPPORTED_FEATURE), Outcome.WRONGLY_REFUSED),
        ("layer/nan-constant", Refused("no", code=Code.NON_FINITE_CONSTANT), Outcome.OK),
        ("layer/nan-constant", Refused("no", code=Code.MISSING_CONSTANT), Outcome.WRONG_GROUP),
        ("layer/nan-constant", RuntimeError("NaN"), Outcome.ERRORED),
        ("layer/nan-constant", MemoryError(), Outcome.CRASHED),
    ],
)
def test_a_layer_that_is_not_built(case, error, outcome):
    assert judged(case, Layers(built=failing(error))).outcome is outcome


def test_a_call_that_fails_after_the_load_is_late():
    refusal = Refused("no", code=Code.NON_FINITE_CONSTANT, phase=Phase.RUN)
    assert judged("layer/nan-constant", Layers(failing(refusal))).outcome is Outcome.LATE


@pytest.mark.parametrize("answer", [lambda *_: None, lambda *_: (torch.zeros(1),), lambda *_: 3])
def test_an_answer_that_is_none_is_an_error(answer):
    for case in ("layer/routes", "layer/mixed"):
        assert judged(case, Layers(answer)).outcome is Outcome.ERRORED


# -- ranks


def test_an_output_that_is_already_reduced_must_not_be_summed():
    answers: list[Tensor] = []

    def whole(inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]) -> Any:
        answers.append(getattr(inner, name)(*given))
        return answers[-1]

    class Reduces(Layers):
        def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
            return super().build_layer(replace(layer, reduced=True), tensors)

    assert judged("layer/ranks-reduced", Reduces(whole)).outcome is Outcome.OK
    result = judged("layer/ranks-mixed", Reduces(whole))
    assert result.outcome is Outcome.MISMATCH
    assert result.found.startswith("2 ranks: ")
    # Two ranks with the same answer, added in float64: exactly twice it.
    golden = CASES["layer/ranks-mixed"].layer.golden.output
    assert result.numbers.norm_ratio == 2 * float(answers[-1].double().norm() / golden.norm())


def test_a_constant_on_rank_0_after_the_reduction_is_missing_on_the_others():
    def on_rank_0(
        inner: LayerSession, spec: LayerSpec, name: str, given: tuple[Tensor, ...]
    ) -> Any:
        shift = 0.0 if spec.tp[0] == 0 else 1.0
        return getattr(inner, name)(*given) - shift

    result = judged("layer/ranks-reduced", Layers(on_rank_0))
    assert result.outcome is Outcome.MISMATCH
    assert result.found.startswith("2 ranks, rank 1: ")


def test_shards_put_together_are_the_whole():
    recipe = CASES["layer/ranks-mixed"].layer.recipe
    whole = layer.build(recipe.spec("float32", (0, 1), False), recipe.build(), torch.float32)
    for size in (1, 2, 4):
        shards = [layer.shard(whole.experts, (rank, size)) for rank in range(size)]
        assert torch.equal(torch.cat([one.gate for one in shards], 1), whole.experts.gate)
        assert torch.equal(torch.cat([one.up for one in shards], 1), whole.experts.up)
        assert torch.equal(torch.cat([one.down for one in shards], 2), whole.experts.down)


def test_ranks_that_do_not_divide_are_refused_with_both_numbers():
    recipe = CASES["layer/mixed"].layer.recipe
    for size, divides in ((2, True), (3, False), (4, True), (8, True), (16, False)):
        spec = recipe.spec("float32", (0, size), False)
        if divides:
            ReferenceBackend().build_layer(spec, recipe.build())
        else:
            with pytest.raises(Refused, match=rf"8 does not divide among {size} ranks"):
                ReferenceBackend().build_layer(spec, recipe.build())


@pytest.mark.parametrize(
    "other", [{"scaling_factor": 2.0}, {"groups": (2, 1)}, {"correction_bias": True}]
)
def test_routers_that_the_reference_lacks_are_unavailable(other):
    recipe = CASES["layer/mixed"].layer.recipe
    spec = replace(recipe.spec("float32", (0, 1), False), **other)
    with pytest.raises(Unavailable):
        ReferenceBackend().build_layer(spec, recipe.build())
