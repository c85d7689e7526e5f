"""docs/checkpoint-tools.md: every feature that is claimed names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "checkpoint-tools.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows(name: str) -> list[list[str]]:
    """Cells of the table behind ``<!-- name -->``, heading first."""
    table = PAGE.split(f"<!-- {name} -->\n")[1].split("\n\n")[0].splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {len(row) for row in found} == {len(found[0])}
    return [found[0], *found[2:]]


def exists(file: str, function: str) -> bool:
    return f"\ndef {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


FEATURES = rows("features")


@pytest.mark.parametrize("row", FEATURES[1:], ids=lambda row: row[0])
def test_every_claim_names_tests_that_exist(row: list[str]) -> None:
    assert {cell.partition(":")[0] for cell in row[1:-1]} <= {"y", "p", "n", "–", "?"}
    held = NAMED.findall(row[-1])
    assert bool(held) == (row[1][0] in "yp")
    assert row[-1] == ", ".join(f"`{file}::{test}`" for file, test in held)
    assert [one for one in held if not exists(*one)] == []


@pytest.mark.parametrize("row", rows("faults")[1:], ids=lambda row: row[0])
def test_every_fault_names_tests_that_exist(row: list[str]) -> None:
    held = NAMED.findall(row[-1])
    assert held
    assert [one for one in held if not exists(*one)] == []


def test_the_tools_of_the_table_are_those_of_the_legend() -> None:
    legend = re.findall(r"^\| ([A-Z]{2}) \| \S", PAGE, re.MULTILINE)
    assert FEATURES[0][2:-1] == legend


def test_a_test_that_is_not_there_is_seen() -> None:
    assert not exists("test_convert.py", "test_nothing")
