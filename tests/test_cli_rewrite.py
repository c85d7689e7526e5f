"""``mone-ref rewrite --dry-run``: a forecast and every problem, with nothing read but headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import handmade
import pytest
import small_moe
from patience import HANG
from small_moe import per_expert
from typer.testing import CliRunner

from mone_ref.cli import application
from mone_ref.rewrite import make
from mone_ref.rewrite.plan import as_yaml

PLAN = "version: 1\nkind: prune\nlayers:\n  0: {keep: [0, 2, 5]}\n  1: {keep: [1, 2, 3]}\n"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application("rewrite"), ["rewrite", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(PLAN)
    return small_moe.write(tmp_path / "in", per_expert(), shards=2)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_w1_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    status, output = run(str(source), "--plan", str(tmp_path / "plan.yaml"), "--dry-run")
    assert status == 0
    assert "memory saved" in output
    assert snapshot(tmp_path) == before


def test_the_forecast_is_the_blueprint(source: Path, tmp_path: Path) -> None:
    plan = small_moe.prune({"0": [0, 2, 5], "1": [1, 2, 3]})
    status, output = run(str(source), "--plan", str(tmp_path / "plan.yaml"), "--dry-run", "--json")
    document = json.loads(output)
    blueprint = make.blueprint(source, plan).blueprint
    assert blueprint
    tensors = small_moe.contents(blueprint)
    assert status == document["exit_code"] == 0
    forecast = document["forecast"]
    assert forecast["output"]["bytes"] == sum(len(data) for _, data in tensors.values())
    assert forecast["output"]["tensors"] == len(tensors)
    experts = [data for name, (_, data) in tensors.items() if ".experts." in name]
    assert forecast["output"]["components"]["experts"] == sum(map(len, experts))
    assert forecast["saved_bytes"] == 2 * 3 * (3 * 6 * 16 + 16) * 2  # experts and router rows
    assert sorted(document["files"]) == sorted(
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "modeling.py",
            "tokenizer.json",
        ]
    )


def test_every_problem_at_once(source: Path, tmp_path: Path) -> None:
    bad = small_moe.prune({"0": [0, 9], "1": [1, 1], "7": [0]})
    (tmp_path / "bad.yaml").write_text(as_yaml(bad))
    status, output = run(str(source), "--plan", str(tmp_path / "bad.yaml"), "--dry-run")
    assert status == 1
    assert [line.split(": ")[1] for line in output.splitlines()[:-1]] == [
        '$.layers["7"]',
        '$.layers["0"].keep[1]',
        '$.layers["1"].keep[1]',
    ]
    assert output.splitlines()[-1].endswith("3 errors, nothing to write")


def test_exit_codes(source: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.yaml")
    assert run(str(tmp_path / "absent"), "--plan", plan, "--dry-run")[0] == 2
    assert run(str(source), "--plan", str(tmp_path / "absent"), "--dry-run")[0] == 2
    (tmp_path / "empty.yaml").write_text("version: 1\n")
    assert run(str(source), "--plan", str(tmp_path / "empty.yaml"), "--dry-run")[0] == 1


def test_w11_f26_only_headers_are_read(tmp_path: Path) -> None:
    """The shard is a hole of 1 TB: reading it, or mapping it into this much memory, would fail."""
    experts, rows = 4, 2**33  # 4 experts of 3 matrices, 2^36 bytes each
    shapes = {"model.layers.0.mlp.gate.weight": [experts, 4]}
    for expert in range(experts):
        for part in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] = [rows, 4]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    start = handmade.with_header(header)
    document = small_moe.config(hidden_size=4, num_experts=4, num_hidden_layers=1)
    source = handmade.write(tmp_path / "in", {"config.json": document, "model.safetensors": start})
    os.truncate(source / "model.safetensors", len(start) + end)
    (tmp_path / "plan.yaml").write_text(as_yaml(small_moe.prune({"0": [0, 3]})))
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"  # 512 MiB of addresses
        "from mone_ref.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ["rewrite", str(source), "--plan", str(tmp_path / "plan.yaml"), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=HANG
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "memory saved: 412.32 GB of weights (50.0 %)" in done.stdout


@pytest.mark.parametrize("command", ["inspect", "plan", "rewrite", "convert", "verify"])
def test_no_framework_is_imported(command: str) -> None:
    program = (
        "import sys\n"
        "from mone_ref.cli import application\n"
        f"application({command!r})\n"
        "print(sorted({'torch', 'safetensors', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=True
    )
    assert done.stdout == "[]\n"
