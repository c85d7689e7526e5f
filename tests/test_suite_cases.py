"""The cases that are shipped, and what becomes of a case file that is not one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mone_ref.errors import Code
from mone_ref.suite import cases, spec
from mone_ref.suite.cases import CaseError, Kind
from mone_ref.suite.edits import changed_tensors, edited
from mone_ref.suite.errormap import group

ROOT = Path(__file__).resolve().parent.parent
CASES = cases.load(ROOT)


def checkpoint(fixture: str) -> Path:
    return ROOT / "fixtures" / fixture / "checkpoint"


# -- the shipped ones


def test_every_kind_has_a_case():
    assert {case.kind for case in CASES} == set(Kind)


def test_every_substituted_fixture_is_judged_with_its_control_and_rows():
    fixtures = {path.name for path in (ROOT / "fixtures").iterdir() if path.is_dir()}
    judged = {case.fixture for case in CASES if case.kind is Kind.OUTPUT and not case.edits}
    changed_to = {case.change.source for case in CASES if case.change}
    plain = {name for name in fixtures if name.endswith("-plain")}
    assert fixtures - plain - changed_to <= judged <= fixtures - plain
    assert {case.fixture for case in CASES if case.kind is Kind.CONTROL} == plain
    assert {case.fixture for case in CASES if case.kind is Kind.ROWS} == judged


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.kind is not Kind.LAYER], ids=lambda case: case.id
)
def test_edits_apply_to_the_fixture(case):
    with edited(checkpoint(case.fixture), case.edits):
        pass
    if case.change:
        source, before = case.change.source, case.change.after or case.fixture
        assert changed_tensors(checkpoint(before), checkpoint(source), case.change.edits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_texts_say_what_is_so(case):
    assert " should " not in case.statement
    assert " must " not in case.statement
    assert case.statement.count(". ") == 0
    assert case.why.endswith(".")


def test_clauses_cited_together_weigh_the_same():
    clauses = {clause.id: clause for clause in spec.load(ROOT)}
    for case in CASES:
        assert len({clauses[name].level for name in case.clauses}) == 1, case.id


def test_a_refusal_is_due_no_later_than_its_own_phase():
    phases = {
        Kind.REFUSAL: {"init", "load"},
        Kind.UPDATE_REFUSAL: {"update"},
        Kind.RELOAD_REFUSAL: {"reload"},
    }
    for case in CASES:
        if "CAP-10" in case.clauses:  # whether an engine defers shows when it runs
            assert case.expected.phase == "run"
        elif case.kind in phases:
            assert case.expected.phase in phases[case.kind], case.id


def test_expected_groups_are_those_of_codes():
    known = {group(code) for code in Code}
    assert all(case.expected.groups <= known for case in CASES)


# -- broken ones

GOOD = """\
id: load/good
kind: refusal
statement: A case is good.
why: Someone has to be.
clauses: [LOAD-7]
fixture: tiny
edits:
  - remove_tensor: x
expect: {rejected: {code: MISSING_CONSTANT, phase: load}}
twin: tiny
"""
OUTPUT = """\
id: outputs/tiny
kind: output
statement: An answer is right.
why: Someone has to be.
clauses: [SEM-1]
fixture: tiny
expect: {conforming: true}
"""


@pytest.fixture
def root(tmp_path):
    """A root with the real schema, two fixtures in name only, and two good cases."""
    (tmp_path / "conformance" / "cases").mkdir(parents=True)
    shutil.copy(ROOT / "conformance" / "case.schema.json", tmp_path / "conformance")
    for name in ("tiny", "tiny-plain"):
        (tmp_path / "fixtures" / name).mkdir(parents=True)
        (tmp_path / "fixtures" / name / "golden.safetensors").touch()
    put(tmp_path, "load/good.yaml", GOOD)
    put(tmp_path, "outputs/tiny.yaml", OUTPUT)
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / "conformance" / "cases" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_good_cases_load_with_their_defaults(root):
    good, output = cases.load(root)
    assert (good.id, good.kind, good.dtypes, good.twin) == (
        "load/good",
        Kind.REFUSAL,
        "first",
        ("tiny", ()),
    )
    assert good.expected.groups == {"MISSING_CONSTANT"}
    assert (output.id, output.dtypes, output.control) == ("outputs/tiny", "each", "tiny-plain")


def test_a_twin_may_be_an_output_case_with_edits(root):
    put(root, "outputs/tiny.yaml", OUTPUT + "edits: [{remove_config: [note]}]\n")
    put(root, "load/good.yaml", GOOD.replace("twin: tiny", "twin: outputs/tiny"))
    assert cases.load(root)[0].twin == ("tiny", ({"remove_config": ["note"]},))


@pytest.mark.parametrize(
    ("dtypes", "offered", "expected"),
    [
        ("each", ["float32", "float16"], ("float32", "float16")),
        ("first", ["bfloat16", "float16"], ("bfloat16",)),
        ("[float16]", ["float32"], ("float16",)),
    ],
)
def test_dtypes_of_a_case(dtypes, offered, expected, root):
    put(root, "load/good.yaml", f"{GOOD}dtypes: {dtypes}\n")
    assert cases.load(root)[0].dtypes_of(offered) == expected


@pytest.mark.parametrize(
    ("find", "replace", "flaw"),
    [
        ("id: load/good", "id: load/other", r"\$\.id: load/other is not the path"),
        ("id: load/good", "id: Load/Good", r"\$\.id: "),
        ("kind: refusal", "kind: denial", r"\$\.kind: .*denial"),
        ("kind: refusal\n", "", r"\$: .*kind"),
        ("A case is good.", "a case is good", r"\$\.statement: "),
        ("[LOAD-7]", "[]", r"\$\.clauses: "),
        ("[LOAD-7]", "[LOAD]", r"\$\.clauses\[0\]: "),
        ("fixture: tiny", "fixture: huge", r"\$\.fixture: no such fixture: huge"),
        ("remove_tensor: x", "remove_tensors: x", r"\$\.edits\[0\]: .*remove_tensors"),
        ("remove_tensor: x", "remove_tensor: [x]", r"\$\.edits\[0\]\.remove_tensor: "),
        ("MISSING_CONSTANT", "MISSING_NOVICE", "no such code: MISSING_NOVICE"),
        ("phase: load", "phase: later", r"\$\.expect"),
        ("twin: tiny\n", "", r"\$: .*twin"),
        ("twin: tiny", "twin: load/good", r"\$\.twin: load/good is neither"),
        ("twin: tiny", "twin: nothing", r"\$\.twin: nothing is neither"),
        ("twin: tiny", "twin: tiny\nfeatures: [novices]", r"\$\.features: no such feature"),
        ("twin: tiny", "twin: tiny\nnote: x", r"\$: .*note"),
        ("twin: tiny", "twin: tiny\nkind: output", "the key 'kind' again"),
        ("twin: tiny", "twin: [tiny", "line 10, column 7"),
        ("edits:\n  - remove_tensor: x\n", "", r"\$: "),
        ("phase: load}", "phase: load}, then: unchanged", r"\$\.expect"),
    ],
)
def test_a_broken_case_is_one_error_with_file_and_place(find, replace, flaw, root):
    assert find in GOOD
    put(root, "load/good.yaml", GOOD.replace(find, replace))
    with pytest.raises(CaseError, match=rf"load/good\.yaml.*{flaw}|{flaw}.*load/good\.yaml"):
        cases.load(root)


@pytest.mark.parametrize(
    ("kind", "addition", "flaw"),
    [
        ("output", "twin: tiny", "a case of this kind has no twin"),
        ("output", "features: [lora]", "a case of this kind has no features"),
        ("output", "change: {from: tiny}", "a case of this kind has no change"),
        ("rows", "", "'requires' is a required property|'rows' is a required property"),
        ("update", "requires: [update]", "'change' is a required property"),
        ("update", "change: {from: tiny}", "'requires' is a required property"),
        ("update", "change: {from: tiny}\nrequires: [reload]", "requires: "),
        ("update", "requires: [update]\nchange: {from: huge}", "no such fixture: huge"),
        (
            "update",
            "requires: [update]\nchange: {from: tiny, after: huge}",
            "no such fixture: huge",
        ),
    ],
)
def test_each_kind_has_its_own_keys(kind, addition, flaw, root):
    put(root, "outputs/tiny.yaml", f"{OUTPUT.replace('kind: output', f'kind: {kind}')}{addition}\n")
    with pytest.raises(CaseError, match=rf"outputs/tiny\.yaml: .*{flaw}"):
        cases.load(root)


def test_only_a_right_update_may_follow_another(root):
    change = "requires: [update]\nchange: {from: tiny, after: tiny}\n"
    text = GOOD.replace("edits:\n  - remove_tensor: x\n", change)
    put(root, "load/good.yaml", text.replace("kind: refusal", "kind: update-refusal"))
    with pytest.raises(CaseError, match=r"\$\.change: .a case of this kind has no after"):
        cases.load(root)


def test_an_output_needs_its_control(root):
    shutil.rmtree(root / "fixtures" / "tiny-plain")
    with pytest.raises(CaseError, match=r"its control.*: no such fixture: tiny-plain"):
        cases.load(root)


def test_a_control_may_be_shared(root):
    (root / "fixtures" / "tiny" / "recipe.yaml").write_text("control: other-plain\n")
    with pytest.raises(CaseError, match=r"its control.*: no such fixture: other-plain"):
        cases.load(root)
    (root / "fixtures" / "tiny-plain").rename(root / "fixtures" / "other-plain")
    assert cases.load(root)[1].control == "other-plain"


def test_stray_files_and_emptiness_are_told(root):
    put(root, "load/other.yml", GOOD)
    with pytest.raises(CaseError, match=r"other\.yml: only \.yaml"):
        cases.load(root)
    shutil.rmtree(root / "conformance" / "cases")
    with pytest.raises(CaseError, match="no case"):
        cases.load(root)
