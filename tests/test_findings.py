"""The page for an engine's maintainers: that it is up to date, and what is refused."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mone_ref.cli import application
from mone_ref.suite import cases, findings, report, spec
from mone_ref.suite.findings import FindingsError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "findings"
NOTES, PAGE, RECORD = (FOLDER / f"vllm-0.33.{kind}" for kind in ("yaml", "md", "jsonl"))
SCRIPTS = findings.scripts(NOTES)
CASES = cases.load(ROOT)
CLAUSES = spec.load(ROOT)
AGAIN = (
    "run: mone-ref findings docs/findings/vllm-0.33.jsonl --notes docs/findings/vllm-0.33.yaml "
    "--out docs/findings/vllm-0.33.md"
)


@pytest.fixture(scope="module")
def notes() -> dict:
    return findings.read(NOTES)


@pytest.fixture(scope="module")
def record() -> report.Report:
    return report.read(RECORD)


def invoke(*arguments: object):
    return CliRunner().invoke(application("findings"), ["findings", *map(str, arguments)])


# -- the page of this repository


def test_the_page_is_what_the_record_and_the_notes_say(notes, record):
    rendered = findings.render(notes, SCRIPTS, record, CASES, CLAUSES)
    assert rendered == PAGE.read_text(encoding="utf-8"), AGAIN


def test_every_declared_deviation_belongs_to_one_finding(notes):
    path = ROOT / "conformance" / "expectations" / "vllm.toml"
    declared = {entry["id"] for entry in tomllib.loads(path.read_text())["deviation"]}
    named = Counter(case for entry in notes["findings"] for case in entry["cases"])
    assert set(named) == declared
    assert set(named.values()) == {1}


def test_every_finding_has_a_script_that_compiles(notes):
    found = {path.stem for path in SCRIPTS.glob("*.py")}
    assert found == {entry["id"] for entry in notes["findings"]} | {"common"}
    for path in SCRIPTS.glob("*.py"):
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert not any(name.startswith("mone_ref") for name in imported), path


def test_the_record_holds_no_path_of_a_machine(record):
    assert record.header["command"] == ["--backend=vllm"]
    assert {line["evidence"] for line in record.results} == {""}


# -- the weight of a finding


def line(level: str, *clauses: str, outcome: str = "mismatch") -> dict:
    return {"level": level, "clauses": list(clauses), "outcome": outcome}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line("MUST", "LOAD-7")], "document"),
        ([line("MUST", "CAP-2", "CAP-11")], "ruling"),
        ([line("SHOULD", "LOAD-8"), line("MUST", "CAP-2")], "ruling"),
        ([line("SHOULD", "LOAD-8")], "advice"),
        ([line("MAY", "GEN-3"), line("MUST", "SEM-1", outcome="not-judged")], "base"),
    ],
)
def test_a_finding_weighs_as_its_gravest_failure(lines, expected):
    assert findings.weight(lines, CLAUSES) == expected


# -- what does not fit


def changed(notes: dict, cases_of_the_first: list[str]) -> dict:
    first, *others = notes["findings"]
    return notes | {"findings": [first | {"cases": cases_of_the_first}, *others]}


def test_a_failure_that_no_finding_names_is_told(notes, record):
    left_out, *kept = notes["findings"][0]["cases"]
    flaws = findings.misfits(changed(notes, kept), record, CASES)
    assert flaws == [f"{left_out}: not ok, and no finding names it"]


def test_cases_that_are_ok_unknown_or_named_twice_are_told(notes, record):
    first, second = notes["findings"][:2]
    more = ["outputs/olmoe-approx", "load/no-such-case", second["cases"][0]]
    flaws = findings.misfits(changed(notes, first["cases"] + more), record, CASES)
    assert flaws == [
        f"outputs/olmoe-approx of {first['id']}: the report finds nothing wrong with it",
        f"load/no-such-case of {first['id']}: no such case",
        f"{more[-1]}: stands in {first['id']} and in {second['id']}",
    ]


def test_notes_about_another_engine_are_refused(notes, record):
    other = notes | {"engine": "vllm 0.34.0"}
    with pytest.raises(FindingsError, match=r"about vllm 0\.34\.0, the report is about"):
        findings.render(other, SCRIPTS, record, CASES, CLAUSES)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("engine: [", "while parsing"),
        ("engine: vllm", "is a required property"),
        ("[1]", "is not of type 'object'"),
        ("[" * 100_000, "nesting depth|nested too deep"),
    ],
    ids=["yaml", "member", "type", "depth"],
)
def test_notes_that_break_the_schema_are_refused(text, flaw, tmp_path):
    path = tmp_path / "notes.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FindingsError, match=flaw):
        findings.read(path)


# -- the command


def test_the_command_writes_the_page_and_an_excerpt_that_gives_it_again(tmp_path):
    page, kept = tmp_path / "page.md", tmp_path / "kept.jsonl"
    done = invoke(RECORD, "--notes", NOTES, "--out", page, "--excerpt", kept)
    assert done.exit_code == 0, done.output
    assert page.read_bytes() == PAGE.read_bytes()
    assert kept.read_bytes() == RECORD.read_bytes()


def test_what_does_not_fit_is_one_line_and_no_page(tmp_path):
    other, page = tmp_path / "vllm.yaml", tmp_path / "page.md"
    text = NOTES.read_text(encoding="utf-8")
    other.write_text(text.replace("load/missing-router", "load/missing-shard"), encoding="utf-8")
    done = invoke(RECORD, "--notes", other, "--out", page)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: load/missing-shard of incomplete-weights: the report")
    assert len(done.stderr.splitlines()) == 1
    assert not page.exists()


def test_a_script_that_is_no_text_is_told(tmp_path):
    notes, page = tmp_path / "vllm.yaml", tmp_path / "page.md"
    notes.write_bytes(NOTES.read_bytes())
    notes.with_suffix("").mkdir()
    (notes.with_suffix("") / "common.py").write_bytes(b"\xff")
    done = invoke(RECORD, "--notes", notes, "--out", page)
    assert done.exit_code == 1
    assert "common.py: 'utf-8' codec can't decode byte 0xff" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not page.exists()


def test_an_incomplete_report_is_refused(tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"\n".join(RECORD.read_bytes().splitlines()[:-1]))
    done = invoke(cut, "--notes", NOTES, "--out", tmp_path / "page.md")
    assert (done.exit_code, "incomplete" in done.stderr) == (1, True)
    assert done.stderr.startswith(f"error: {cut}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("absent.jsonl", "--notes", NOTES, "--out", "page.md"),
        (RECORD, "--notes", "absent.yaml", "--out", "page.md"),
        (RECORD, "--notes", NOTES, "--out", "no/such/folder/page.md"),
        (RECORD, "--notes", NOTES, "--out", RECORD),
        (RECORD, "--notes", NOTES),
    ],
)
def test_usage_errors_exit_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = RECORD.read_bytes()
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "rror" in done.stderr
    assert RECORD.read_bytes() == before
    assert not list(tmp_path.iterdir())
