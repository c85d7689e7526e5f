"""A failure is explained by the fault that caused it, told from the answers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from diagnosis import OtherKernel, without_class
from torch import Tensor

from mone_ref.backend import Backend, LoadOptions, Scores, Session
from mone_ref.backends.exact import ExactBackend
from mone_ref.backends.reference import ReferenceBackend, ReferenceSession
from mone_ref.faults import FAULTS, Fault, Patch
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision
from mone_ref.suite import cases as case_files
from mone_ref.suite import data, distance, report, rounding
from mone_ref.suite import mistakes as mistakes_file
from mone_ref.suite.diagnosis import FAR, NEAR, Diagnosis, Diagnostician
from mone_ref.suite.distance import Yardstick
from mone_ref.suite.golden import Budget, GoldenPrompt
from mone_ref.suite.mistakes import Mistakes
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.planted import Planted
from mone_ref.suite.rounding import BrokeDown, Candidate, Flip
from mone_ref.suite.run import Run, Settings
from mone_ref.suite.runner import Harness
from mone_ref.suite.simulate import Simulated, Simulator

ROOT = data.root()
CASES = {case.id: case for case in case_files.load(ROOT)}
NAMES = (
    "dropped",
    "constants-unread",
    "twice",
    "unweighted",
    "neighbour",
    "logical-id-as-row",
    "row-0-keeps-weight",
    "repeated-id-overwrites",
    "narrow-constant-sum",
    "missing-constant-is-zero",
    "ids-wrap-around",
    "dense-constant-sum",
)
LIBRARY = {name: FAULTS[name] for name in NAMES}
"""Enough to tell apart; ``benchmarks/diagnosis.py`` compares with all."""


@pytest.fixture(scope="module")
def everything():
    """What all tests of this file have simulated."""
    simulator = Simulator(ROOT, ExactBackend(), LIBRARY.values())
    yield Diagnostician(simulator, LIBRARY)
    simulator.close()


@pytest.fixture
def doctor(everything):
    return everything.knowing(LIBRARY)


def asked(backend: Backend, case: str, dtype: str) -> Simulated:
    """What an engine does with a case, which it fails."""
    harness = Harness(backend, backend.describe(), ROOT)
    result, judgement = harness.judge(CASES[case], dtype)
    assert result.outcome.failed, result.found
    return Simulated(result, judgement.answers, judgement.parts)


def diagnosed(doctor: Diagnostician, backend: Backend, case: str, dtype: str) -> Diagnosis:
    told = doctor.diagnose(CASES[case], dtype, dtype, asked(backend, case, dtype))
    assert told is not None
    return told


def wrong(name: str) -> Planted:
    """An engine that rounds like another kernel and has one fault."""
    return Planted(OtherKernel(), FAULTS[name])


# -- planted faults


SEEN = [
    ("dropped", "outputs/olmoe-approx", "float32"),
    ("neighbour", "outputs/olmoe-approx", "bfloat16"),
    ("logical-id-as-row", "outputs/olmoe-twelve", "float16"),
    ("twice", "update/single-constants", "float32"),
    ("missing-constant-is-zero", "load/missing-constant", "float32"),
    ("repeated-id-overwrites", "layer/repeated-ids", "float32"),
    ("narrow-constant-sum", "layer/sum-of-many-routes", "bfloat16"),
]


@pytest.mark.parametrize(("name", "case", "dtype"), SEEN)
def test_the_fault_is_named_and_unknown_without_it(doctor, name, case, dtype):
    told = diagnosed(doctor, wrong(name), case, dtype)
    assert told.kind == "known-fault"
    assert name in told.faults
    assert told.distance <= NEAR
    assert told.runner_up is None or told.runner_up.distance >= FAR
    blind = without_class(doctor, FAULTS[name], CASES[case], dtype)
    told = diagnosed(blind, wrong(name), case, dtype)
    assert (told.kind, told.faults) == ("unknown", ())


def test_the_sentence_says_what_is_wrong_and_the_text_how_sure_that_is(doctor):
    told = diagnosed(doctor, wrong("dropped"), "outputs/olmoe-approx", "float32")
    assert told.sentence == FAULTS["dropped"].sentence
    assert told.clauses == FAULTS["dropped"].clauses
    start = "one of dropped, constants-unread: Substituted routes add nothing. Distance "
    assert str(told).startswith(start)
    assert "Breaks SEM-1. First differs at token 0 of prompt 0." in str(told)


def test_a_fault_that_nothing_shows_is_never_named(doctor):
    told = diagnosed(doctor, wrong("dropped"), "outputs/olmoe-approx", "float32")
    assert "ids-wrap-around" not in told.faults
    assert told.runner_up.faults == ("honest",)
    assert "Next class: the right answer, " in str(told)


def test_an_engine_that_breaks_down_is_not_diagnosed(doctor):
    seen = asked(wrong("dropped"), "outputs/olmoe-approx", "float32")
    broken = Simulated(replace(seen.result, outcome=Outcome.ERRORED), {}, {})
    case = CASES["outputs/olmoe-approx"]
    assert doctor.diagnose(case, "float32", "float32", broken) is None


# -- routes that flip


class Flips(ReferenceBackend):
    """Right in all but one route of the first prompt, 16 tokens long, of a substituted model:
    one token takes the expert that just was not chosen."""

    flip = Flip(prompt=0, token=4, layer=1)

    def load(self, checkpoint, options: LoadOptions) -> Session:
        return FlipsSession(super().load(checkpoint, options).model, self.flip)


class FlipsSession(ReferenceSession):
    def __init__(self, model, flip):
        super().__init__(model)
        self.flip = flip

    def score(self, prompts):
        answers = []
        for prompt in prompts:
            first = len(prompt) == 16 and self.model.substitution.layers
            flips = [self.flip] if first else []
            with rounding.flipped(self.model, flips):
                answers += self.model.score([prompt])
        return [Scores(logprobs) for logprobs in answers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_route_that_flips_is_told_from_a_fault(doctor, dtype):
    golden = doctor.golden("olmoe-twelve")
    assert [len(ids) for ids in golden.ids].count(16) == 1
    told = diagnosed(doctor, Flips(), "outputs/olmoe-twelve", dtype)
    assert (told.kind, told.faults, told.clauses) == ("router-flip", (), ())
    assert "token 4 of prompt 0 in layer 1" in told.sentence
    assert (told.place.prompt, told.place.token) == (0, 4)


# -- candidates that are looked at again


def candidate(fault: Fault | None, *prompt: int) -> Candidate:
    return Candidate(ROOT / "fixtures/olmoe-approx/checkpoint", [prompt], "float32", fault)


def past_the_end(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """A wrong step that reads a token too many."""
    return x[len(x)]


def test_a_wrong_step_that_breaks_down_is_told_from_a_mistake_of_the_diagnosis():
    fault = replace(FAULTS["dropped"], patches=(Patch("mone_ref.moe", "forward", past_the_end),))
    with pytest.raises(BrokeDown) as caught:
        rounding.own_budgets(candidate(fault, 5, 17))
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(ValueError, match="a prompt needs token ids"):
        rounding.own_budgets(candidate(None, 10**6))


# -- a run


def judged(doctor: Diagnostician, backend: Backend, *names: str, dtype="float32") -> Mistakes:
    """The diagnoses of an engine that is asked some cases."""
    harness = Harness(backend, backend.describe(), ROOT)
    mistakes = Mistakes(doctor, harness.bench)
    for name in names:
        result, judgement = harness.judge(CASES[name], dtype)
        mistakes.see(CASES[name], result, judgement, result.outcome.failed)
    return mistakes


def test_the_failures_of_a_run_are_explained_together(doctor):
    mistakes = judged(doctor, wrong("dropped"), "outputs/olmoe-approx", "layer/mixed")
    assert list(mistakes.lines()) == [
        "explained    2 of 2 failures: dropped (SEM-1): Substituted routes add nothing."
    ]


def test_a_case_that_passed_rules_out_what_must_fail_it(doctor):
    engine = wrong("narrow-constant-sum")
    alone = judged(doctor, engine, "layer/sum-that-cancels", dtype="bfloat16")
    told = alone.failed["layer/sum-that-cancels", "bfloat16"]
    assert set(told.faults) >= {"narrow-constant-sum", "dropped"}
    assert {"dropped", "narrow-constant-sum"} <= set(next(iter(alone.explained())).faults)
    cases = ("layer/sum-that-cancels", "outputs/olmoe-approx")
    both = judged(doctor.knowing(LIBRARY), engine, *cases, dtype="bfloat16")
    assert [case.id for case, _ in both.passed] == ["outputs/olmoe-approx"]
    assert next(iter(both.explained())).faults == ("narrow-constant-sum",)


def test_so_many_failures_of_a_kind_are_compared(doctor, monkeypatch):
    monkeypatch.setattr(mistakes_file, "MOST_DIAGNOSED", 1)
    mistakes = judged(doctor, wrong("twice"), "layer/mixed", "layer/every-expert")
    assert [told is not None for told in mistakes.failed.values()] == [True, False]
    assert list(mistakes.lines())[-1] == ("undiagnosed  1 of 2 failures: 1 of a kind are compared")


def test_honest_engines_are_not_diagnosed(doctor):
    for dtype in ("float32", "bfloat16", "float16"):
        mistakes = judged(doctor, OtherKernel(), "outputs/qwen3-approx", dtype=dtype)
        assert len(mistakes.passed) == 1
        assert not mistakes.failed
        assert list(mistakes.lines()) == []


# -- traces


def test_a_trace_tells_the_layer_the_step_and_the_multiple_of_the_constants(doctor):
    engine = Planted(ReferenceBackend(), FAULTS["twice"])
    (told,) = judged(doctor, engine, "outputs/olmoe-approx").failed.values()
    assert told.place.layer == 0
    assert "Routes agree" in told.sentence
    assert "only at tokens with a substituted route" in told.sentence
    assert "by 1.00 times the constants' part" in told.sentence


class Nonsense(ReferenceBackend):
    """Wrong where experts are substituted, and what it records has no form."""

    def load(self, checkpoint, options):
        return NonsenseSession(super().load(checkpoint, options).model)


class NonsenseSession(ReferenceSession):
    def score(self, prompts):
        factor = 2 if self.model.substitution.layers else 1
        return [Scores(factor * scores.logprobs) for scores in super().score(prompts)]

    def trace(self, prompts):
        return [{"layers.0.moe_out": torch.zeros(1), "layers.1.router_ids": None}] * len(prompts)


def test_a_trace_that_makes_no_sense_is_left_aside(doctor):
    (told,) = judged(doctor, Nonsense(), "outputs/olmoe-approx").failed.values()
    assert told.kind == "unknown"
    assert told.sentence == "No known fault explains it."
    assert told.place.layer is None


# -- what is told


def run_with(backend: Backend, report_path, *, diagnosis: bool) -> Run:
    """A run of one case, with the whole library."""
    settings = Settings(
        "fake", ("float32",), ("outputs/olmoe-approx",), report=report_path, diagnosis=diagnosis
    )
    run = Run(settings, backend, ROOT, ExactBackend())
    run.judge(*run.planned[0])
    return run


def test_the_report_has_the_diagnosis_and_the_text_a_line(tmp_path):
    run = run_with(wrong("twice"), tmp_path / "r.jsonl", diagnosis=True)
    told = run.explain(run.results[0])
    closing = run.finish()
    (line,) = report.read(tmp_path / "r.jsonl").results
    assert line["diagnosis"]["faults"][0] == "twice"
    assert line["diagnosis"]["clauses"] == ["SEM-1"]
    assert line["diagnosis"]["runner_up"]["distance"] >= FAR
    assert "\n  diagnosis  twice: Constants are added twice. " in told
    expected = "explained    1 of 1 failure: twice (SEM-1): Constants are added twice."
    assert expected in closing


def test_without_diagnosis_nothing_is_simulated(tmp_path):
    run = run_with(wrong("twice"), tmp_path / "r.jsonl", diagnosis=False)
    assert run.mistakes is None
    assert "diagnosis  " not in run.explain(run.results[0])
    assert not [line for line in run.finish() if line.startswith("explained")]
    (line,) = report.read(tmp_path / "r.jsonl").results
    assert line["diagnosis"] is None


def test_what_the_report_keeps_is_json(doctor):
    told = diagnosed(doctor, Flips(), "outputs/olmoe-twelve", "float32")
    assert json.loads(json.dumps(told.as_dict(), allow_nan=False)) == told.as_dict()


# -- distances, by hand


def yardstick() -> Yardstick:
    """Two tokens, two ids; a token's budget is 0.5 and 2, that of the tensor 4."""
    budget = Budget(torch.tensor([0.5, 2.0], dtype=torch.float64), 4.0)
    golden = torch.zeros(2, 2, dtype=torch.float64)
    return Yardstick("float32", "float32", (GoldenPrompt([7, 8], golden, {"float32": budget}),))


def one(rows, ids=None) -> Mapping[str, tuple[Scores]]:
    table = torch.tensor(rows, dtype=torch.float64)
    return {"alone": (Scores(table, None if ids is None else torch.tensor(ids)),)}


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "other", "ratio", "first"),
    [
        (one([[1, -1], [0, 0]]), one([[0, 0], [0, 0]]), 2.0, (0, 0)),  # rms 1 over 0.5
        (one([[0, 0], [2, -2]]), one([[0, 0], [0, 0]]), 1.0, None),  # rms 2 over 2
        (one([[NAN, 1], [0, 0]]), one([[NAN, 1], [0, 0]]), 0.0, None),
        (one([[NAN, 1], [0, 0]]), one([[0, 1], [0, 0]]), float("inf"), (0, 0)),
        (one([[1, -1]]), one([[0, 0], [9, 9]]), 2.0, (0, 0)),  # no last row
        (one([[3], [0]], [[1], [0]]), one([[9, 1], [0, 9]]), 0.5, None),  # 2 over 4
    ],
    ids=["token", "within", "equal NaN", "other NaN", "without the last row", "top-n"],
)
def test_distance(found, other, ratio, first):
    away = distance.of_answers(found, other, yardstick())
    assert away.ratio == ratio
    assert away.beyond(1.0) == first


def test_no_answer_is_apart_from_any(doctor):
    answered = asked(wrong("dropped"), "outputs/olmoe-approx", "float32")
    silent = Simulated(replace(answered.result, outcome=Outcome.WRONGLY_REFUSED), {}, {})
    assert distance.between(answered, silent, yardstick()) is distance.APART
    assert distance.between(silent, silent, yardstick()).ratio == 0
    broken = Simulated(replace(silent.result, outcome=Outcome.CRASHED), {}, {})
    assert distance.between(broken, broken, yardstick()) is distance.APART
