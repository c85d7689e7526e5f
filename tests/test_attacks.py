"""Checkpoints made to mislead: file names that lead out, spellings that collide, names too long,
files that may not be read. Every command refuses with one clear error, and the source stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import rewriting
import small_moe
from typer.testing import CliRunner

from mone_ref.checkpoint.findings import MOST
from mone_ref.cli import application
from mone_ref.rewrite import journal

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
UP = "model.layers.0.mlp.experts.{}.up_proj.weight"


def run(*words: object) -> tuple[int, str]:
    """Exit code and output, standard error included."""
    result = CliRunner().invoke(application(str(words[0])), [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def checkpoint(root: Path, tensors: small_moe.Tensors | None = None) -> Path:
    """``source`` of two shards, ``plan.json`` that prunes it, ``substitute.json`` that does not."""
    rewriting.plan(root / "plan.json", [0, 2], layers=2)
    small_moe.substitute(root, {"0": [1, 4], "1": [2]})
    layers = {"0": {"substitute": [1, 4]}, "1": {"substitute": [2]}}
    document = {"version": 1, "kind": "substitute", "constants": "constants.safetensors"}
    (root / "substitute.json").write_text(json.dumps({**document, "layers": layers}))
    return small_moe.write(root / "source", tensors or small_moe.per_expert(), shards=2)


def commands(root: Path) -> dict[str, list[object]]:
    """Everything that reads a checkpoint, with the exit code that a broken one gets."""
    source, out = root / "source", ("--out", root / "out")
    return {
        "inspect": ["inspect", source],
        "validate": ["validate", source],
        "plan": ["plan", "uniform", source, "--keep", "2", *out],
        "dry run": ["rewrite", source, "--plan", root / "plan.json", "--dry-run"],
        "prune": ["rewrite", source, "--plan", root / "plan.json", *out],
        "substitute": ["rewrite", source, "--plan", root / "substitute.json", *out],
        "convert": ["convert", source, "--to", "explicit", *out],
        "run": ["run", source, "--tokens", "1"],
    }


def refused(root: Path, words: list[object], code: str) -> None:
    """One clear error, nothing beside the source, and the source as it was."""
    before, there = rewriting.hashes(root / "source"), set(root.iterdir())
    status, said = run(*words)
    assert status == 1, said
    told = [line for line in said.splitlines() if line.startswith(f"error {code} ")]
    assert told, said
    assert all(": found " in line and ", expected " in line for line in told)
    assert all(line.isprintable() for line in said.splitlines())
    assert rewriting.hashes(root / "source") == before
    assert set(root.iterdir()) == there


NAMES = {
    "../x.safetensors": "CHECKPOINT/unsafe-path",
    "/dev/x.safetensors": "CHECKPOINT/unsafe-path",
    "a/../x.safetensors": "CHECKPOINT/unsafe-path",
    "sub/x.safetensors": "CHECKPOINT/unsafe-path",
    "x\\y.safetensors": "CHECKPOINT/unsafe-path",
    "C:x.safetensors": "CHECKPOINT/unsafe-path",
    "x\0.safetensors": "CHECKPOINT/unsafe-path",
    "..": "CHECKPOINT/unsafe-path",
    "": "CHECKPOINT/unsafe-path",
    "x.SAFETENSORS": "CHECKPOINT/index",
    "x.safetensors ": "CHECKPOINT/index",
    "x\n\x1b[2J.safetensors": "CHECKPOINT/missing-shard",
    "\ud800.safetensors": "CHECKPOINT/missing-shard",
    "y" * 5000 + ".safetensors": "CHECKPOINT/missing-shard",
}


@pytest.mark.parametrize(("name", "code"), NAMES.items(), ids=[ascii(name)[:20] for name in NAMES])
def test_an_index_that_names_another_place(tmp_path: Path, name: str, code: str) -> None:
    source = checkpoint(tmp_path)
    (tmp_path / "x.safetensors").write_bytes((source / FIRST).read_bytes())
    index = json.loads((source / INDEX).read_text())
    moved = {key: name if file == FIRST else file for key, file in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index | {"weight_map": moved}))
    for words in commands(tmp_path).values():
        if words[0] != "run":  # tells first that it does not compute this family
            refused(tmp_path, words, code)


@pytest.mark.parametrize("place", ["model-{:06}.safetensors", "../{:06}.safetensors"])
def test_an_index_of_very_many_shards_is_told_in_short(tmp_path: Path, place: str) -> None:
    source = checkpoint(tmp_path)
    named = {f"t{number}": place.format(number) for number in range(100_000)}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    status, said = run("inspect", source, "--json")
    assert status == 1
    assert len(json.loads(said)["problems"]) <= MOST + 10


SPELLINGS = {
    "01": "MODEL_WEIGHTS/unknown",
    "+1": "MODEL_WEIGHTS/unknown",
    "1_0": "MODEL_WEIGHTS/unknown",
    "\u0661": "MODEL_WEIGHTS/unknown",  # an Arabic one, which int() reads
    "\uff11": "MODEL_WEIGHTS/unknown",  # a wide one
    "6": "MODEL_WEIGHTS/missing",  # one more than the router knows
    "1000000000000000000": "MODEL_WEIGHTS/unknown",
}


@pytest.mark.parametrize("command", ["dry run", "prune", "substitute"])
@pytest.mark.parametrize(("spelling", "code"), SPELLINGS.items(), ids=map(ascii, SPELLINGS))
def test_one_more_spelling_of_an_expert(
    tmp_path: Path, command: str, spelling: str, code: str
) -> None:
    """Passed on as it is, it would meet the renumbered expert 1 in the readers of the output."""
    name = UP.format(spelling)
    more = small_moe.named({name: [small_moe.INNER, small_moe.HIDDEN]})
    checkpoint(tmp_path, small_moe.per_expert() | more)
    refused(tmp_path, commands(tmp_path)[command], code)


@pytest.mark.parametrize("stack", ["model.layers.00", "layers.0", "Model.layers.0"])
def test_a_second_stack_that_would_keep_its_width(tmp_path: Path, stack: str) -> None:
    again = {
        f"{stack}{name.removeprefix('model.layers.0')}": stored
        for name, stored in small_moe.per_expert().items()
        if name.startswith("model.layers.0.mlp.")
    }
    checkpoint(tmp_path, small_moe.per_expert() | again)
    refused(tmp_path, commands(tmp_path)["prune"], "PLAN/layer")


# -- other files of the source


@pytest.mark.parametrize("length", [201, 243, 255])
def test_a_file_whose_name_is_as_long_as_names_may_be(tmp_path: Path, length: int) -> None:
    """While it is written it has a longer one."""
    source, out = checkpoint(tmp_path), tmp_path / "out"
    for letter in "ab":
        (source / f"{'z' * (length - 1)}{letter}").write_text(letter)
    assert run(*commands(tmp_path)["prune"])[0] == 0
    assert [(out / f"{'z' * (length - 1)}{letter}").read_text() for letter in "ab"] == ["a", "b"]
    assert run("verify", out, "--against", source)[0] == 0


def closed_file(source: Path) -> None:
    (source / "tokenizer.json").chmod(0)


def closed_directory(source: Path) -> None:
    """Its files can be listed and not looked at."""
    (source / "deeper").mkdir()
    (source / "deeper" / "chat.jinja").write_text("template")
    (source / "deeper").chmod(0o444)


@pytest.mark.parametrize("close", [closed_file, closed_directory])
@pytest.mark.parametrize("command", ["dry run", "prune"])
def test_another_file_that_may_not_be_read(
    tmp_path: Path, command: str, close: Callable[[Path], None]
) -> None:
    source = checkpoint(tmp_path)
    close(source)
    there = set(tmp_path.iterdir())
    words = commands(tmp_path)[command]
    status, said = rewriting.run(*words, prefix=rewriting.WITHOUT_POWER)
    assert (status, "error CHECKPOINT/unreadable " in said) == (1, True)
    assert set(tmp_path.iterdir()) == there


def test_a_source_that_may_only_be_read(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    words = commands(tmp_path)["prune"]
    assert rewriting.run(*words, prefix=rewriting.WITHOUT_POWER)[0] == 0
    assert run("verify", tmp_path / "out", "--against", source)[0] == 0


# -- what lies where an output is to be written


def test_a_journal_that_is_a_pipe_or_too_deep_is_none(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_text("[" * 100_000)
    assert journal.load(tmp_path) is None
    (tmp_path / journal.NAME).unlink()
    os.mkfifo(tmp_path / journal.NAME)
    assert journal.load(tmp_path) is None


def test_names_of_inputs_that_do_not_print(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    name = "a\x1b[2J\udcff"
    for words in (
        ["rewrite", source, "--plan", tmp_path / name, "--dry-run"],
        ["plan", "from-scores", source, tmp_path / name, "--keep", "2", "--out", tmp_path / "p"],
        ["fixtures", "list", "--root", tmp_path / name],
        ["fixtures", "fill", tmp_path / name, "--out", tmp_path / "out"],
    ):
        status, said = run(*words)
        assert status in (1, 2)
        assert said
        assert all(line.isprintable() for line in said.splitlines()), ascii(said)


def test_a_root_of_fixtures_whose_name_is_too_long() -> None:
    status, said = run("fixtures", "list", "--root", "x" * 300)
    assert status == 1
    assert said.startswith("error: ")
