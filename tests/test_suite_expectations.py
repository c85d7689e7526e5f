"""Declared deviations: strict both ways, and written in a form that reads back."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mone_ref.backend import BackendInfo
from mone_ref.suite import expectations
from mone_ref.suite.expectations import Deviation, ExpectationError
from mone_ref.suite.outcomes import Outcome, Result

IDS = ("load/one", "load/two", "load/three")


def info(version: str = "0.33.0", device: str = "cpu") -> BackendInfo:
    return BackendInfo("engine", version, device, {"float32": "float32", "bfloat16": "bfloat16"})


def result(case: str, outcome: str, dtype: str = "float32") -> Result:
    return Result(case, dtype, Outcome(outcome), "expected", "found")


def read(text: str) -> tuple[Deviation, ...]:
    return expectations.parse(tomllib.loads(text), IDS)


def entry(**fields: str) -> str:
    """One table; a field that is None is left out."""
    given_fields = {"id": "load/one", "outcome": "late", "reason": "known"} | fields
    lines = [f"{key} = {value!r}" for key, value in given_fields.items() if value is not None]
    return "\n".join(["[[deviation]]", *lines])


def problems(results: list[Result], text: str, engine: BackendInfo | None = None):
    return dict(expectations.agree(results, read(text), engine or info()).problems)


# -- the file


def test_an_entry_is_read_whole():
    text = entry(link="https://example.org/1") + '\nwhen = {version = "0.33.*", dtype = "float32"}'
    assert read(text) == (
        Deviation(
            "load/one",
            Outcome.LATE,
            "known",
            "https://example.org/1",
            version="0.33.*",
            dtype="float32",
        ),
    )


def test_an_empty_file_declares_nothing():
    assert read("") == ()


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (entry(id="load/four"), "load/four: no such case"),
        (entry(id=None), "needs an id"),
        (entry(reason=None), "load/one: a deviation needs a reason"),
        (entry(reason=""), "load/one: a deviation needs a reason"),
        (entry(reason="  "), "load/one: a deviation needs a reason"),
        (entry(outcome="ok"), "outcome 'ok' is no deviation"),
        (entry(outcome="bad"), "outcome 'bad' is no deviation"),
        (entry(outcome=None), "outcome None is no deviation"),
        (entry(note="x"), "load/one: unknown key note"),
        (entry() + "\nwhen = {python = '3'}", "load/one: unknown key python"),
        (entry() + "\nwhen = 'now'", "when is a table"),
        (entry() + "\nwhen = {version = 3}", "every value is a text"),
        ("[deviation]\nid = 'load/one'", "tables and nothing else"),
        ("note = 1", "tables and nothing else"),
    ],
)
def test_a_broken_file_is_refused(text, flaw, tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(text)
    with pytest.raises(ExpectationError, match=rf"engine\.toml: .*{flaw}"):
        expectations.load(path, IDS)


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("[[deviation")
    with pytest.raises(ExpectationError, match=r"engine\.toml"):
        expectations.load(path, IDS)


# -- strict both ways


def test_results_as_declared_agree():
    agreement = expectations.agree(
        [result("load/one", "late"), result("load/two", "ok")], read(entry()), info()
    )
    assert not agreement.problems
    assert list(agreement.declared) == [("load/one", "float32")]


def test_an_unexpected_pass_is_a_problem():
    assert problems([result("load/one", "ok")], entry()) == {
        ("load/one", "float32"): "declared late, found ok"
    }


def test_another_outcome_is_a_problem():
    found = problems([result("load/one", "errored")], entry())
    assert found == {("load/one", "float32"): "declared late, found errored"}


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in expectations.UNDECLARED])
def test_every_outcome_but_ok_and_not_applicable_must_be_declared(outcome):
    found = problems([result("load/two", outcome)], entry())
    assert found == {("load/two", "float32"): f"{outcome}, which is not declared"}


def test_two_entries_about_one_result_are_a_problem():
    text = entry() + "\n" + entry() + "\nwhen = {dtype = 'float32'}"
    found = problems([result("load/one", "late")], text)
    assert found == {("load/one", "float32"): "declared 2 times"}


def test_an_entry_about_one_dtype_leaves_the_others():
    text = entry() + "\nwhen = {dtype = 'bfloat16'}"
    both = [result("load/one", "ok"), result("load/one", "late", "bfloat16")]
    assert problems(both, text) == {}
    assert problems(both[::-1], entry()) == {("load/one", "float32"): "declared late, found ok"}


@pytest.mark.parametrize(
    ("condition", "applies"),
    [
        ("version = '0.33.0'", True),
        ("version = '0.33.*'", True),
        ("version = '>=0.33,<0.34'", True),
        ("version = '0.32.*'", False),
        ("version = '<0.33'", False),
        ("device = 'cpu'", True),
        ("device = 'cuda'", False),
        ("version = '0.33.*', device = 'cuda'", False),
    ],
)
def test_an_entry_whose_condition_fails_is_ignored_but_listed(condition, applies):
    text = f"{entry()}\nwhen = {{{condition}}}"
    agreement = expectations.agree([result("load/one", "late")], read(text), info())
    assert bool(agreement.declared) is applies
    assert bool(agreement.problems) is not applies
    assert len(agreement.ignored) == (not applies)


def test_development_versions_count():
    assert expectations.matches("0.33.1.dev3+g12ab", ">=0.33")
    assert expectations.matches("0.34.0rc1", ">=0.33")


@pytest.mark.parametrize(("version", "wanted"), [("unknown", ">=1"), ("1.0", "?"), ("1.0", ">=x")])
def test_an_undecidable_condition_is_told(version, wanted):
    with pytest.raises(ExpectationError, match=r"when\.version"):
        expectations.matches(version, wanted)


# -- writing

RESULTS = [
    result("load/one", "late"),
    result("load/one", "late", "bfloat16"),
    result("load/two", "ok"),
    result("load/two", "mismatch", "bfloat16"),
    result("load/three", "not-applicable"),
]


def test_written_entries_need_a_reason_and_then_agree():
    text = expectations.write(RESULTS, (), info())
    with pytest.raises(ExpectationError, match="load/one: a deviation needs a reason"):
        read(text)
    written = read(text.replace('reason = ""', 'reason = "known"'))
    assert written == (
        Deviation("load/one", Outcome.LATE, "known"),
        Deviation("load/two", Outcome.MISMATCH, "known", dtype="bfloat16"),
    )
    assert not expectations.agree(RESULTS, written, info()).problems


def test_what_still_holds_keeps_its_reason_link_and_condition():
    kept = Deviation("load/one", Outcome.LATE, "a reason", "https://example.org", version="0.33.*")
    changed = Deviation("load/two", Outcome.ERRORED, "no longer so")
    other = Deviation("load/three", Outcome.LATE, "another device", device="cuda")
    text = expectations.write(RESULTS, (kept, changed, other), info())
    written = read(text.replace('reason = ""', 'reason = "new"'))
    assert written == (
        other,
        kept,
        Deviation("load/two", Outcome.MISMATCH, "new", dtype="bfloat16"),
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(TEXT, TEXT, st.sampled_from(["", "0.33.*"]), st.sampled_from(["", "cpu"]))
def test_any_text_survives_writing(reason, link, version, device):
    deviation = Deviation("load/one", Outcome.VOID, reason, link, version, device)
    assert read(expectations.dump([deviation])) == (deviation,)
