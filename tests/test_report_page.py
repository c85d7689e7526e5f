"""The report page: what it says, that nothing in a report acts on it, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from reports import BROKEN_MUST, BROKEN_SHOULD, CASES, CLAUSES, FAR, ROOT, write
from typer.testing import CliRunner

from mone_ref.cli import application
from mone_ref.suite import bars, clause_table, page, report
from mone_ref.suite.clause_table import Status
from mone_ref.suite.merge import chosen_by, merge
from mone_ref.suite.outcomes import Outcome
from mone_ref.suite.printable import printable, shortened
from mone_ref.suite.prose import Span, prose

HOSTILE = (
    "</pre><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>\n"
    "\x1b[31mred\x1b[0m \x1b]0;title\x07bell\x07 null\x00 back\x08 \ud800 \u202egnp.exe\r\n"
    "{{ 7 * 7 }} &amp; \" ' " + "x" * 100_000
)
VOID = {"meta", "link", "input", "img", "br", "hr"}


class Dom(HTMLParser):
    """Elements with attributes and text; complains about tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, list[str]] = {}
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, [self.elements[index] for index in self.open]

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, attributes)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self.open.pop()][0] == tag, (self.getpos(), tag)

    def handle_data(self, data):
        for index in self.open:
            self.texts.setdefault(index, []).append(data)

    def find(self, tag: str, **wanted: str) -> list[int]:
        """Indices of elements; a class is one of several."""
        return [
            index
            for index, (name, attributes) in enumerate(self.elements)
            if name == tag
            and all(
                value in (attributes.get(key.rstrip("_")) or "").split()
                for key, value in wanted.items()
            )
        ]

    def text(self, index: int) -> str:
        """All text inside an element, on one line."""
        return " ".join("".join(self.texts.get(index, [])).split())

    def one(self, tag: str, **wanted: str) -> str:
        """Text of the one element."""
        (index,) = self.find(tag, **wanted)
        return self.text(index)

    def values(self, name: str) -> list[str]:
        """Values of an attribute."""
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


def render(*paths: Path) -> str:
    return page.render(merge(paths, ROOT))


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> str:
    """The page of an engine with one MUST case, one SHOULD case and one undecided case."""
    path = tmp_path_factory.mktemp("reports") / "broken.jsonl"
    return render(write(path, changes=CHANGES))


CHANGES = {
    BROKEN_MUST: {
        "outcome": Outcome.MISMATCH,
        "found": "token 5 is far off",
        "numbers": FAR,
        "evidence": "a line of evidence",
    },
    BROKEN_SHOULD: {"outcome": Outcome.WRONGLY_ACCEPTED, "found": "accepted"},
    "unsupported/eplb": {"outcome": Outcome.NOT_APPLICABLE, "found": "no such option"},
}


# -- the head


def test_the_head_says_the_verdict_its_reason_and_its_coverage(broken):
    dom = Dom(broken)
    assert dom.one("h2", id="engine-1") == "engine 1.0 cpu"
    assert dom.one("p", class_="word") == "✗ NOT CONFORMANT"
    assert dom.one("p", class_="reason") == f"1 of {len(CASES)} cases break MUST clauses."
    assert re.match(r"Judged \d+ of \d+ MUST clauses; ", dom.one("p", class_="coverage"))
    for told in ("✗ 1 failed", "! 1 advice", "○ 1 not judged", f"✓ {len(CASES) - 3} ok"):
        assert told in dom.one("ul", class_="legend")
    wrong = dom.one("ul", class_="wrong")
    assert "SEM-1" in wrong
    assert BROKEN_MUST in wrong
    assert BROKEN_SHOULD not in wrong
    assert "1 SHOULD or MAY case not ok" in dom.one("p", class_="aside")


def test_the_facts_name_engine_suite_and_command(broken):
    facts = Dom(broken).one("section", class_="verdict")
    suite = f"sha256 {report.suite_hash(ROOT)}"
    for told in ("torch 2.13", "tensor_parallel", suite, "pytest --backend=engine"):
        assert told in facts


@pytest.mark.parametrize(
    ("changes", "word", "reason"),
    [
        ({}, "✓ CONFORMANT", "Every case that was judged is ok."),
        (
            {BROKEN_SHOULD: CHANGES[BROKEN_SHOULD]},
            "✓ CONFORMANT WITH ADVICE",
            "Every MUST case that was judged is ok; SHOULD cases are not.",
        ),
        (
            {
                case.id: {"outcome": Outcome.NOT_APPLICABLE}
                for case in CASES
                if any(name.startswith("UPD-") for name in case.clauses)
            },
            "○ INCOMPLETE",
            "Nothing was judged of UPD.",
        ),
        (
            {BROKEN_MUST: CHANGES[BROKEN_MUST] | {"status": "declared"}},
            "✗ NOT CONFORMANT",
            f"1 of {len(CASES)} cases break MUST clauses. "
            "Each is declared, which does not change the verdict.",
        ),
    ],
)
def test_each_word_has_its_reason(changes, word, reason, tmp_path):
    dom = Dom(render(write(tmp_path / "a.jsonl", changes=changes)))
    assert dom.one("p", class_="word") == word
    assert dom.one("p", class_="reason") == reason


def test_a_partial_run_has_no_verdict(tmp_path):
    some = frozenset({BROKEN_MUST, BROKEN_SHOULD})
    path = write(tmp_path / "a.jsonl", only=some, changes={BROKEN_MUST: CHANGES[BROKEN_MUST]})
    dom = Dom(render(path))
    assert dom.one("p", class_="word") == "○ PARTIAL RUN: no verdict"
    assert dom.one("p", class_="reason").startswith("1 of the 2 cases that ran")


# -- clauses and cases


def test_every_clause_has_a_row_with_a_cell_per_engine(broken):
    dom = Dom(broken)
    rows = [index for index in dom.find("tr") if "id" in dom.elements[index][1]]
    ids = [dom.elements[index][1]["id"] for index in rows]
    assert ids == [f"clause-{clause.id}" for clause in CLAUSES]
    told = {name: dom.text(index) for name, index in zip(ids, rows, strict=True)}
    assert "✗ 1 failed" in told["clause-SEM-1"]
    assert f"✗ {BROKEN_MUST}" in told["clause-SEM-1"]
    assert "! 1 advice" in told["clause-LOAD-8"]
    assert told["clause-UPD-5"].startswith("UPD-5 MUST After a refused reload the model keeps")
    assert "no case" in told["clause-LOAD-3"]
    assert "No case: That two ways share a path is not visible" in told["clause-LOAD-3"]


def test_a_failing_case_says_everything(broken):
    dom = Dom(broken)
    case = next(case for case in CASES if case.id == BROKEN_MUST)
    told = dom.one("article", id=f"case-{BROKEN_MUST}")
    for words in (
        "✗ failed",
        "SEM-1 MUST The routed output of a MoE layer is the sum",
        "expected the golden answers of olmoe-approx",
        "✗ mismatch",
        "token 5 is far off",
        "50 of 3",
        "worst token 5: error 0.12 against 3 x 0.003",
        "norm 1.25 x the golden's",
        "the likeliest id agrees for 88% of tokens",
        "a line of evidence",
        f"mone-ref conform --backend=engine --case {BROKEN_MUST} --dtype float32",
        " ".join("".join(span.text for span in prose(case.why)).split()),
    ):
        assert words in told


def test_cases_stand_under_their_weight_the_gravest_first(broken):
    dom = Dom(broken)
    places = [f"case-{name}" for name in (BROKEN_MUST, BROKEN_SHOULD, "unsupported/eplb")]
    ids = [index for index in dom.values("id") if index.startswith("case-")]
    assert ids[:3] == places
    assert sorted(ids) == sorted(f"case-{case.id}" for case in CASES)
    groups = [dom.elements[index][1]["id"] for index in dom.find("section", class_="group")]
    assert groups == ["must", "advice", "open", "ok"]


@pytest.mark.parametrize("group", page.GROUPS)
def test_every_group_has_a_rule_that_shows_it_alone(broken, group):
    assert f"main:has(#cases-{group}:checked) section.group:not(.{group}):not(" in broken


def test_a_result_better_than_declared_stands_apart(tmp_path):
    dom = Dom(render(write(tmp_path / "a.jsonl", changes={BROKEN_MUST: {"status": "failed"}})))
    assert BROKEN_MUST in dom.one("section", class_="stale")
    assert dom.one("p", class_="word") == "✓ CONFORMANT"


DECLARED = {"reason": "Constants are cast.", "link": "https://example.org/1"}


def declared(tmp_path, **entry: str) -> Dom:
    """The page of an engine with one declared deviation."""
    known = {"status": "declared", "declared": DECLARED | entry}
    return Dom(
        render(write(tmp_path / "a.jsonl", changes={BROKEN_MUST: CHANGES[BROKEN_MUST] | known}))
    )


def test_a_declared_deviation_has_its_reason_and_its_link(tmp_path):
    dom = declared(tmp_path)
    assert dom.one("p", class_="known") == "declared Constants are cast. https://example.org/1"
    assert dom.one("a", rel="noreferrer") == DECLARED["link"]
    assert "Constants are cast." in dom.one("article", id=f"case-{BROKEN_MUST}")


def test_a_link_that_a_browser_would_run_is_text(tmp_path):
    dom = declared(tmp_path, link="javascript:alert(1)", reason=HOSTILE)
    assert dom.one("p", class_="known").endswith("javascript:alert(1)")
    assert not [link for link in dom.values("href") if "alert" in link]
    assert not dom.find("img")


def test_a_reason_shared_by_dtypes_is_told_once():
    lines = [{"dtype": dtype, "declared": DECLARED} for dtype in ("float32", "float16")]
    other = {"dtype": "bfloat16", "declared": DECLARED | {"link": ""}}
    told = page.declarations([*lines, other, {"dtype": "float64", "declared": None}])
    assert [entry.dtypes for entry in told] == ["float32, float16", "bfloat16"]


DIAGNOSIS = {
    "kind": "known-fault",
    "faults": ["dropped", "never-loaded"],
    "sentence": "Constants are not added.",
    "clauses": ["SEM-1"],
    "distance": 0.4,
    "runner_up": {"faults": ["twice"], "distance": 120.0},
    "place": {"prompt": 0, "token": 3, "layer": None},
}


def test_a_diagnosis_is_told_in_full():
    assert list(page.diagnosis(DIAGNOSIS)) == [
        "Constants are not added.",
        "known fault: dropped, never-loaded; breaks SEM-1",
        "distance to the answer found: 0.4 x the budget",
        "next nearest: twice, at 120 x the budget",
        "first seen at prompt 0, token 3",
    ]


def test_a_diagnosis_without_a_fault_is_its_sentence():
    unknown = {"kind": "unknown", "faults": [], "sentence": "Nothing known explains it."}
    absent = {"clauses": [], "distance": None, "runner_up": None, "place": None}
    assert list(page.diagnosis(unknown | absent)) == ["Nothing known explains it."]


def test_the_page_shows_a_diagnosis(tmp_path):
    merged = merge([write(tmp_path / "a.jsonl", changes=CHANGES)], ROOT)
    engine = merged.engines[0]
    told = [
        result | {"diagnosis": DIAGNOSIS if result["case"] == BROKEN_MUST else None}
        for result in engine.report.results
    ]
    judged = replace(engine, report=replace(engine.report, results=tuple(told)))
    dom = Dom(page.render(replace(merged, engines=(judged,))))
    (shown,) = dom.find("span", class_="diagnosis")
    assert dom.text(shown).startswith("Diagnosis Constants are not added. · known fault: dropped")
    assert dom.text(shown) in dom.one("article", id=f"case-{BROKEN_MUST}")


@pytest.mark.parametrize(
    ("ratio", "place"),
    [(0.1, 2), (1, 16.7), (3, 24.6), (1e5, 100), (1e9, 100), (float("inf"), 100), (0, 2)],
)
def test_bars_are_logarithmic_and_end_at_their_ends(ratio, place):
    assert bars.place(ratio) == place


def test_numbers_that_a_report_cannot_hold_are_told_as_such():
    assert bars.number(None) == "not finite"
    assert bars.number(float("nan")) == "not finite"
    assert bars.number(10**400) == "not finite"


# -- several engines


def test_engines_stand_side_by_side(tmp_path):
    one = write(tmp_path / "one.jsonl", name="one")
    two = write(tmp_path / "two.jsonl", name="two", changes=CHANGES)
    dom = Dom(render(one, two))
    words = [dom.text(index) for index in dom.find("p", class_="word")]
    assert words == ["✓ CONFORMANT", "✗ NOT CONFORMANT"]
    (row,) = dom.find("tr", id="clause-SEM-1")
    assert re.search(r"one 1.0 ✓ \d+ ok .* two 1.0 ✗ 1 failed", dom.text(row))
    told = dom.one("article", id=f"case-{BROKEN_MUST}")
    assert "one 1.0 ✓ ok" in told
    assert "two 1.0 ✗ failed" in told


def test_one_engine_started_in_two_ways_is_two(tmp_path):
    command = ("--backend=transformers", "--engine-arg", "experts=eager", "--report", "x.jsonl")
    eager = write(tmp_path / "eager.jsonl", command=command)
    other = write(tmp_path / "other.jsonl", command=("--backend=transformers",))
    engines = merge([eager, other], ROOT).engines
    assert [engine.setting for engine in engines] == ["cpu, experts=eager", "cpu"]
    assert engines[0].reproduce("a/b", ["float32", "float16"]) == (
        "mone-ref conform --backend=transformers --engine-arg=experts=eager "
        "--case a/b --dtype float32 --dtype float16"
    )


def test_only_the_words_that_chose_the_engine_are_repeated():
    command = ["--rootdir=/x", "/x", "--backend", "my:Engine", "--report=r", "-q", "--dtype", "d"]
    assert chosen_by(command) == ("--backend=my:Engine",)


# -- as JSON


def test_the_table_as_json_keeps_its_schema(tmp_path):
    path = write(tmp_path / "a.jsonl", changes=CHANGES)
    found = invoke(path, "--json")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    schema = json.loads(Path(clause_table.__file__).with_suffix(".schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    rows = {row["id"]: row["engines"][0] for row in document["clauses"]}
    assert document["engines"][0]["verdict"] == "NOT CONFORMANT"
    assert rows["SEM-1"]["status"] == "failed"
    assert rows["SEM-1"]["cases"]["failed"] == [BROKEN_MUST]
    assert rows["LOAD-8"]["status"] == "advice"
    assert rows["LOAD-3"] == {"status": None, "cases": {}}


def test_a_case_counts_by_the_gravest_of_its_dtypes():
    order = [Status.OK, Status.UNDECIDED, Status.DECLARED, Status.ADVICE, Status.FAILED]
    for index, status in enumerate(order):
        assert clause_table.gravest(order[: index + 1]) is status
    assert clause_table.gravest([]) is None


# -- hostile reports


def test_nothing_that_an_engine_wrote_becomes_markup(tmp_path):
    fields = {"outcome": Outcome.MISMATCH, "found": HOSTILE, "evidence": HOSTILE}
    words = {"expected": HOSTILE}
    path = write(
        tmp_path / "a.jsonl",
        name='<b onclick="x">',
        version="'>\"<script>",
        command=("--backend=<script>", HOSTILE),
        changes={BROKEN_MUST: fields | words},
    )
    text = render(path)
    dom = Dom(text)
    tags = {tag for tag, _ in dom.elements}
    assert not tags & {"script", "img"}
    assert not [name for _, attributes in dom.elements for name in attributes if name[:2] == "on"]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e]", text)
    told = dom.one("article", id=f"case-{BROKEN_MUST}")
    assert "<script>alert(1)</script>" in told
    assert r"red bell\x07 null\x00 back\x08 \ud800 \u202egnp.exe" in told
    assert "{{ 7 * 7 }} &amp; \" ' xxx" in told
    assert "characters left out]" in told
    assert dom.one("h2", id="engine-1") == '<b onclick="x"> \'>"<script> cpu'
    text.encode("utf-8")


def test_the_page_asks_for_nothing_and_runs_nothing(broken):
    dom = Dom(broken)
    assert not dom.find("script")
    assert dom.values("src") == []
    outside = [link for link in dom.values("href") if not link.startswith(("#", "data:,"))]
    assert outside == []
    assert "url(" not in broken
    assert "@import" not in broken


def test_every_link_has_its_target_and_every_id_is_one(broken):
    dom = Dom(broken)
    ids = dom.values("id")
    assert len(ids) == len(set(ids))
    links = {link.removeprefix("#") for link in dom.values("href") if link.startswith("#")}
    assert f"case-{BROKEN_MUST}" in links
    assert links <= set(ids)
    assert set(dom.values("aria-labelledby")) <= set(ids)


def test_headings_descend_one_step_at_a_time(broken):
    dom = Dom(broken)
    levels = [int(tag[1]) for tag, _ in dom.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_tables_and_the_language_are_marked_up(broken):
    dom = Dom(broken)
    assert dom.elements[0] == ("html", {"lang": "en"})
    assert all("scope" in dom.elements[index][1] for index in dom.find("th"))


def test_a_status_is_a_word_and_not_a_colour(broken):
    dom = Dom(broken)
    marks = dom.find("span", class_="chip")
    assert len(marks) > len(CLAUSES) - 20
    assert all(re.search("[a-z]", dom.text(index)) for index in marks)
    assert all(dom.elements[index][1].get("aria-label") for index in dom.find("span", role="img"))


def test_long_evidence_keeps_its_two_ends():
    text = "\n".join(f"line {n}" for n in range(100))
    told = shortened(text, lines=10, width=20).split("\n")
    assert len(told) == 11
    assert told[4:7] == ["line 4", "[90 lines left out]", "line 95"]
    assert shortened("x" * 25, lines=10, width=20) == "x" * 20 + " [5 characters left out]"
    assert shortened("a\nb", lines=2, width=1) == "a\nb"


def test_terminal_sequences_vanish_and_the_rest_shows():
    assert printable("\x1b[1;31mred\x1b[0m\tand\r\nnext\rlast") == "red\tand\nnext\nlast"
    assert printable("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\") == "link"
    assert printable("½ ✓ é \u2028 \ufeff") == r"½ ✓ é \u2028 \ufeff"


def test_prose_knows_code_and_emphasis():
    told = prose("a `w_j * v` and *control*, 2 * 3 * 4")
    assert told == (
        Span("", "a "),
        Span("code", "w_j * v"),
        Span("", " and "),
        Span("em", "control"),
        Span("", ", 2 * 3 * 4"),
    )


# -- the command


def invoke(*words: object):
    return CliRunner().invoke(application("report"), ["report", *map(str, words)])


def test_the_command_writes_one_file_and_says_what_is_in_it(tmp_path):
    path, out = write(tmp_path / "a.jsonl", changes=CHANGES), tmp_path / "page.html"
    found = invoke(path, "--out", out)
    assert found.exit_code == 0
    assert found.stdout.splitlines()[0] == "engine 1.0 (cpu): NOT CONFORMANT"
    assert found.stdout.splitlines()[1].startswith(f"written to {out}, ")
    assert out.read_text(encoding="utf-8") == render(path)
    assert sorted(tmp_path.iterdir()) == [path, out]


def refused(status: int, *words: object) -> str:
    """The one line about something that does not fit."""
    found = invoke(*words)
    assert found.exit_code == status, found.output
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_reports_that_do_not_fit_are_refused(tmp_path):
    out = tmp_path / "page.html"
    one = write(tmp_path / "one.jsonl")
    twin = write(tmp_path / "twin.jsonl", changes=CHANGES)
    assert refused(1, one, twin, "--out", out) == (
        f"{twin}: 'engine 1.0 (cpu)' is already the engine of {one}"
    )
    part = write(tmp_path / "part.jsonl", name="other", only=frozenset({BROKEN_MUST}))
    assert f"{part}: other cases than {one}" in refused(1, one, part, "--out", out)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(one.read_text().splitlines(keepends=True)[:-1]))
    assert f"{cut}: incomplete" in refused(1, cut, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            report.suite_hash(ROOT),
            "0" * 64,
            "judged by another suite: version '0.1.0', sha256 0000",
        ),
        (f'"{BROKEN_MUST}"', '"fixtures/mine"', "about fixtures of your own"),
        (f'"{BROKEN_MUST}"', '"outputs/\\u001b"', r"case 'outputs/\x1b' is not in the suite"),
        (BROKEN_MUST, BROKEN_SHOULD, f"two results of '{BROKEN_SHOULD}' at 'float32'"),
        ('"engine"', "\udcff", "line 1: 'utf-8' codec can't decode byte 0xff"),
        ('"engine"', "[" * 100_000, "line 1: "),
    ],
)
def test_a_report_that_the_suite_cannot_have_written_is_refused(old, new, told, tmp_path):
    path = write(tmp_path / "a.jsonl")
    changed = path.read_text().replace(old, new)
    path.write_text(changed, encoding="utf-8", errors="surrogateescape")
    assert refused(1, path, "--json").startswith(f"{path}: {told}")


def test_a_verdict_on_a_part_of_the_cases_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl")
    kept = [line for line in path.read_text().splitlines() if f'"{BROKEN_MUST}"' not in line]
    path.write_text("\n".join(kept))
    told = refused(1, path, "--json")
    assert told == f"{path}: a verdict without 1 cases, such as {BROKEN_MUST}"


def test_usage_errors_exit_2_in_one_line(tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert refused(2, path) == "expected --out FILE.html, --json or both"
    assert refused(2, path, "--out", path) == f"{path}: is one of the reports"
    assert refused(2, path, "--out", tmp_path) == f"{tmp_path}: not a regular file"
    lost = tmp_path / "no" / "page.html"
    assert refused(2, path, "--out", lost) == f"{lost}: No such file or directory"
    assert "No such file" in refused(2, tmp_path / "none.jsonl", "--json")
    assert refused(2, tmp_path, "--json") == f"{tmp_path}: not a regular file"


def test_a_whole_page_is_small(broken):
    assert len(broken.encode()) < 1_000_000
