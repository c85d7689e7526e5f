"""One word from all results, and the count of clauses beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mone_ref.suite import verdict
from mone_ref.suite.cases import Case, Expected, Kind, Setting
from mone_ref.suite.outcomes import UNDECIDED, Outcome, Result
from mone_ref.suite.spec import Clause, Level, Visibility
from mone_ref.suite.verdict import Coverage, Word


def clause(name: str, level: str = "MUST", visibility: str = "observable") -> Clause:
    return Clause(name, Level(level), "ruling", Visibility(visibility), "x", "y", (), 1)


# Six MUST clauses: four observable ones, three of them with cases, and two internal ones.
CLAUSES = (
    clause("FMT-1"),
    clause("FMT-2", "SHOULD"),
    clause("SEM-1"),
    clause("SEM-2"),
    clause("PAR-1"),
    clause("EXEC-1", visibility="internal"),
    clause("EXEC-2", visibility="internal"),
    clause("GEN-3", "MAY"),
)


def case(name: str, *clauses: str) -> Case:
    return Case(name, Kind.OUTPUT, "S.", "w.", clauses, "f", "f-plain", Expected())


CASES = (
    case("must/format", "FMT-1"),
    case("should/format", "FMT-2"),
    case("must/answer", "SEM-1", "SEM-2"),
    case("must/rows", "EXEC-1"),
    case("may/control", "GEN-3"),
)


def results(**outcomes: str) -> list[Result]:
    """All cases ok, but for those named by their group: ``must_answer="mismatch"``."""
    return [
        Result(
            each.id,
            "float32",
            Outcome(outcomes.get(each.id.replace("/", "_"), "ok")),
            "expected",
            "found",
        )
        for each in CASES
    ]


def conclude(partial: bool = False, **outcomes: str) -> verdict.Verdict:
    return verdict.conclude(results(**outcomes), CASES, CLAUSES, partial)


FAILING = sorted(outcome for outcome in Outcome if outcome.failed)


def test_outcomes_are_ok_undecided_or_failed():
    assert len(FAILING) == 8
    assert len(UNDECIDED) == 4
    assert len(Outcome) == 13


def test_all_ok_is_conformant():
    concluded = conclude()
    assert concluded.word is Word.CONFORMANT
    assert concluded.coverage == Coverage(
        total=6, judged=4, in_layers=0, without_case=2, unreached=0, silent=("PAR",)
    )
    assert str(concluded.coverage) == (
        "judged 4 of 6 MUST clauses; 0 need layer access; 2 have no case in this release; "
        "no whole-model case yet of PAR"
    )


def test_a_clause_of_layer_cases_only_is_never_missing():
    layer = replace(case("layer/ranks", "PAR-1"), kind=Kind.LAYER)
    hidden = Result("layer/ranks", "float32", Outcome.NOT_APPLICABLE, "expected", "found")
    concluded = verdict.conclude([*results(), hidden], [*CASES, layer], CLAUSES, False)
    assert concluded.word is Word.CONFORMANT
    assert (concluded.coverage.in_layers, concluded.coverage.without_case) == (1, 1)
    assert concluded.coverage.silent == ("PAR",)
    wrong = replace(hidden, outcome=Outcome.MISMATCH)
    concluded = verdict.conclude([*results(), wrong], [*CASES, layer], CLAUSES, False)
    assert concluded.word is Word.NOT_CONFORMANT
    assert concluded.coverage.judged == 5


RANKS = replace(case("parallel/ranks", "PAR-1"), setting=Setting(tensor_parallel=2))


def conclude_on_ranks(outcome: str, *parallel: str) -> verdict.Verdict:
    shown = Result("parallel/ranks", "float32", Outcome(outcome), "expected", "found")
    return verdict.conclude(
        [*results(), shown], [*CASES, RANKS], CLAUSES, False, frozenset(parallel)
    )


@pytest.mark.parametrize("parallel", [(), ("pipeline_parallel",)])
def test_an_engine_without_such_ranks_is_judged_in_full_on_those_it_has(parallel):
    concluded = conclude_on_ranks("not-applicable", *parallel)
    assert (concluded.word, concluded.missing) == (Word.CONFORMANT, ())
    assert (concluded.coverage.judged, concluded.coverage.unreached) == (4, 1)


@pytest.mark.parametrize(
    ("outcome", "word", "missing"),
    [
        ("ok", Word.CONFORMANT, ()),
        ("mismatch", Word.NOT_CONFORMANT, ()),
        ("not-applicable", Word.INCOMPLETE, ("PAR",)),
    ],
)
def test_an_engine_that_offers_ranks_is_held_to_them(outcome, word, missing):
    concluded = conclude_on_ranks(outcome, "tensor_parallel", "pipeline_parallel")
    assert (concluded.word, concluded.missing) == (word, missing)


@pytest.mark.parametrize("outcome", FAILING)
@pytest.mark.parametrize("broken", ["must_format", "must_answer", "must_rows"])
def test_any_broken_must_decides(outcome, broken):
    assert conclude(**{broken: outcome}).word is Word.NOT_CONFORMANT


@pytest.mark.parametrize("outcome", FAILING)
def test_a_broken_should_is_advice(outcome):
    assert conclude(should_format=outcome).word is Word.ADVICE


def test_a_base_model_that_differs_is_no_reproach():
    assert conclude(may_control="mismatch").word is Word.CONFORMANT


@pytest.mark.parametrize("outcome", sorted(UNDECIDED))
def test_a_must_group_that_nothing_judged_is_incomplete(outcome):
    concluded = conclude(must_answer=outcome)
    assert concluded.word is Word.INCOMPLETE
    assert concluded.missing == ("SEM",)
    assert str(concluded) == "INCOMPLETE (nothing judged of SEM)"
    assert str(concluded.coverage).endswith("2 were not reached on this engine")
    assert concluded.coverage.unreached == 2


def test_what_only_internal_clauses_lack_is_not_incomplete():
    concluded = conclude(must_rows="not-applicable")
    assert concluded.word is Word.CONFORMANT
    assert concluded.coverage.in_layers == 1


def test_incomplete_outweighs_advice_and_a_broken_must_outweighs_both():
    assert conclude(must_answer="void", should_format="late").word is Word.INCOMPLETE
    worst = conclude(must_answer="void", should_format="late", must_format="errored")
    assert worst.word is Word.NOT_CONFORMANT


def test_a_failure_counts_as_judged():
    assert conclude(must_answer="mismatch").coverage.judged == 4


def test_one_judged_dtype_is_enough_for_coverage_and_one_broken_dtype_for_the_word():
    both = [*results(), Result("must/answer", "bfloat16", Outcome.MISMATCH, "", "")]
    assert verdict.conclude(both, CASES, CLAUSES, False).word is Word.NOT_CONFORMANT
    both = [*results(), Result("must/answer", "bfloat16", Outcome.NOT_JUDGED, "", "")]
    assert verdict.conclude(both, CASES, CLAUSES, False).word is Word.CONFORMANT


def test_a_partial_run_has_no_verdict():
    concluded = conclude(partial=True)
    assert concluded.word is None
    assert str(concluded) == "PARTIAL RUN: no verdict"


def test_nothing_judged_is_incomplete():
    assert verdict.conclude([], CASES, CLAUSES, False).word is Word.INCOMPLETE
    undecided = {each.id.replace("/", "_"): "not-applicable" for each in CASES}
    assert conclude(**undecided).word is Word.INCOMPLETE
    may = (case("may/control", "GEN-3"),)
    only = [Result("may/control", "float32", Outcome.NOT_APPLICABLE, "", "")]
    assert verdict.conclude(only, may, CLAUSES, False).word is Word.INCOMPLETE


def test_only_two_words_are_good():
    assert [word for word in Word if word.good] == [Word.CONFORMANT, Word.ADVICE]
