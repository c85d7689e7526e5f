"""The page of error codes: every code, with its sentence."""

from __future__ import annotations

from pathlib import Path

from mone_ref.errors import Code

PAGE = Path(__file__).resolve().parent.parent / "docs" / "error-codes.md"


def test_the_page_has_every_code_with_its_sentence():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [f"| `{code}` | {code.doc} |" for code in Code]
