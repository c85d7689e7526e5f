"""Reports: whole ones read back, any other is refused; and the texts that people read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import HANG

from mone_ref.backend import BackendInfo
from mone_ref.suite import cases, report, spec, text
from mone_ref.suite.compare import Numbers
from mone_ref.suite.expectations import Agreement, Deviation
from mone_ref.suite.outcomes import Outcome, Result
from mone_ref.suite.report import ReportError
from mone_ref.suite.verdict import Coverage, Verdict, Word

ROOT = Path(__file__).resolve().parent.parent
CASES = {case.id: case for case in cases.load(ROOT)}
CASE = CASES["load/missing-constant"]
CLAUSES = {clause.id: clause for clause in spec.load(ROOT)}
INFO = BackendInfo(
    "engine",
    "1.0",
    "cpu",
    {"float32": "tf32"},
    frozenset({"lora"}),
    {"torch": "2.9"},
    ("a work-around",),
)
NUMBERS = Numbers(5, 0.12, 0.003, 40.0, 0.5, 0.01, 50.0, 1.25, 0.875)
RESULT = Result(
    CASE.id,
    "float32",
    Outcome.WRONGLY_ACCEPTED,
    "a refusal",
    "accepted | `ok`",
    numbers=NUMBERS,
    evidence="\n".join(f"line {n}" for n in range(100)),
    seconds=0.5,
)
VERDICT = Verdict(Word.NOT_CONFORMANT, Coverage(10, 4, 3, 2, 1), ("UPD",))


def lines() -> list[dict]:
    return [
        report.header(ROOT, INFO, ["float32"], ["--backend=engine"], reliable=True),
        report.start(CASE.id, "float32"),
        report.result(CASE, "MUST", RESULT, "failed"),
        report.footer(VERDICT, [RESULT], {}, 1.5),
    ]


def written(tmp_path: Path, some: list[dict]) -> Path:
    path = tmp_path / "report.jsonl"
    writer = report.Writer(path)
    for line in some:
        writer.write(line)
    writer.close()
    return path


def test_a_whole_report_reads_back(tmp_path):
    read = report.read(written(tmp_path, lines()))
    assert read.header["backend"]["compute"] == {"float32": "tf32"}
    assert read.results[0]["outcome"] == "wrongly-accepted"
    assert read.results[0]["numbers"]["token_ratio"] == 40
    assert read.footer["verdict"] == "NOT CONFORMANT"
    assert read.footer["counts"] == {"wrongly-accepted": 1}


def test_a_declared_deviation_keeps_its_reason_and_its_link(tmp_path):
    some = lines()
    known = Deviation(CASE.id, Outcome.WRONGLY_ACCEPTED, "its reason", "https://example.org/1")
    some[2] = report.result(CASE, "MUST", RESULT, "declared", deviation=known)
    told = report.read(written(tmp_path, some)).results[0]["declared"]
    assert told == {"reason": "its reason", "link": "https://example.org/1"}
    assert report.read(written(tmp_path, lines())).results[0]["declared"] is None


def test_every_outcome_and_status_is_in_the_schema(tmp_path):
    some = lines()
    for outcome in Outcome:
        changed = [*some[:2], some[2] | {"outcome": str(outcome)}, some[3]]
        report.read(written(tmp_path, changed))


def test_lines_are_on_disk_before_the_next_thing_happens(tmp_path):
    path = tmp_path / "report.jsonl"
    writer = report.Writer(path)
    for count, line in enumerate(lines(), 1):
        writer.write(line)
        assert len(path.read_text().splitlines()) == count


def test_a_report_that_ends_in_a_case_names_it(tmp_path):
    with pytest.raises(ReportError, match=r"process died during load/missing-constant at float32"):
        report.read(written(tmp_path, lines()[:2]))


@pytest.mark.parametrize(
    ("order", "flaw"),
    [
        ([], "starts with its header"),
        ([1, 2, 3], "starts with its header"),
        ([0], "ended between two cases"),
        ([0, 1, 2], "ended between two cases"),
        ([0, 2, 3], "line 2: result, expected start or footer"),
        ([0, 1, 3], "line 3: footer, expected result"),
        ([0, 1, 1, 2, 3], "line 3: start, expected result"),
        ([0, 1, 2, 3, 3], "line 4: a footer before the end"),
        ([0, 1, 2, 3, 1, 2], "line 4: a footer before the end"),
        ([0, 0, 1, 2, 3], "line 2: header, expected start or footer"),
    ],
)
def test_a_report_in_another_order_is_refused(order, flaw, tmp_path):
    some = lines()
    with pytest.raises(ReportError, match=flaw):
        report.read(written(tmp_path, [some[index] for index in order]))


def test_a_result_of_another_case_is_refused(tmp_path):
    some = lines()
    for change in ({"case": "load/other"}, {"dtype": "float16"}):
        with pytest.raises(ReportError, match=r"line 3: result of"):
            report.read(written(tmp_path, [*some[:2], some[2] | change, some[3]]))


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"format": 2}),
        (0, {"note": "x"}),
        (0, {"suite": {"version": "0.1"}}),
        (2, {"outcome": "fine"}),
        (2, {"level": "COULD"}),
        (2, {"numbers": {"token": 1}}),
        (2, {"declared": {"reason": "", "link": ""}}),
        (3, {"verdict": "FINE"}),
        (3, {"kind": "end"}),
    ],
)
def test_a_line_that_breaks_the_schema_is_refused(index, change, tmp_path):
    some = lines()
    some[index] |= change
    with pytest.raises(ReportError, match=f"line {index + 1}: "):
        report.read(written(tmp_path, some))


def test_a_flaw_of_a_line_is_told_by_its_place(tmp_path):
    some = lines()
    some[0]["suite"] = {**some[0]["suite"], "sha256": "short"}
    with pytest.raises(ReportError, match=r"line 1: .*\$\.suite\.sha256: 'short' does not match"):
        report.read(written(tmp_path, some))


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        ("[1]", r"found \[1\], expected an object whose kind is header or start"),
        ('{"kind": ["header"]}', "expected an object whose kind is"),
        ('{"kind": "header", "format": NaN}', "NaN is not JSON"),
    ],
)
def test_a_line_of_no_kind_is_refused(line, flaw, tmp_path):
    path = tmp_path / "report.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ReportError, match=f"line 1: .*{flaw}"):
        report.read(path)


def test_a_line_cut_short_is_refused(tmp_path):
    path = written(tmp_path, lines())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ReportError, match="line 4: "):
        report.read(path)


def test_numbers_that_json_lacks_become_null(tmp_path):
    broken = Result(
        "a/b",
        "float32",
        Outcome.MISMATCH,
        "",
        "",
        numbers=Numbers(0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0),
    )
    line = json.loads(json.dumps(report.result(CASE, "MUST", broken, "failed"), allow_nan=False))
    assert line["numbers"]["token_error"] is None
    assert line["numbers"]["max_error"] == 1


def test_the_suite_hash_sees_every_case_and_every_fixture(tmp_path):
    (tmp_path / "conformance" / "cases" / "load").mkdir(parents=True)
    (tmp_path / "fixtures").mkdir()
    sums, case = tmp_path / "fixtures" / "SHA256SUMS", tmp_path / "conformance/cases/load/a.yaml"
    sums.write_text("1")
    case.write_text("x")
    seen = {report.suite_hash(tmp_path)}
    sums.write_text("2")
    seen.add(report.suite_hash(tmp_path))
    case.write_text("y")
    seen.add(report.suite_hash(tmp_path))
    case.rename(case.with_name("b.yaml"))
    seen.add(report.suite_hash(tmp_path))
    assert len(seen) == 4


# -- texts


def test_a_failure_says_what_was_due_what_came_and_how_to_repeat_it():
    told = text.failure(CASE, RESULT, CLAUSES, ["--backend=my engine"])
    for words in (
        "load/missing-constant at float32: wrongly-accepted",
        CASE.statement,
        "LOAD-7 (MUST): Loading fails when a substituted expert of a built layer has no constant.",
        "expected   a refusal",
        "worst token 5: 0.12 against 3 x 0.003 (ratio 40)",
        "largest error: 0.5 against 3 x 0.01 (ratio 50)",
        "norm is 1.25 x the golden's; the likeliest id agrees for 88% of tokens",
        "| line 0\n",
        "| [76 lines left out]\n",
        "| line 99\n",
    ):
        assert words in told
    assert told.endswith(
        "mone-ref conform '--backend=my engine' --case load/missing-constant --dtype float32"
    )


def test_a_clause_is_told_by_its_first_sentence():
    told = text.first_sentence("`x` is 1.5 or less. `y` is not. And so on.")
    assert told == "`x` is 1.5 or less."
    assert text.first_sentence("One only") == "One only"


def test_short_evidence_is_shown_whole():
    assert text.excerpt("a\nb") == ["a", "b"]
    assert len(text.excerpt("\n".join("x" * 24))) == 24


def test_the_conclusion_names_verdict_coverage_work_arounds_and_declarations():
    declared = {("load/one", "float32"): Deviation("load/one", Outcome.LATE, "its reason")}
    undeclared = {("load/two", "float32"): "errored, which is not declared"}
    ignored = (Deviation("load/three", Outcome.VOID, "r", device="cuda", dtype="float16"),)
    agreement = Agreement(declared, undeclared, ignored)
    told = "\n".join(text.conclusion(VERDICT, [RESULT], agreement, INFO, reliable=False))
    for words in (
        "engine 1.0 (cpu, float32 in tf32, torch 2.9)",
        "a work-around",
        "unreliable",
        "1 wrongly-accepted",
        "load/one float32: late: its reason",
        "load/two float32: errored, which is not declared",
        "load/three: void (only for device cuda, dtype float16)",
        "judged 4 of 10 MUST clauses; 3 need layer access; 2 have no case in this release; "
        "1 were not reached on this engine",
        "NOT CONFORMANT (nothing judged of UPD)",
    ):
        assert words in told


def test_the_markdown_summary_has_one_row_per_case_that_is_not_ok():
    statements = {CASE.id: CASE.statement}
    told = text.markdown(VERDICT, [RESULT], None, INFO, statements)
    assert told.startswith("## NOT CONFORMANT")
    rows = [line for line in told.splitlines() if line.startswith(f"| {CASE.id} |")]
    assert len(rows) == 1
    # Five cells; what the engine said cannot add a sixth or become markup.
    assert rows[0].replace("\\|", "").count("|") == 6
    assert "accepted \\| \\`ok\\`" in rows[0]
    assert "a work-around" in told


# -- two runs


def run_of(tmp_path: Path, *changes: dict, dtypes: Sequence[str] = ("float32",)) -> report.Report:
    """A run with one result per change of the same one."""
    head, start, result, footer = lines()
    head["dtypes"] = list(dtypes)
    body = []
    for change in changes:
        named = {key: change[key] for key in ("case", "dtype") if key in change}
        body += [start | named, result | change]
    return report.read(written(tmp_path, [head, *body, footer]))


def test_runs_that_differ_in_time_and_numbers_only_are_the_same(tmp_path):
    slower = run_of(tmp_path, {"seconds": 9.0, "numbers": None, "found": "others"})
    assert report.differences(run_of(tmp_path, {}), slower) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"outcome": "ok"}, "wrongly-accepted, then ok"),
        ({"codes": ["UPDATE"]}, "wrongly-accepted, then wrongly-accepted UPDATE"),
        ({"phase": "load"}, "wrongly-accepted, then wrongly-accepted load"),
    ],
)
def test_a_flickering_result_is_named(change, told, tmp_path):
    one, other = run_of(tmp_path, {}), run_of(tmp_path, change)
    assert report.differences(one, other) == [f"load/missing-constant at float32: {told}"]


def test_two_runs_are_compared_in_what_both_have(tmp_path):
    # The second was not asked for float16, which a case that names its dtype then says.
    longer = run_of(
        tmp_path, {}, {"case": "load/another"}, {"dtype": "float16"}, dtypes=["float32", "float16"]
    )
    shorter = run_of(tmp_path, {}, {"dtype": "float16", "outcome": "not-applicable"})
    assert report.common(longer, shorter) == [("load/missing-constant", "float32")]
    assert report.differences(longer, shorter) == []


@pytest.mark.parametrize(
    ("dtype", "outcome", "code", "told"),
    [
        (
            "float32",
            "wrongly-accepted",
            0,
            "1 of 1 outcomes compared with those of another run, 0 differ",
        ),
        ("float32", "ok", 1, "1 of 1 outcomes compared with those of another run, 1 differ"),
        (
            "float16",
            "wrongly-accepted",
            1,
            "0 of 1 outcomes compared with those of another run, 0 differ",
        ),
    ],
)
def test_two_runs_agree_when_something_was_compared(dtype, outcome, code, told, tmp_path):
    names = []
    for name, change, dtypes in (
        ("one", {}, ["float32"]),
        ("other", {"outcome": outcome, "dtype": dtype}, [dtype]),
    ):
        (tmp_path / name).mkdir()
        run_of(tmp_path / name, change, dtypes=dtypes)
        names.append(tmp_path / name / "report.jsonl")
    command = [sys.executable, ROOT / ".ci" / "same_outcomes.py", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (code, "")
    assert told in done.stdout
