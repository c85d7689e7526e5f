"""SPEC.md: its format, its examples, its hash, and the gate between clauses and cases."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mone_ref import config, errors
from mone_ref.cli import spec as spec_command
from mone_ref.suite import cases, data, spec
from mone_ref.suite.spec import Clause, Example, Level, SpecError, Visibility

ROOT = data.root()
TEXT = spec.read_text()
CLAUSES = spec.load()

# The smallest complete model: examples of SPEC.md are laid over it.
BASE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

# Of the three bytes "abc": FIPS 180-2, appendix B.1.
SHA256_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

# Ids are never renumbered and never used again; a new clause goes at the end of its group.
PUBLISHED = {
    "GEN": 3,
    "FMT": 30,
    "SEM": 10,
    "EXEC": 6,
    "LOAD": 13,
    "UPD": 5,
    "CAP": 13,
    "PAR": 4,
}

GOOD = """\
## Part

### AB-1
MUST · source: Semantics · observable

First line
second line.

Rationale: Because.

Accepted: so it is.

```json
{"a": 1}
```

### AB-3
SHOULD · ruling R2 + ruling · internal

Other.

Rationale: Why not.

## Next part
"""


# -- the reader


def test_a_clause_reads_with_every_part() -> None:
    first, second = spec.parse(GOOD)
    assert first == Clause(
        id="AB-1",
        level=Level.MUST,
        origin="source: Semantics",
        visibility=Visibility.OBSERVABLE,
        text="First line second line.",
        rationale="Because.",
        examples=(Example("Accepted: so it is.", '{"a": 1}', 13),),
        line=3,
    )
    assert (second.id, second.level, second.line) == ("AB-3", Level.SHOULD, 17)
    assert (second.group, second.number, second.rulings) == ("AB", 3, ("R2",))
    assert spec.groups([first, second]) == {"AB": (first, second)}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("### AB-3", "### AB-1", 17, "AB-1 is used twice"),
        ("### AB-1", "### AB-4", 17, "AB-3 stands after AB-4"),
        ("### AB-3", "### AB-03", 17, "not a clause id"),
        ("### AB-3", "### Notes", 17, "not a clause id"),
        ("MUST ·", "MUSTN'T ·", 4, "unknown level MUSTN'T"),
        ("· observable", "· visible", 4, "unknown visibility visible"),
        ("source: Semantics", "source: Semantik", 4, "unknown origin source: Semantik"),
        ("ruling R2", "ruling R0", 18, "unknown origin ruling R0"),
        ("MUST · source: Semantics · observable\n", "", 5, "LEVEL · ORIGIN · VISIBILITY"),
        ("Rationale: Why not.", "Because.", 17, "'Rationale: ...'"),
        ("Other.\n", "", 17, "a clause needs a text"),
        ("Accepted: so it is.\n", "", 12, "captions, each with one JSON block"),
        ('```json\n{"a": 1}\n```\n', "", 11, "a caption without a JSON block"),
        ("```json", "```yaml", 13, "fenced as json"),
        ('{"a": 1}\n```', '{"a": 1}', 13, "fenced as json"),
    ],
)
def test_a_slip_in_the_format_is_an_error_with_its_line(
    old: str, new: str, line: int, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec.parse(GOOD.replace(old, new, 1))
    assert str(caught.value).startswith(f"SPEC.md:{line}: ")
    assert message in str(caught.value)


@given(st.lists(st.sampled_from(GOOD.splitlines())))
def test_shuffled_lines_read_or_fail_by_name(lines: list[str]) -> None:
    try:
        clauses = spec.parse("\n".join(lines))
    except SpecError:
        return
    assert len(clauses) == sum(line.startswith("### ") for line in lines)
    assert all(clause.text and clause.rationale for clause in clauses)


def test_the_clauses_are_the_published_ones() -> None:
    sizes = {name: [c.number for c in group] for name, group in spec.groups(CLAUSES).items()}
    assert {name: numbers[-1] for name, numbers in sizes.items()} == PUBLISHED
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in sizes.values())


def test_every_clause_that_other_clauses_name_exists() -> None:
    known = {clause.id for clause in CLAUSES}
    named = set(re.findall(rf"\b(?:{'|'.join(spec.groups(CLAUSES))})-\d+\b", TEXT))
    assert named == known


def test_every_clause_that_the_code_names_exists() -> None:
    names = "|".join(spec.groups(CLAUSES))
    package = Path(spec.__file__).parents[1]
    texts = [path.read_text() for path in sorted(package.rglob("*.py"))]
    named = {name for text in texts for name in re.findall(rf"\b(?:{names})-\d+\b", text)}
    assert len(named) > 10
    assert named - {clause.id for clause in CLAUSES} == set()


def test_the_table_of_rulings_names_the_clauses_that_carry_them() -> None:
    rows = re.findall(r"^\| (R\d+) \| [^|]+ \|([^|]*)\|$", TEXT, re.MULTILINE)
    table = {ruling: re.findall(r"[A-Z]+-\d+", cell) for ruling, cell in rows}
    carried = {r: [c.id for c in CLAUSES if r in c.rulings] for r in table}
    assert list(table) == [f"R{n}" for n in range(1, 19)]
    assert table == carried


def test_the_table_of_code_groups_is_the_one_of_the_code() -> None:
    table = TEXT.split("| code group |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == errors.GROUPS


def test_the_phases_are_those_of_the_code() -> None:
    paragraph = next(p for p in TEXT.split("\n\n") if p.startswith("Phases, in the order"))
    named = [word for word in re.findall(r"`(\w+)`", paragraph) if word in set(errors.Phase)]
    assert list(dict.fromkeys(named)) == list(errors.Phase)


# -- the examples


def examples() -> list[object]:
    """Every JSON block of SPEC.md, named by its clause and line."""
    return [
        pytest.param(example, id=f"{clause.id}:{example.line}")
        for clause in CLAUSES
        for example in clause.examples
    ]


def laid_over_base(fragment: str) -> bytes:
    """The base config with a fragment's keys, spliced as text: duplicate keys stay duplicate."""
    rest = {key: value for key, value in BASE.items() if key not in json.loads(fragment)}
    return f"{json.dumps(rest)[:-1]}, {fragment.strip()[1:]}".encode()


def test_every_json_block_is_an_example_of_a_clause() -> None:
    assert TEXT.count("```json") == sum(len(clause.examples) for clause in CLAUSES) > 0


@pytest.mark.parametrize("example", examples())
def test_what_an_example_says_happens(example: Example) -> None:
    verdict, _, rest = example.caption.rstrip(".").partition(": ")
    if verdict == "Accepted":
        assert substituted(example.json) == stated(rest)
    else:
        assert verdict == "Refused"
        assert refusal(example.json) == [rest]


def substituted(fragment: str) -> dict[int, tuple[int, ...]]:
    """Layer -> substituted ids, as the reference reads a fragment."""
    layers = config.parse(laid_over_base(fragment)).substitution.layers
    return {layer: entry.substituted for layer, entry in layers.items()}


def stated(caption: str) -> dict[int, tuple[int, ...]]:
    """Layer -> substituted ids, as a caption states them."""
    if caption == "nothing is substituted":
        return {}
    parts = [re.fullmatch(r"layer (\d+) substitutes ([\d, ]+)", p) for p in caption.split("; ")]
    assert all(parts), caption
    return {int(p[1]): tuple(map(int, p[2].split(", "))) for p in parts if p}


def refusal(fragment: str) -> list[str]:
    """Codes with which the reference refuses a fragment."""
    with pytest.raises(errors.Rejected) as caught:
        config.parse(laid_over_base(fragment))
    return [str(code) for code in caught.value.codes]


# -- the source document


def test_the_source_is_pinned_by_hash() -> None:
    assert 'Source document: "Expert substitution (MoNE)", vLLM documentation' in TEXT
    assert spec.source_hash(TEXT) == (
        "bc1a7ec9dec17411770ea5c758011c45d12c6b1782b612942b02796456ac56bf"
    )


@pytest.mark.parametrize("line", ["", "Source sha256: bc1a\n", f"Source sha256: {'0' * 64}\n" * 2])
def test_a_hash_line_that_is_absent_short_or_double_is_an_error(line: str) -> None:
    with pytest.raises(SpecError):
        spec.source_hash(f"# Title\n\n{line}")


def test_a_copy_of_the_source_is_compared_byte_for_byte(tmp_path: Path) -> None:
    copy = tmp_path / "source.txt"
    copy.write_bytes(b"abc")
    assert spec.file_hash(copy) == SHA256_ABC
    copy.write_bytes(b"abc\n")
    assert spec.file_hash(copy) != SHA256_ABC


# -- clauses against cases


@dataclass(frozen=True)
class Case:
    """What the gate needs of a case."""

    id: str
    clauses: Sequence[str]


def clause(name: str, level: str = "MUST", visibility: str = "observable") -> Clause:
    text = f"### {name}\n{level} · ruling · {visibility}\n\nText.\n\nRationale: Reason.\n"
    return spec.parse(text)[0]


RULES = [
    clause("AB-1"),
    clause("AB-2", "SHOULD"),
    clause("AB-3", "SHOULD", "internal"),
    clause("AB-4"),
]
TIGHT_CASES = [Case("a/one", ["AB-1", "AB-3"]), Case("a/two", ["AB-2"])]
TIGHT_REASONS = {"not-yet": {"AB-4": "needs two ranks"}, "not-testable": {}}


def test_the_gate_passes_when_everything_is_tied() -> None:
    assert spec.gate(RULES, TIGHT_CASES, TIGHT_REASONS) == []


@pytest.mark.parametrize(
    ("case", "violation"),
    [
        (Case("a/bad", []), "a/bad: cites no clause"),
        (Case("a/bad", ["AB-9"]), "a/bad: cites AB-9, which SPEC.md does not have"),
        (
            Case("a/bad", ["AB-1", "AB-2"]),
            "a/bad: its observable clauses are MUST and SHOULD",
        ),
        (Case("a/bad", ["AB-4"]), "AB-4: a case cites it, but not_judged.toml excuses it"),
        (Case("a/one", ["AB-1"]), "a/one: two cases have this id"),
    ],
)
def test_the_gate_names_a_loose_case(case: Case, violation: str) -> None:
    assert spec.gate(RULES, [*TIGHT_CASES, case], TIGHT_REASONS) == [violation]


@pytest.mark.parametrize(
    ("reasons", "violation"),
    [
        ({}, "AB-4: no case cites it and not_judged.toml gives no reason"),
        ({"not-yet": {"AB-4": " "}}, "not_judged.toml: AB-4 has no reason"),
        ({"later": {"AB-4": "two ranks"}}, "not_judged.toml: unknown section later"),
        (
            {"not-yet": {"AB-4": "two ranks"}, "not-testable": {"AB-4": "unseen"}},
            "not_judged.toml: AB-4 stands in two sections",
        ),
        (
            {"not-yet": {"AB-4": "two ranks", "AB-5": "gone"}},
            "not_judged.toml: AB-5 is no clause of SPEC.md",
        ),
    ],
)
def test_the_gate_names_a_loose_reason(reasons: dict[str, dict[str, str]], violation: str) -> None:
    assert spec.gate(RULES, TIGHT_CASES, reasons) == [violation]


def test_the_clauses_the_cases_and_the_reasons_of_this_release_are_tied() -> None:
    loaded = cases.load(ROOT)
    assert len(loaded) > 0
    assert spec.gate(CLAUSES, loaded, spec.read_not_judged()) == []


def test_a_case_has_the_level_of_its_observable_clauses() -> None:
    must, should, inner = (
        clause("AB-1"),
        clause("AB-2", "SHOULD"),
        clause("AB-3", "MUST", "internal"),
    )
    assert spec.case_level([must]) is Level.MUST
    assert spec.case_level([should, inner]) is Level.SHOULD
    assert spec.case_level([inner]) is Level.MUST
    assert spec.case_level([should, must]) is Level.MUST


# -- the command


def run(*arguments: str) -> Result:
    app = typer.Typer()
    spec_command.register(app)
    return CliRunner().invoke(app, arguments)


def test_the_table_has_one_line_per_clause_with_its_cases_or_reason() -> None:
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines] == [clause.id for clause in CLAUSES]
    by_id = {line.split()[0]: line for line in lines}
    assert re.search(r" observable  .*\bload/missing-constant\b", by_id["LOAD-7"])
    assert by_id["GEN-2"].endswith("require the step they judge.)")
    assert "(not-testable: " in by_id["GEN-2"]


def test_named_clauses_are_printed_in_full_and_in_the_order_named() -> None:
    printed = run("load-7", "CAP-13").stdout
    assert printed.startswith("LOAD-7  MUST · source: Weight loading · observable\n")
    assert "Loading fails when a substituted expert of a built layer has no constant." in printed
    assert printed.index("Rationale: There is") < printed.index("load/missing-constant: ")
    assert printed.index("LOAD-7  MUST") < printed.index("CAP-13  SHOULD")
    assert "No case (not-testable: It is about the wording of a message, " in printed
    assert printed.endswith("No planted fault breaks it\n")
    assert "fault missing-constant-is-zero: A missing constant is read as zero.\n" in printed


def test_a_clause_is_printed_with_its_examples() -> None:
    printed = run("FMT-22").stdout
    assert "\nRefused: CONFIG_JSON/duplicate-key.\n" in printed
    assert '    {"approximate_experts": {"1": [2], "1": [3]}}\n' in printed


def test_clauses_as_json() -> None:
    (entry,) = json.loads(run("LOAD-7", "--json").stdout)
    assert (entry["id"], entry["level"], entry["visibility"]) == ("LOAD-7", "MUST", "observable")
    assert "load/missing-constant" in entry["cases"]
    assert entry["not_judged"] is None
    assert "missing-constant-is-zero" in entry["faults"]
    assert len(json.loads(run("--json").stdout)) == len(CLAUSES)


def test_an_unknown_clause_is_one_line_and_exit_2() -> None:
    result = run("LOAD-7", "LOAD-99")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: no clause 'LOAD-99'; `mone-ref spec` lists them\n"


def test_a_matching_copy_of_the_source_exits_0_another_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay_out(tmp_path, f"# Title\n\nSource sha256: {SHA256_ABC}\n")
    monkeypatch.setattr(data, "root", lambda: root)
    copy = tmp_path / "source.txt"
    copy.write_bytes(b"abc")
    assert run("--check-source", str(copy)).exit_code == 0
    copy.write_bytes(b"abc\n")
    result = run("--check-source", str(copy))
    assert result.exit_code == 1
    assert "is another text" in result.stderr


def test_a_broken_specification_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay_out(tmp_path, "### Notes\n")
    shutil.copytree(ROOT / "conformance", root / "conformance", dirs_exist_ok=True)
    shutil.copytree(ROOT / "fixtures", root / "fixtures")
    monkeypatch.setattr(data, "root", lambda: root)
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: SPEC.md:1: not a clause id: ### Notes\n"


@pytest.mark.parametrize(
    "arguments", [("--check-source", "/nowhere/x"), ("--check-source", "x", "LOAD-7")]
)
def test_a_copy_that_cannot_be_read_or_a_mixed_request_is_exit_2(
    arguments: tuple[str, ...],
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


# -- where the data lie


def lay_out(root: Path, text: str = "") -> Path:
    """The least that counts as the suite's data."""
    (root / "conformance").mkdir(parents=True)
    (root / "SPEC.md").write_text(text)
    return root


def test_a_checkout_is_found_before_the_data_of_a_wheel(tmp_path: Path) -> None:
    package = tmp_path / "mone_ref"
    inside = lay_out(package / "_data")
    assert data.root(package) == inside
    checkout = lay_out(tmp_path)
    assert data.root(package) == checkout


def test_an_installation_without_its_data_says_where_it_looked(tmp_path: Path) -> None:
    (tmp_path / "conformance").mkdir()
    with pytest.raises(FileNotFoundError, match="_data"):
        data.root(tmp_path / "mone_ref")
