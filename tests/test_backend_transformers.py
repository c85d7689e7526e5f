"""The transformers backend: what it says of itself, its batches, and single layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_layer import spec, tensors
from torch import Tensor

from mone_ref import backends
from mone_ref.backend import LoadOptions, Refused, Unavailable
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.backends.transformers import TransformersBackend
from mone_ref.errors import Phase
from mone_ref.integrations.substituted_experts import SubstitutedExperts
from mone_ref.suite import cases
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.runner import Harness


def test_it_is_known_by_name() -> None:
    assert isinstance(backends.find("transformers"), TransformersBackend)


def test_a_prompt_is_scored_alike_alone_and_padded(approx: Path) -> None:
    session = TransformersBackend().load(approx, LoadOptions())
    short, long = [4, 9, 2], [1, 2, 3, 4, 5, 6, 7]
    together = session.score([short, long])
    assert [len(scores.logprobs) for scores in together] == [3, 7]
    for prompt, scores in zip((short, long), together, strict=True):
        (alone,) = session.score([prompt])
        # one product in another blocking: float32 rounding of log-probabilities under 100
        assert (alone.logprobs - scores.logprobs).abs().max() < 100 * 128 * 2.0**-24


ROOT = Path(__file__).resolve().parent.parent
CASES = {case.id: case for case in cases.load(ROOT)}


def judged(name: str, dtype: str = "float32") -> Result:
    engine = TransformersBackend()
    return Harness(engine, engine.describe(), ROOT).run(CASES[name], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["decode/olmoe-approx", "decode/qwen3-approx"])
def test_decoding_conforms(name: str, dtype: str) -> None:
    result = judged(name, dtype)
    assert result.outcome is Outcome.OK, result.found


def dropped(experts: Any, ids: Tensor, right: Tensor) -> Tensor:
    """A pass of one token adds no constants."""
    return right if len(ids) > 1 else torch.zeros_like(right)


def dropped_in_a_batch(experts: Any, ids: Tensor, right: Tensor) -> Tensor:
    """Nor does a pass of one token for each of nine prompts."""
    return right if len(ids) != 9 else torch.zeros_like(right)


def kept(experts: Any, ids: Tensor, right: Tensor) -> Tensor:
    """The buffer of a pass of one token is filled by the first such pass and never again."""
    if len(ids) > 1:
        experts.buffer = None
        return right
    experts.buffer = right if getattr(experts, "buffer", None) is None else experts.buffer
    return experts.buffer


@pytest.mark.parametrize("wrong", [dropped, dropped_in_a_batch, kept])
def test_an_engine_with_a_cache_that_decodes_wrong_is_seen(
    wrong: Callable[[Any, Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    constant_sum = SubstitutedExperts.constant_sum

    def bent(self: Any, weights: Tensor, ids: Tensor) -> Tensor:
        return wrong(self, ids, constant_sum(self, weights, ids))

    monkeypatch.setattr(SubstitutedExperts, "constant_sum", bent)
    # Prompts show nothing of it.
    assert judged("outputs/olmoe-approx").outcome is Outcome.OK
    result = judged("decode/olmoe-approx")
    assert result.outcome is Outcome.MISMATCH, result.found


def test_reload_is_refused(approx: Path) -> None:
    session = TransformersBackend().load(approx, LoadOptions())
    with pytest.raises(Refused) as refused:
        session.reload(approx)
    assert refused.value.phase is Phase.RELOAD


@pytest.mark.parametrize("args", [{"quantization": "fp8"}, {"dtype": "float32"}])
def test_engine_arguments_are_a_short_list(approx: Path, args: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="experts_implementation, attn_implementation"):
        TransformersBackend().load(approx, LoadOptions(engine_args=args))


@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_more_than_one_rank_is_not_run_as_one(approx: Path, ranks: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one process"):
        TransformersBackend().load(approx, LoadOptions(**ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize("normalise", [False, True])
def test_a_layer_is_the_oracles(normalise: bool) -> None:
    layer = spec(normalise=normalise)
    ours = TransformersBackend().build_layer(layer, tensors(layer))
    oracle = ReferenceBackend().build_layer(layer, tensors(layer))
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(5))
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(6))
    expected = oracle.forward(x, logits)
    # float32: sums of at most 7 products, three deep, of values as large as the answer's
    assert (ours.forward(x, logits) - expected).abs().max() <= 64 * 2.0**-24 * expected.abs().max()
    assert ours.expert_rows() == 4


@pytest.mark.parametrize(
    "changes", [{"tp": (1, 2)}, {"scaling_factor": 2.5}, {"scoring": "sigmoid"}, {"groups": (2, 1)}]
)
def test_layers_that_cannot_be_built_say_so(changes: dict[str, object]) -> None:
    layer = spec(**changes)
    with pytest.raises(Unavailable):
        TransformersBackend().build_layer(layer, tensors(layer))
