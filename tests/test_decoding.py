"""Decoding judged: who passes, who does not, and what no honest engine is held to."""

from __future__ import annotations

from pathlib import Path

import fake_decoders as decoders
import fake_engines as fakes
import pytest
import torch

from mone_ref import generation, loading
from mone_ref.backends import process
from mone_ref.backends.reference import ReferenceBackend
from mone_ref.faults import FAULTS, decode
from mone_ref.fill.fixture import GOLDEN_TOLERANCE
from mone_ref.suite import cases, decoding, golden
from mone_ref.suite.cases import Kind
from mone_ref.suite.compare import MULTIPLIER, Comparison
from mone_ref.suite.decoding import STEPS, Followed
from mone_ref.suite.golden import Budget, GoldenPrompt
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.runner import Harness
from mone_ref.suite.teacher import Lesson, Teacher

ROOT = Path(__file__).resolve().parent.parent
CASES = [case for case in cases.load(ROOT) if case.kind is Kind.DECODE]
CASE = next(case for case in CASES if case.id == "decode/olmoe-approx")
DTYPES = ("float32", "bfloat16", "float16")


def judged(engine) -> Result:
    return Harness(engine, engine.describe(), ROOT).run(CASE, "float32")


# -- engines


@pytest.mark.parametrize("kind", [decoders.Decodes, decoders.ShowsTop20, decoders.AnswersTensors])
def test_an_engine_that_decodes_right_passes(kind):
    result = judged(kind())
    assert result.outcome is Outcome.OK, result.found
    assert result.numbers is not None


@pytest.mark.parametrize(
    ("kind", "outcome", "found"),
    [
        (fakes.Honest, "not-applicable", "the engine has no generate()"),
        (decoders.DoesNotShow, "not-applicable", "tokens come without scores"),
        (decoders.Breaks, "errored", "no block is free"),
        (decoders.AnswersBareTokens, "errored", "generate() returned list, not Generation"),
        (decoders.EndsEarly, "mismatch", "3 tokens, expected 4"),
        (decoders.LosesTheLastRow, "mismatch", "3 rows of log-probabilities, expected 4"),
        (decoders.NaNAtTheEnd, "mismatch", "the log-probabilities hold NaN or infinity"),
        (decoders.ForeignTokens, "mismatch", "expected ids in [0, 128)"),
        # These are wrong without substitution too, which is no matter of this suite.
        (decoders.TellsOtherTokens, "not-judged", "olmoe-approx-plain, decoded: mismatch"),
        (decoders.SwapsContinuations, "not-judged", "olmoe-approx-plain, decoded: mismatch"),
    ],
)
def test_each_engine_gets_its_outcome(kind, outcome, found):
    result = judged(kind())
    assert str(result.outcome) == outcome
    assert found in result.found


@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.group == decode.GROUP])
def test_constants_that_are_wrong_in_decoding_alone_are_seen(name, monkeypatch):
    monkeypatch.setattr(decoders.Planted, "fault", name)
    result = judged(decoders.Planted())
    assert result.outcome is Outcome.MISMATCH
    assert "over 3 x its budget" in result.found
    # Continuations are told, since another run of the engine may take other tokens.
    assert "continued by [" in result.found


@pytest.mark.parametrize(
    ("name", "alone"),
    [("decode-first-of-batch-only", False), ("decode-alone-without-constants", True)],
)
def test_it_takes_prompts_alone_and_together_to_see_both(name, alone, monkeypatch):
    monkeypatch.setattr(decoders.Planted, "fault", name)
    assert (", alone" in judged(decoders.Planted()).found) is alone


@pytest.mark.parametrize("kind", ["Decodes", "DoesNotShow", "NaNAtTheEnd"])
def test_an_engine_in_its_own_process_is_told_the_same(kind):
    engine = process.isolated(f"fake_decoders:{kind}")
    try:
        isolated = judged(engine)
    finally:
        engine.close()
    here = judged(getattr(decoders, kind)())
    assert (isolated.outcome, isolated.found) == (here.outcome, here.found)


# -- what the cases see


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_sees_two_steps_of_substituted_tokens(case, dtype):
    """A buffer that is reused shows at the second token that comes by itself."""
    pinned = golden.read(ROOT / "fixtures" / case.fixture / "golden.safetensors")
    checkpoint = ROOT / "fixtures" / case.fixture / "checkpoint"
    model = loading.load(checkpoint, getattr(torch, dtype))
    teacher = Teacher(checkpoint, dtype, pinned)
    prompts = decoding.prompts_of(pinned)
    made = generation.generate_each(model, prompts, STEPS)
    lessons = [
        teacher.lesson(*pair) for pair in zip(prompts, (m.tokens for m in made), strict=True)
    ]
    assert max(lesson.decoded for lesson in lessons) >= 2


def test_prompts_are_those_of_the_fixture_and_single_tokens():
    def prompt(ids):
        return GoldenPrompt(ids, torch.zeros(len(ids), 9), {})

    found = decoding.prompts_of(
        golden.Golden(tuple(map(prompt, [[3, 1], [7], [3, 2], [7, 4]])), ())
    )
    assert found == [[3, 1], [7], [3, 2], [7, 4], [3]]


# -- the teacher


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    pinned = golden.read(ROOT / "fixtures" / "olmoe-approx" / "golden.safetensors")
    return Teacher(ROOT / "fixtures" / "olmoe-approx" / "checkpoint", "bfloat16", pinned)


def test_the_right_rows_are_the_oracles_along_any_tokens(teacher):
    prompt, tokens = [4, 9, 2], [17, 5, 80, 11]
    lesson = teacher.lesson(prompt, tokens)
    oracle = loading.load(ROOT / "fixtures" / "olmoe-approx" / "checkpoint", torch.float64)
    (whole,) = oracle.score([prompt + tokens[:-1]])
    assert lesson.rows is not None
    count = len(lesson.rows.ids)
    assert lesson.rows.ids == [2, 17, 5, 80][:count]
    away = (lesson.rows.logprobs - whole[2 : 2 + count]).abs().max()
    assert away <= GOLDEN_TOLERANCE * whole.abs().max()  # sums of fewer rows, in another order


def test_rows_end_where_rounding_may_change_a_route(teacher):
    """In bfloat16 most continuations pass such a token; what follows it rests on it."""
    prompts = [prompt.ids for prompt in golden_of("olmoe-approx").prompts]
    found = [teacher.lesson(ids, [token] * 9) for ids in prompts for token in (3, 60)]
    counts = {len(lesson.rows.ids) for lesson in found if lesson.rows}
    assert min(counts) < 9
    for ids in prompts:  # pinned prompts are certified themselves
        assert teacher.lesson(ids, [0]).rows is not None


def golden_of(fixture: str) -> golden.Golden:
    return golden.read(ROOT / "fixtures" / fixture / "golden.safetensors")


def test_no_budget_is_smaller_than_any_prompt_of_the_fixture_has(teacher):
    pinned = [prompt.budgets["bfloat16"] for prompt in golden_of("olmoe-approx").prompts]
    lesson = teacher.lesson([4], [9, 9, 9, 9])
    assert lesson.rows is not None
    budget = lesson.rows.budgets["bfloat16"]
    assert float(budget.token.min()) >= max(float(one.token.min()) for one in pinned)
    assert budget.maximum >= max(one.maximum for one in pinned)


# -- the rule


def lesson_of(logprobs: torch.Tensor, maximum: float) -> GoldenPrompt:
    budget = Budget(torch.full((len(logprobs),), maximum), maximum)
    return GoldenPrompt(list(range(len(logprobs))), logprobs, {"float32": budget})


def test_a_token_may_be_as_far_below_the_likeliest_as_two_errors_reach():
    rows = lesson_of(torch.tensor([[-1.0, -1.5, -9.0], [-2.0, -0.25, -3.0]]).double(), 0.125)
    limit = 2 * MULTIPLIER * 0.125  # 0.75
    assert decoding.greedy_flaw([1, 1], rows, "float32") == ""
    found = decoding.greedy_flaw([1, 0], rows, "float32")
    assert found.startswith("token 1: 0 was chosen, 1.75 nats below the likeliest")
    assert f"more than {limit:.3g}" in found


def test_no_honest_choice_is_called_a_choice_of_another_kind():
    """Whatever errors within the limit an engine makes, its own likeliest token passes."""
    seeded = torch.Generator().manual_seed(8)
    truth = torch.randn(2000, 6, generator=seeded).double()
    error = (torch.rand(truth.shape, generator=seeded).double() * 2 - 1) * MULTIPLIER * 0.125
    chosen = (truth + error).argmax(dim=1).tolist()
    assert chosen != truth.argmax(dim=1).tolist()
    assert decoding.greedy_flaw(chosen, lesson_of(truth, 0.125), "float32") == ""


def test_what_nobody_could_see_is_no_pass():
    fine = Comparison("")
    uncertified = Followed("prompt 0, alone", fine, Lesson(None, 0))
    plain = Followed("prompt 1, alone", fine, Lesson(lesson_of(torch.zeros(1, 3), 1.0), 0))
    for followed, substitutes, outcome in (
        ([uncertified], True, Outcome.NOT_EXERCISED),
        ([uncertified], False, Outcome.NOT_EXERCISED),
        ([uncertified, plain], True, Outcome.NOT_EXERCISED),
        ([uncertified, plain], False, Outcome.OK),
    ):
        assert decoding.of_followed(followed, substitutes).outcome is outcome


# -- the reference


def test_the_reference_takes_the_likeliest_token_of_each_step(approx: Path):
    model = loading.load(approx)
    prompts = [[4, 9, 2], [7]]
    for prompt, made in zip(prompts, generation.generate_each(model, prompts, 3), strict=True):
        (whole,) = model.score([prompt + list(made.tokens)])
        first = len(prompt) - 1
        rows = whole[first : first + 3]
        assert list(made.tokens) == rows.argmax(dim=1).tolist()
        # One token more in a product: float32 rounding of log-probabilities under 100.
        assert (made.scores.logprobs - rows).abs().max() < 100 * 128 * 2.0**-24


def test_room_is_asked_for_the_prompt_and_what_follows():
    asked = []

    class Notes(ReferenceBackend):
        def load(self, checkpoint, options):
            asked.append((options.max_tokens, options.max_prompts))
            return super().load(checkpoint, options)

    engine = Notes()
    judged(engine)
    assert (40 + STEPS, 9) in asked  # the longest prompt has 40 tokens; 5 prompts, 4 single tokens
