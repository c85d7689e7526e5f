"""docs/families.md says what families.py says, and the figures are the worst of their reports."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import family_table
import pytest

from mone_ref.families import FAMILIES, GLM4_MOE, OLMOE, REFUSED
from mone_ref.suite.compare import MULTIPLIER

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"


def rows(heading: str) -> dict[str, list[str]]:
    """First cell -> the other cells of the table behind a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first: rest for first, *rest in cells}


def test_every_description_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(family_table.described()) in page
    assert "\n".join(family_table.refused()) in page
    assert len(list(family_table.refused())) == len(REFUSED)


def test_the_descriptions_say_what_a_family_is() -> None:
    """Two families by hand, so that a wrong generator does not agree with itself."""
    assert family_table.router(OLMOE) == "softmax, normalised by `norm_topk_prob` (default false)"
    assert family_table.attention(OLMOE) == "grouped queries, norms over all heads"
    assert family_table.beside_experts(OLMOE) == "nothing"
    assert family_table.tensors(OLMOE) == (
        "`model.layers.N`: `mlp.gate`, `mlp.experts.J.{gate_proj,up_proj,down_proj}`"
    )
    assert family_table.router(GLM4_MOE) == (
        "sigmoid, normalised by `norm_topk_prob` (default true), chosen with "
        "`e_score_correction_bias`, groups by their 2 best experts, times `routed_scaling_factor`"
    )
    assert family_table.attention(GLM4_MOE) == (
        "grouped queries, norms of each head by `use_qk_norm`, biases by `attention_bias`, "
        "part of a head rotated"
    )
    assert family_table.beside_experts(GLM4_MOE) == (
        "shared experts `mlp.shared_experts`; first `first_k_dense_replace` layers dense"
    )


def test_every_family_has_its_figures_and_none_is_over_the_limit() -> None:
    figures = rows("## Figures")
    assert list(figures) == [family.name for family in FAMILIES]
    ratios = [
        float(word)
        for truth, *engines in figures.values()
        for cell in engines
        for word in re.findall(r"\d\.\d\d", cell)
    ]
    assert len(ratios) > 2 * len(FAMILIES)
    assert max(ratios) <= MULTIPLIER


def test_every_contested_reading_names_families() -> None:
    named = {name for first in rows("## Contested readings") for name in first.split(", ")}
    assert named == {family.name for family in FAMILIES}


def result(case: str, dtype: str, outcome: str, token: float, largest: float) -> dict[str, Any]:
    numbers = {"token_ratio": token, "max_ratio": largest, "max_error": largest / 1e5}
    return {"case": case, "dtype": dtype, "outcome": outcome, "numbers": numbers, "found": "no"}


def test_a_figure_is_the_worst_of_its_family() -> None:
    told = [
        result("outputs/olmoe-approx", "float32", "ok", 1.25, 0.5),
        result("controls/olmoe-approx-plain", "float32", "ok", 0.75, 2.0),
        result("controls/olmoe-top20-plain", "float32", "ok", 0.5, 1.0),
        result("outputs/olmoe-twelve", "bfloat16", "mismatch", 7.5, 0.5),
        result("outputs/qwen3-approx", "float32", "ok", 2.75, 2.5),
        result("controls/olmoe-approx-plain", "float16", "mismatch", 9.0, 0.5),
        result("outputs/olmoe-approx", "float16", "not-judged", 9.0, 0.5),
        result("outputs/mixtral-approx", "float32", "not-applicable", 0.0, 0.0),
    ]
    made = list(family_table.figures({"transformers": told}))
    assert made[0] == "| family | float64 oracle - transformers float32 | transformers |"
    assert made[2] == "| olmoe | 2.0e-05 | 2.00 / 7.50 / base differs |"
    assert made[3] == "| qwen3_moe | not run | 2.75 / not run / not run |"
    assert list(family_table.reasons({"transformers": told})) == ["- transformers, mixtral: no."]


def test_one_command_runs_an_engine_and_prints_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(family_table, "CASES", ("controls/olmoe-top20-plain",))
    monkeypatch.setattr(sys, "argv", ["family_table.py", "--run", "reference"])
    family_table.main()
    out = capsys.readouterr().out
    assert "\n| olmoe | not run | 1.00 / 1.00 / 1.00 |\n" in out
