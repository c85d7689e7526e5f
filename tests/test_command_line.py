"""What every command owes its caller, in a process of its own: an answer that is not lost without a
word, no waiting for a file that never speaks, and no file that grows in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import handmade
import pytest
import reports
import rewriting
import small_moe
from patience import HANG
from rewriting import ROOT

from mone_ref.fill import recipe
from mone_ref.fill.recipe import RecipeError
from mone_ref.rewrite import plan
from mone_ref.rewrite.plan_dialects import Unread
from mone_ref.suite import cases, findings
from mone_ref.suite.cases import CaseError
from mone_ref.suite.findings import FindingsError

OLMOE = ROOT / "fixtures" / "olmoe-approx" / "checkpoint"
REPORT = ROOT / "docs" / "findings" / "vllm-0.33.jsonl"
NOTES = ROOT / "docs" / "findings" / "vllm-0.33.yaml"
MAIN = "from mone_ref.cli import main; main()"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``source``, ``plan.json``, the output of the rewrite, ``out``, and a whole report."""
    root = rewriting.rewritten(tmp_path_factory.mktemp("made"))
    reports.write(root / "report.jsonl")
    return root


def ended(
    *words: object,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    **options: object,
) -> tuple[int, str]:
    """Exit code and standard error of ``python WORDS``, which must end by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [*prefix, sys.executable, *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options}
    done = subprocess.run(command, env=environment, text=True, timeout=HANG, check=False, **pipes)
    said = done.stdout if pipes["stdout"] == subprocess.PIPE else done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said


def together(*words: object, **options: Any) -> tuple[int, str]:
    """Exit code, and all that is said on both."""
    return ended(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


COMMANDS = {
    "help": ["--help"],
    "inspect": ["inspect", "source"],
    "inspect as JSON": ["inspect", "source", "--json"],
    "plan": ["plan", "uniform", "source", "--keep", "4", "--out", "new.yaml"],
    "rewrite": ["rewrite", "source", "--plan", "plan.json", "--dry-run"],
    "convert": ["convert", OLMOE, "--to", "explicit", "--dry-run"],
    "verify": ["verify", "out", "--against", "source"],
    "validate": ["validate", "source"],
    "run": ["run", OLMOE, "--tokens", "1"],
    "report": ["report", "report.jsonl", "--json"],
    "findings": ["findings", REPORT, "--notes", NOTES, "--out", "page.md"],
    "fixtures": ["fixtures", "list"],
    "spec": ["spec"],
    "matrix": ["matrix", "--list"],
}
NO_SPACE = "error: standard output: found no space left on device, expected that it takes text\n"


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_answer_that_cannot_be_written_is_one_line_and_74(
    made: Path, tmp_path: Path, words: list[str]
) -> None:
    for name in ("source", "plan.json", "out", "report.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    with open("/dev/full", "w") as full:
        assert ended("-c", MAIN, *words, stdout=full, cwd=tmp_path) == (74, NO_SPACE)


def test_the_ranks_and_pytest_lose_no_answer_either() -> None:
    with open("/dev/full", "w") as full:
        parallel = ended("-m", "mone_ref.parallel", OLMOE, "--tokens", "1", stdout=full)
        assert parallel == (74, NO_SPACE)
        asked = ("conform", "--backend=reference", "--collect-only", "-q")
        status, said = ended("-c", MAIN, *asked, stdout=full)
    assert status == 74
    assert said.startswith(NO_SPACE)


@pytest.mark.parametrize("reader", ["gone", "never there"])
def test_nobody_reads(reader: str) -> None:
    """A pipe whose other end is closed, and a descriptor that the caller had closed."""
    if reader == "never there":
        closing = ("sh", "-c", 'exec "$@" >&-', "sh")
        closed = ended("-c", MAIN, "spec", stdout=None, prefix=closing)
        expected = "error: standard output: found closed, expected that it takes text\n"
        assert closed == (74, expected)
        return
    out, into = os.pipe()
    os.close(out)
    broken = ended("-c", MAIN, "spec", stdout=into)
    os.close(into)
    assert broken == (74, NO_SPACE.replace("no space left on device", "broken pipe"))


def test_an_encoding_without_some_letter_loses_no_answer() -> None:
    """``spec`` prints a middle dot, which ASCII has not."""
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert together("-c", MAIN, "spec", "GEN-1", environment=environment)[0] == 0


# -- files that never speak


INPUTS = {
    "a plan": (["rewrite", "source", "--plan", "pipe", "--dry-run"], 2),
    "a plan to verify by": (["verify", "out", "--against", "source", "--plan", "pipe"], 2),
    "scores": (["plan", "from-scores", "source", "pipe", "--keep", "4", "--out", "new"], 2),
    "tokens": (["run", OLMOE, "--tokens-file", "pipe"], 2),
    "a report": (["report", "pipe", "--json"], 2),
    "notes": (["findings", REPORT, "--notes", "pipe", "--out", "page.md"], 2),
    "a page": (["findings", REPORT, "--notes", NOTES, "--out", "pipe"], 2),
    "a recipe": (["fixtures", "fill", "pipe", "--out", "filled"], 1),
    "the source document": (["spec", "--check-source", "pipe"], 2),
    "an error map": (["conform", "--backend=reference", "--error-map", "pipe"], 4),
    "expectations": (["conform", "--backend=reference", "--expectations", "pipe"], 4),
}


@pytest.mark.parametrize(("words", "status"), INPUTS.values(), ids=INPUTS)
def test_a_pipe_is_not_waited_for(
    made: Path, tmp_path: Path, words: list[str], status: int
) -> None:
    for name in ("source", "out"):
        (tmp_path / name).symlink_to(made / name)
    os.mkfifo(tmp_path / "pipe")
    before = set(tmp_path.iterdir())
    found, said = together("-c", MAIN, *words, cwd=tmp_path)
    assert found == status, said
    assert "not a regular file" in said
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("command", ["inspect", "validate", "rewrite", "verify", "run"])
def test_a_checkpoint_of_pipes_is_not_waited_for(tmp_path: Path, command: str, name: str) -> None:
    """``tokenizer.json`` is not opened, and never copied: in an output it is a file too many."""
    source = small_moe.write(tmp_path / "source", small_moe.per_expert())
    rewriting.plan(tmp_path / "plan.json", [0, 2], layers=2)
    words = ["rewrite", source, "--plan", tmp_path / "plan.json", "--out", tmp_path / "out"]
    assert ended("-c", MAIN, *words)[0] == 0
    broken = source if command != "verify" else tmp_path / "out"
    (broken / name).unlink()
    os.mkfifo(broken / name)
    words = {
        "inspect": ["inspect", source],
        "validate": ["validate", source],
        "rewrite": ["rewrite", source, "--plan", tmp_path / "plan.json", "--out", "again"],
        "verify": ["verify", tmp_path / "out", "--against", source],
        "run": ["run", source, "--tokens", "1"],
    }[command]
    status, said = together("-c", MAIN, *words, cwd=tmp_path)
    opened = name != "tokenizer.json" or command in ("verify", "run")
    assert status == (1 if opened else 0), said


# -- memory


PROGRAM = """
import resource, sys
from mone_ref.cli import main, run  # what is imported takes more or less of it, by the build
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))
main(sys.argv[1:])
"""


@pytest.mark.parametrize("told", ["as text", "as JSON"])
def test_a_model_beyond_the_memory_of_this_process(tmp_path: Path, told: str) -> None:
    """An embedding of 512 MB, most of it a hole, and 64 MiB left to load it into."""
    width = 2**26
    stored = handmade.tensors()
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, content) in stored.items():
        rows = width if name in ("model.embed_tokens.weight", "lm_head.weight") else shape[0]
        size = len(content) // shape[0] * rows
        header[name] = {
            "dtype": dtype,
            "shape": [rows, *shape[1:]],
            "data_offsets": [end, end + size],
        }
        end += size
    start = handmade.with_header(header)
    files = {"config.json": handmade.config() | {"vocab_size": width}, "model.safetensors": start}
    source = handmade.write(tmp_path / "source", files)
    os.truncate(source / "model.safetensors", len(start) + end)
    words = ("run", source, "--tokens", "1", *(["--json"] if told == "as JSON" else []))
    status, said = together("-c", PROGRAM, *words)
    assert status == 2, said
    if told == "as JSON":
        document = json.loads(said)
        assert (document["exit_code"], len(document["findings"])) == (2, 1)
        assert document["findings"][0]["code"] == "PROMPT/memory"
    else:
        assert said.startswith("error PROMPT/memory model and prompt: found 2.15 GB of parameters")
        assert len(said.splitlines()) == 1


# -- YAML that stands for more than it says


LAUGHS = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
EXPLODING = {
    "a billion": "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + LAUGHS,
    "itself": "a: &a [*a]\n",
    "a tag": "a: !!python/name:os.system\n",
    "a key twice": "a: 1\na: 2\n",
    "a list as a key": "? [a]\n: 1\n",
    "depth": "a: " + "[" * 600 + "]" * 600,
}


@pytest.mark.parametrize("text", EXPLODING.values(), ids=EXPLODING)
def test_yaml_holds_no_more_than_it_says(tmp_path: Path, text: str) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(text)
    validator = cases.read_schema(ROOT / "conformance" / "case.schema.json")
    with pytest.raises(RecipeError):
        recipe.read(file)
    with pytest.raises(CaseError):
        cases.read_document(file, validator)
    with pytest.raises(FindingsError):
        findings.read(file)
    with pytest.raises(Unread):
        plan.load(text.encode())
