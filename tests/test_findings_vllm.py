"""Every script of the findings about vLLM prints on a live vLLM what the page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG

from mone_ref.suite import findings

ROOT = Path(__file__).resolve().parent.parent
NOTES = ROOT / "docs" / "findings" / "vllm-0.33.yaml"
FINDINGS = findings.read(NOTES)["findings"]

RUN_EACH = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(f"{sys.argv[1]}/{name}.py", run_name="__main__")
    print(json.dumps([name, told.getvalue()]), flush=True)
"""
"""One process for all: importing vLLM takes longer than most of the scripts."""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    names = [entry["id"] for entry in FINDINGS]
    command = [sys.executable, "-c", RUN_EACH, str(findings.scripts(NOTES)), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


@pytest.mark.vllm
@pytest.mark.parametrize("entry", FINDINGS, ids=lambda entry: entry["id"])
def test_a_script_prints_what_the_page_says(entry, printed):
    assert printed[entry["id"]].split() == entry["prints"].split()
