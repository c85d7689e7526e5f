"""Judging on fixtures of one's own: what is asked, and directories that cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_engines as fakes
import handmade
import pytest
import torch
from patience import HANG
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mone_ref.backends.reference import ReferenceBackend
from mone_ref.cli import conform
from mone_ref.fill import fixture, recipe
from mone_ref.suite import report
from mone_ref.suite.options import OptionError
from mone_ref.suite.run import Run, Settings

ROOT = Path(__file__).resolve().parent.parent
RECIPE = {**handmade.RECIPE, "name": "mine"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    fixture.fill_pair(recipe.parse(RECIPE), directory)
    return directory


@pytest.fixture
def own(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(filled, tmp_path / "own"))


def judged(backend, **settings) -> Run:
    run = Run(Settings("x", **settings), backend, ROOT)
    for case, dtype in run.planned:
        run.judge(case, dtype)
    return run


def test_every_fixture_is_judged_at_every_dtype_beside_its_control(own, tmp_path):
    run = judged(ReferenceBackend(), fixtures=own, report=tmp_path / "r.jsonl")
    dtypes = ("float32", "bfloat16", "float16")
    controls = [("fixtures/mine-plain", dtype) for dtype in dtypes]
    assert [(r.case, r.dtype) for r in run.results] == [
        *controls,
        *(("fixtures/mine", dtype) for dtype in dtypes),
    ]
    assert {str(result.outcome) for result in run.results} == {"ok"}
    lines = run.finish()
    assert run.passes()
    assert lines[-2:] == [
        "verdict      PARTIAL RUN: no verdict",
        f"fixtures     2 of your own in {own}; they decide about no clause of the specification",
    ]
    read = report.read(tmp_path / "r.jsonl")
    assert read.footer["verdict"] is None
    # Another fixture is another suite: such reports must not be compared.
    (own / "mine" / "checkpoint" / "tokenizer.json").write_text("{}")
    assert report.own_hash(own) != read.header["suite"]["sha256"]


def test_a_wrong_engine_fails_with_a_command_that_names_the_fixtures(own):
    run = judged(fakes.SwapsPrompts(), fixtures=own)
    assert not run.passes()
    told = run.explain(run.results[-1])
    assert f"mone-ref conform --backend=x --fixtures={own} --case fixtures/mine" in told


def test_a_base_model_that_differs_leaves_the_substituted_one_unjudged(own):
    run = judged(fakes.SwapsTokens(), fixtures=own)
    assert [str(result.outcome) for result in run.results] == ["mismatch", "not-judged"]
    assert not run.passes()


def test_one_case_can_be_chosen_and_declared(own, tmp_path):
    (tmp_path / "e.toml").write_text(
        '[[deviation]]\nid = "fixtures/mine-plain"\noutcome = "mismatch"\nreason = "known"\n'
    )
    run = judged(
        fakes.SwapsTokens(),
        fixtures=own,
        patterns=("fixtures/mine-plain",),
        expectations=tmp_path / "e.toml",
    )
    assert [run.status(result) for result in run.results] == ["declared"]


def test_what_an_adapter_declares_about_the_suite_is_left_aside(own, tmp_path):
    (tmp_path / "e.toml").write_text(
        '[[deviation]]\nid = "controls/olmoe-approx-plain"\noutcome = "mismatch"\nreason = "x"\n'
    )

    class Ships(fakes.Honest):
        expectations = tmp_path / "e.toml"

    assert judged(Ships(), fixtures=own).passes()


def refusal(directory: Path) -> str:
    with pytest.raises(OptionError) as caught:
        Run(Settings("x", fixtures=directory), fakes.Honest(), ROOT)
    return str(caught.value)


def test_a_directory_without_fixtures(tmp_path):
    for place in (tmp_path, tmp_path / "absent"):
        assert refusal(place) == (
            f"--fixtures {place}: no fixture, expected NAME/{{recipe.yaml, checkpoint/, "
            "golden.safetensors} as written by mone-ref fixtures fill RECIPE --out DIR"
        )


def test_one_fixture_instead_of_the_directory_above(own):
    place = own / "mine"
    assert refusal(place) == f"--fixtures {place}: is one fixture, name the directory above it"


def test_a_missing_control(own):
    shutil.rmtree(own / "mine-plain")
    assert refusal(own) == (
        f"--fixtures {own}: mine: no control mine-plain beside it; "
        f"mone-ref fixtures fill {own / 'mine' / 'recipe.yaml'} --out DIR makes both"
    )


def test_a_fixture_under_another_name(own):
    (own / "mine").rename(own / "yours")
    told = "yours: recipe.yaml is of mine, expected the name of its directory"
    assert refusal(own) == f"--fixtures {own}: {told}"


@pytest.mark.parametrize(
    ("file", "flaw"),
    [
        ("golden.safetensors", "No such file or directory"),
        ("checkpoint/config.json", "CHECKPOINT/no-config"),
        ("checkpoint/model.safetensors", "CHECKPOINT/no-weights"),
    ],
)
def test_a_fixture_that_is_not_whole(own, file, flaw):
    (own / "mine" / file).unlink()
    told = refusal(own)
    assert told.startswith(f"--fixtures {own}: ")
    assert flaw in told


def test_a_recipe_that_cannot_be_read(own):
    (own / "mine" / "recipe.yaml").write_text("name: mine\n")
    assert "is a required property" in refusal(own)


def edit_golden(directory: Path, name: str, change) -> None:
    path = directory / "golden.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata=metadata)


def test_a_golden_of_another_checkpoint(own):
    edit_golden(own / "mine", "prompt.1.logprobs", lambda logprobs: logprobs * (1 + 1e-9))
    told = refusal(own)
    assert told.startswith(f"--fixtures {own}: mine: golden.safetensors is stale: prompt 1 is off")
    assert told.endswith("; fill the recipe again")


def test_a_checkpoint_whose_answers_are_no_numbers(own):
    path = own / "mine" / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    assert "mine: golden.safetensors is stale: prompt 0 is off by nan" in refusal(own)


def test_a_golden_of_another_vocabulary(own):
    edit_golden(own / "mine", "prompt.0.logprobs", lambda logprobs: logprobs[:, 1:].contiguous())
    assert "prompt 0 has the shape [8, 15], the checkpoint gives [8, 16]" in refusal(own)


def test_a_golden_with_a_token_that_the_model_does_not_have(own):
    edit_golden(own / "mine", "prompt.0.ids", lambda ids: ids + 16)
    assert "a prompt needs token ids in [0, 16)" in refusal(own)


def test_a_golden_without_a_budget(own):
    edit_golden(own / "mine", "prompt.0.float32.max", torch.zeros_like)
    assert "holds a budget that is not positive" in refusal(own)


def test_the_command_takes_the_directory_although_pytest_has_an_option_of_that_name(own, tmp_path):
    words = ["--fixtures", str(own), "--case", "fixtures/mine", "-k", "x=y", "--dtype=float32"]
    assert conform.joined(words) == [
        f"--own-fixtures={own}",
        "--case=fixtures/mine",
        "-k",
        "x=y",
        "--dtype=float32",
    ]
    command = [sys.executable, "-c", "from mone_ref.cli import main; main()", "conform"]
    done = subprocess.run(
        [*command, f"--fixtures={own.name}", "--dtype=float32"],
        cwd=own.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outcomes     2 ok" in done.stdout
    assert "PARTIAL RUN: no verdict" in done.stdout
