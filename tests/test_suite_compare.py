"""The number rule: every way to be wrong is shown to fail, every honest way to pass."""

from __future__ import annotations

import math
import re

import pytest
import torch
from decimals import right
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mone_ref.backend import Scores
from mone_ref.suite import golden
from mone_ref.suite.compare import MULTIPLIER, change_flaw, compare
from mone_ref.suite.golden import Budget, GoldenError, GoldenPrompt

TOKENS, VOCABULARY = 64, 12
TOKEN_BUDGET, MAXIMUM = 1e-3, 4e-3


def prompt(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> GoldenPrompt:
    """Distinct log-probabilities of a plain pattern; every row is another one."""
    steps = torch.arange(tokens * vocabulary, dtype=torch.float64)
    logprobs = (steps * 0.37).sin().reshape(tokens, vocabulary).log_softmax(dim=1)
    token = torch.full((tokens,), TOKEN_BUDGET, dtype=torch.float64)
    return GoldenPrompt(list(range(tokens)), logprobs, {"float32": Budget(token, MAXIMUM)})


GOLDEN = prompt()


def judged(logprobs: torch.Tensor, ids: torch.Tensor | None = None, of: GoldenPrompt = GOLDEN):
    return compare(Scores(logprobs, ids), of, "float32")


def exact() -> torch.Tensor:
    return GOLDEN.logprobs.clone()


def test_the_golden_itself_passes_with_error_zero():
    comparison = judged(exact())
    assert comparison.flaw == ""
    assert comparison.numbers.token_error == comparison.numbers.max_error == 0
    assert comparison.numbers.norm_ratio == comparison.numbers.argmax == 1


def test_a_token_passes_at_its_limit_and_fails_beyond():
    # Every value of token 5 off by the same amount: rms and largest error are that amount.
    assert MULTIPLIER == 3
    for ratio, passes in (("2.997", True), ("3.003", False)):
        answer = exact()
        answer[5] += float(ratio) * TOKEN_BUDGET
        comparison = judged(answer)
        assert (comparison.flaw == "") is passes
        assert comparison.numbers.token == 5
        assert right(ratio, comparison.numbers.token_ratio)


def test_the_largest_error_has_its_own_limit():
    # One value of a token is off: the rms is that error divided by sqrt(V), below 3 b.
    budgets = {"float32": Budget(GOLDEN.budgets["float32"].token, maximum=1e-3)}
    of = GoldenPrompt(GOLDEN.ids, GOLDEN.logprobs, budgets)
    for factor, flaw in ((0.999, ""), (1.001, "largest error 0.003 is over 3 x its budget 0.001")):
        answer = exact()
        answer[9, 3] += factor * MULTIPLIER * 1e-3
        comparison = judged(answer, of=of)
        assert comparison.numbers.token_ratio < MULTIPLIER
        assert comparison.flaw == flaw


def test_one_wrong_token_of_64_fails():
    answer = exact()
    answer[41] = answer[41].roll(1)
    comparison = judged(answer)
    assert comparison.flaw.startswith("token 41: rms error")
    assert comparison.numbers.argmax == 63 / 64


@pytest.mark.parametrize(
    ("spoil", "flaw"),
    [
        (lambda y: y.roll(1, dims=0), "token"),
        (lambda y: y.flip(1), "token"),
        (lambda y: 2 * y, "token"),
        (lambda y: y.exp(), "token"),
        (lambda y: y[:-2], r"shape \[62, 12\], expected 64 rows"),
        (lambda y: y[:, :-1], r"shape \[64, 11\], expected \[64, 12\]"),
        (lambda y: y[:0], r"shape \[0, 12\], expected 64 rows"),
        (lambda y: y[:, :0], r"shape \[64, 0\]: nothing to compare"),
        (lambda y: y.flatten(), r"shape \[768\]"),
        (lambda y: y.long(), "no float tensor but torch.int64"),
        (lambda y: y.tolist(), "no float tensor but list"),
        (lambda y: y.index_fill(0, torch.tensor([3]), torch.nan), "12 NaN in the answer, 0 in"),
        (lambda y: y.index_fill(1, torch.tensor([3]), torch.nan), "64 NaN in the answer, 0 in"),
        (lambda y: y.index_fill(1, torch.tensor([3]), -torch.inf), "64 infinities in the answer"),
        (lambda y: torch.full_like(y, torch.nan), "NaN in the answer"),
    ],
)
def test_wrong_answers_fail(spoil, flaw):
    comparison = judged(spoil(exact()))
    assert comparison.flaw
    assert re.search(flaw, comparison.flaw)


def test_a_factor_two_shows_in_the_norm():
    assert judged(2 * exact()).numbers.norm_ratio == 2


def test_nan_on_both_sides_is_no_agreement():
    both = exact()
    both[3, 4] = torch.nan
    of = GoldenPrompt(GOLDEN.ids, both, GOLDEN.budgets)
    assert judged(both, of=of).flaw == "1 NaN in the answer, 1 in the golden, of 768"


def test_the_last_row_may_be_absent_but_no_other_and_not_all():
    assert judged(exact()[:-1]).flaw == ""
    assert "expected 64 rows" in judged(exact()[:-2]).flaw
    assert "nothing to compare" in judged(torch.zeros(0, 12), of=prompt(1)).flaw


def test_a_last_row_that_is_there_is_judged():
    answer = exact()
    answer[-1] += 1
    assert judged(answer).flaw.startswith("token 63")
    answer[-1] = torch.nan
    assert "12 NaN" in judged(answer).flaw


def test_lower_precision_answers_are_compared_in_float64():
    assert judged(exact().float()).numbers.max_error < 1e-6
    assert judged(exact().bfloat16()).numbers.max_error > 1e-3


# -- top-n


def top(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = exact().topk(n)
    return values, ids


def test_the_likeliest_ids_pass():
    for n in (1, 5, VOCABULARY):
        assert judged(*top(n)).flaw == ""


def test_a_left_out_likely_id_fails():
    values, ids = top(6)
    # The likeliest id of token 7 gives way to the sixth: all values returned are right.
    values, ids = values[:, :5].clone(), ids[:, :5].clone()
    all_values, all_ids = top(6)
    values[7], ids[7] = all_values[7, 1:], all_ids[7, 1:]
    flaw = judged(values, ids).flaw
    assert flaw.startswith(f"token 7: id {int(all_ids[7, 0])} at")
    assert "is not among the 5 returned" in flaw


def test_a_left_out_id_within_the_budget_passes():
    # Two ids closer than the budget: an honest engine may rank either first.
    logprobs = torch.tensor([[-1.0, -1.0005, -5.0]], dtype=torch.float64)
    budget = Budget(torch.tensor([1e-3], dtype=torch.float64), 1e-3)
    of = GoldenPrompt([0], logprobs, {"float32": budget})
    assert judged(torch.tensor([[-1.0005]]), torch.tensor([[1]]), of=of).flaw == ""
    assert judged(torch.tensor([[-5.0]]), torch.tensor([[2]]), of=of).flaw


@pytest.mark.parametrize("amount", [0.999, 1.001])
def test_a_top_n_value_has_the_limit_of_the_largest_error(amount):
    values, ids = top(5)
    values = values.clone()
    values[3, 0] += amount * MULTIPLIER * MAXIMUM
    assert (judged(values, ids).flaw == "") is (amount < 1)


@pytest.mark.parametrize(
    ("values", "ids", "flaw"),
    [
        (lambda v: v, lambda i: i + 1, "ids between"),
        (lambda v: v, lambda i: i - 1, "ids between"),
        (lambda v: v, lambda i: i[:, :1].expand(-1, 5), "an id is returned twice"),
        (lambda v: v, lambda i: i[:, :4], "beside log-probabilities"),
        (lambda v: v, lambda i: i.double(), "no integer tensor"),
        (lambda v: v, lambda i: i.roll(1, dims=0), "is not among|is over"),
        (lambda v: v.roll(1, dims=1), lambda i: i, "is over"),
        (lambda v: v[:, :0], lambda i: i[:, :0], "nothing to compare"),
        (lambda v: v.index_fill(0, torch.tensor([3]), torch.nan), lambda i: i, "5 NaN"),
    ],
)
def test_wrong_top_n_answers_fail(values, ids, flaw):
    good_values, good_ids = top(5)
    found = judged(values(good_values), ids(good_ids)).flaw
    assert re.search(flaw, found)


def test_all_ids_are_judged_like_a_full_answer():
    values, ids = top(VOCABULARY)
    values = values + 0.9 * MULTIPLIER * MAXIMUM  # within the largest error, over the rms
    assert "rms error 0.0108 is over 3 x its budget 0.001" in judged(values, ids).flaw


def test_a_top_n_answer_may_lack_the_last_row():
    for n in (5, VOCABULARY):
        values, ids = top(n)
        assert judged(values[:-1], ids[:-1]).flaw == ""
        values = values.clone()
        values[-1] = torch.nan
        assert "NaN" in judged(values, ids).flaw


# -- equal bit for bit


def test_unchanged_answers_are_equal_and_nan_rows_too():
    answer = exact()
    answer[-1] = torch.nan
    assert change_flaw([Scores(answer)], [Scores(answer.clone())]) == ""


@pytest.mark.parametrize(
    ("after", "flaw"),
    [
        ([], "1 answers before, 0 after"),
        ([Scores(exact().float())], "float32"),
        ([Scores(exact()[:-1])], r"\[63, 12\] after"),
        ([Scores(exact(), torch.zeros(64, 12, dtype=torch.int64))], "other ids"),
        ([Scores(exact() + 1e-15)], "values changed, by up to"),
        ([Scores(exact().index_fill(0, torch.tensor([2]), torch.nan))], "12 of 768 .* inf"),
    ],
)
def test_changed_answers_are_told(after, flaw):
    assert re.search(flaw, change_flaw([Scores(exact())], after))


@given(st.integers(0, 63), st.integers(0, 11), st.booleans())
def test_any_single_bit_that_moved_is_seen(token, vocab_id, up):
    moved = exact()
    toward = torch.tensor(math.inf if up else -math.inf, dtype=torch.float64)
    moved[token, vocab_id] = torch.nextafter(moved[token, vocab_id], toward)
    assert "1 of 768 values changed" in change_flaw([Scores(exact())], [Scores(moved)])


# -- golden files


def golden_tensors() -> dict[str, torch.Tensor]:
    return {
        "prompt.0.ids": torch.arange(3),
        "prompt.0.logprobs": torch.zeros(3, 4, dtype=torch.float64),
        "prompt.0.float32.token": torch.ones(3, dtype=torch.float64),
        "prompt.0.float32.max": torch.tensor(1.0, dtype=torch.float64),
    }


def test_a_golden_file_is_read(tmp_path):
    path = tmp_path / "golden.safetensors"
    save_file(golden_tensors(), path, metadata={"compute_types": "float32"})
    read = golden.read(path)
    assert read.ids == [[0, 1, 2]]
    assert read.compute_types == ("float32",)
    assert read.prompts[0].budgets["float32"].maximum == 1


@pytest.mark.parametrize(
    ("change", "types", "flaw"),
    [
        ({}, "", "name no compute_types"),
        ({}, "float32,tf32", "prompt.0.tf32.token is missing"),
        ({"prompt.0.ids": None}, "float32", "holds no prompt"),
        ({"prompt.0.ids": torch.arange(2)}, "float32", r"logprobs has shape \[3, 4\]"),
        ({"prompt.0.ids": torch.arange(0)}, "float32", r"ids has shape \[0\]"),
        ({"prompt.0.logprobs": torch.full((3, 4), torch.nan)}, "float32", "NaN or infinity"),
        ({"prompt.0.float32.token": torch.zeros(3)}, "float32", "not positive"),
        ({"prompt.0.float32.max": torch.tensor(-1.0)}, "float32", "not positive"),
        ({"prompt.1.ids": torch.arange(3)}, "float32", "prompt.1.logprobs is missing"),
    ],
)
def test_a_golden_file_that_cannot_judge_is_refused(change, types, flaw, tmp_path):
    path = tmp_path / "golden.safetensors"
    tensors = {key: t for key, t in (golden_tensors() | change).items() if t is not None}
    save_file(tensors, path, metadata={"compute_types": types})
    with pytest.raises(GoldenError, match=f"golden.safetensors: .*{flaw}"):
        golden.read(path)


def test_a_golden_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "golden.safetensors"
    path.write_bytes(b"not one")
    with pytest.raises(GoldenError, match=r"golden\.safetensors"):
        golden.read(path)
