"""The judge judged: engines with one flaw of character, and what each must be told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_engines as fakes
import pytest
import torch
from patience import HANG

from mone_ref.backend import Backend
from mone_ref.suite import cases, errormap, spec, verdict
from mone_ref.suite.bench import Options
from mone_ref.suite.cases import Case, CaseError
from mone_ref.suite.runner import Harness
from mone_ref.suite.verdict import Word

ROOT = Path(__file__).resolve().parent.parent
WORDS = errormap.parse({"MISSING_CONSTANT": ["no novice for expert"]})

CONTROL = "controls/olmoe-approx-plain"
OUTPUT = "outputs/olmoe-approx"
ROWS = "rows/olmoe-approx"
MISSING = "load/missing-constant"
LORA = "unsupported/lora"
QUANTISED = "unsupported/quantized-experts"
CONTROL_FIXTURE = "olmoe-approx-plain"
UPDATE = "update/single-constants"
BAD_UPDATE = "update/bad-tensor-changes-nothing"
RELOAD = "update/reload-refused"
RELOAD_KEEPS = "update/reload-keeps-weights"
CHOSEN = (CONTROL, OUTPUT, ROWS, MISSING, LORA, UPDATE, BAD_UPDATE, RELOAD, RELOAD_KEEPS)

NOTHING_BUT_ROWS = {
    OUTPUT: "not-judged",
    MISSING: "void",
    LORA: "void",
    UPDATE: "not-judged",
    BAD_UPDATE: "void",
    RELOAD: "void",
    RELOAD_KEEPS: "void",
}

NO_NUMBERS = {**NOTHING_BUT_ROWS, **dict.fromkeys((CONTROL, OUTPUT, UPDATE), "mismatch")}

# Engine -> outcomes other than ok, and the verdict on these cases as if they were the suite.
EXPECTED: dict[type[Backend], tuple[dict[str, str], Word]] = {
    fakes.Honest: ({}, Word.CONFORMANT),
    fakes.ScoresPromptsOnly: ({}, Word.CONFORMANT),
    fakes.ReturnsTop20: ({}, Word.CONFORMANT),
    fakes.ReusesItsBuffer: ({}, Word.CONFORMANT),
    fakes.Reloads: ({RELOAD_KEEPS: "not-exercised"}, Word.CONFORMANT),
    fakes.HasNoModels: (dict.fromkeys(CHOSEN, "not-applicable"), Word.INCOMPLETE),
    # about refusals
    fakes.AcceptsEverything: (
        {
            MISSING: "wrongly-accepted",
            LORA: "not-judged",
            BAD_UPDATE: "wrongly-accepted",
            RELOAD: "mismatch",
            RELOAD_KEEPS: "not-exercised",
        },
        Word.NOT_CONFORMANT,
    ),
    fakes.RefusesEverything: (
        {**NOTHING_BUT_ROWS, CONTROL: "wrongly-refused", ROWS: "wrongly-refused"},
        Word.NOT_CONFORMANT,
    ),
    fakes.RefusesForAnotherReason: (
        {MISSING: "wrong-group", LORA: "wrong-group"},
        Word.NOT_CONFORMANT,
    ),
    fakes.RefusesWithoutACode: (
        {MISSING: "wrong-group", LORA: "wrong-group"},
        Word.NOT_CONFORMANT,
    ),
    fakes.SaysItWasLate: ({MISSING: "late", LORA: "wrong-group"}, Word.NOT_CONFORMANT),
    fakes.RefusesLate: ({MISSING: "late", LORA: "wrong-group"}, Word.NOT_CONFORMANT),
    fakes.HasItsOwnWords: ({LORA: "wrong-group"}, Word.NOT_CONFORMANT),
    fakes.LogsItsWords: ({LORA: "wrong-group"}, Word.NOT_CONFORMANT),
    fakes.Stumbles: ({MISSING: "errored", LORA: "errored"}, Word.NOT_CONFORMANT),
    fakes.RunsOutOfMemory: ({MISSING: "crashed", LORA: "crashed"}, Word.NOT_CONFORMANT),
    fakes.RunsOutOfDeviceMemory: ({MISSING: "crashed", LORA: "crashed"}, Word.NOT_CONFORMANT),
    fakes.Leaves: ({MISSING: "crashed", LORA: "crashed"}, Word.NOT_CONFORMANT),
    fakes.InterruptsItself: ({MISSING: "crashed", LORA: "crashed"}, Word.NOT_CONFORMANT),
    fakes.Hangs: ({MISSING: "timeout", LORA: "timeout"}, Word.NOT_CONFORMANT),
    fakes.SwallowsTheAlarm: ({MISSING: "timeout", LORA: "timeout"}, Word.NOT_CONFORMANT),
    # about answers
    fakes.AnswersNaN: (NO_NUMBERS, Word.NOT_CONFORMANT),
    fakes.AnswersOneNumber: (NO_NUMBERS, Word.NOT_CONFORMANT),
    fakes.AnswersNothing: (
        {
            **NOTHING_BUT_ROWS,
            **dict.fromkeys((CONTROL, OUTPUT, ROWS, UPDATE), "errored"),
        },
        Word.NOT_CONFORMANT,
    ),
    fakes.LosesTheVocabulary: (
        dict.fromkeys((CONTROL, OUTPUT, UPDATE), "mismatch"),
        Word.NOT_CONFORMANT,
    ),
    fakes.AnswersForOneToken: (
        dict.fromkeys((CONTROL, OUTPUT, UPDATE), "mismatch"),
        Word.NOT_CONFORMANT,
    ),
    fakes.SwapsTokens: (
        {CONTROL: "mismatch", OUTPUT: "not-judged", UPDATE: "not-judged"},
        Word.INCOMPLETE,
    ),
    fakes.SwapsPrompts: (
        dict.fromkeys((CONTROL, OUTPUT, UPDATE), "mismatch"),
        Word.NOT_CONFORMANT,
    ),
    # about sessions
    fakes.CannotLetGo: (
        {
            CONTROL: "errored",
            OUTPUT: "errored",
            ROWS: "errored",
            UPDATE: "errored",
            BAD_UPDATE: "errored",
            RELOAD: "errored",
            RELOAD_KEEPS: "errored",
        },
        Word.NOT_CONFORMANT,
    ),
    fakes.AllocatesEveryRow: ({OUTPUT: "not-exercised", ROWS: "mismatch"}, Word.NOT_CONFORMANT),
    fakes.CountsWrong: ({ROWS: "mismatch"}, Word.NOT_CONFORMANT),
    fakes.ScoresOnly: (
        dict.fromkeys(
            (ROWS, LORA, UPDATE, BAD_UPDATE, RELOAD, RELOAD_KEEPS),
            "not-applicable",
        ),
        Word.INCOMPLETE,
    ),
    fakes.Forgets: ({BAD_UPDATE: "mismatch", RELOAD_KEEPS: "mismatch"}, Word.NOT_CONFORMANT),
    fakes.NeverRepeatsItself: (
        {BAD_UPDATE: "not-judged", RELOAD_KEEPS: "not-judged"},
        Word.CONFORMANT,
    ),
    fakes.IgnoresUpdates: (
        {UPDATE: "mismatch", BAD_UPDATE: "wrongly-accepted"},
        Word.NOT_CONFORMANT,
    ),
}


@pytest.fixture(scope="module")
def chosen() -> list[Case]:
    by_id = {case.id: case for case in cases.load(ROOT)}
    return [by_id[name] for name in CHOSEN]


def harness(kind: type[Backend]) -> Harness:
    engine = kind()
    options = Options(HANG, 2 * HANG, error_map=WORDS)
    return Harness(engine, engine.describe(), ROOT, options)


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_each_engine_gets_its_outcomes_and_verdict(kind, chosen):
    judge = harness(kind)
    results = [judge.run(case, "float32") for case in chosen]
    deviations, word = EXPECTED[kind]
    found = {result.case: str(result.outcome) for result in results}
    assert found == dict.fromkeys(CHOSEN, "ok") | deviations
    assert verdict.conclude(results, chosen, spec.load(ROOT), partial=False).word is word


def test_evidence_holds_the_cause_and_what_was_written(chosen):
    case = next(case for case in chosen if case.id == MISSING)
    own = harness(fakes.HasItsOwnWords).run(case, "float32")
    assert own.codes == ("MISSING_CONSTANT",)
    assert "ValueError: no novice for expert 5" in own.evidence
    logged = harness(fakes.LogsItsWords).run(case, "float32")
    assert "worker 0: no novice for expert 5" in logged.evidence


def test_words_that_no_map_knows_are_no_refusal(chosen):
    case = next(case for case in chosen if case.id == MISSING)
    engine = fakes.HasItsOwnWords()
    result = Harness(engine, engine.describe(), ROOT).run(case, "float32")
    assert str(result.outcome) == "errored"


@pytest.mark.parametrize(
    ("kind", "outcome", "found"),
    [
        (fakes.AcceptsQuantisation, "ok", "within budget"),
        (fakes.Quantises, "not-judged", f"{CONTROL_FIXTURE} with quantized_experts: mismatch"),
        (fakes.QuantisesInBfloat16, "not-judged", f"{CONTROL_FIXTURE} with quantized_experts"),
        (fakes.QuantisesConstantsAway, "mismatch", "over 3 x its budget"),
    ],
)
def test_a_configuration_is_judged_where_the_control_with_it_is_right(kind, outcome, found):
    by_id = {case.id: case for case in cases.load(ROOT)}
    judge = harness(kind)
    result = judge.run(by_id[QUANTISED], "float32")
    assert str(result.outcome) == outcome
    assert found in result.found
    # Without the configuration nothing is different.
    assert str(judge.run(by_id[OUTPUT], "float32").outcome) == "ok"


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (fakes.LeavesARowUnwritten, OUTPUT),
        (fakes.LosesARowOnUpdate, UPDATE),
        (fakes.ReloadsNothing, RELOAD),
    ],
)
def test_memory_that_was_never_written_is_nan(kind, case, chosen, monkeypatch):
    # With luck it holds what was there before: zeros, or the right numbers.
    right = torch.empty_like

    def clean(like: torch.Tensor) -> torch.Tensor:
        fresh = right(like)
        return fresh if fresh.isnan().all() else fresh.copy_(like)

    monkeypatch.setattr(torch, "empty_like", clean)
    result = harness(kind).run(next(one for one in chosen if one.id == case), "float32")
    assert str(result.outcome) == "mismatch"
    assert "NaN in the answer" in result.found
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_case_at_a_dtype_that_is_not_run_is_not_applicable(chosen):
    for dtype in ("bfloat16", "float16"):  # the fakes declare float32 only
        result = harness(fakes.Honest).run(chosen[0], dtype)
        assert str(result.outcome) == "not-applicable"


def test_a_case_that_changes_nothing_is_an_error_not_an_outcome(chosen):
    output = next(case for case in chosen if case.id == OUTPUT)
    edits = ({"set_config": {"path": ["num_experts"], "value": 8}},)
    with pytest.raises(CaseError, match=r"outputs/olmoe-approx: edits\[0\].set_config: .* already"):
        harness(fakes.Honest).run(replace(output, edits=edits), "float32")
