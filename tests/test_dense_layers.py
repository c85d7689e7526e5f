"""Layers without experts between MoE layers: what a checkpoint must store, and what is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mone_ref
from mone_ref import validate
from mone_ref.errors import Code, Severity

PROMPT = [3, 17, 5, 11, 0, 8]
DENSE = "model.layers.1.mlp"
E, N = Severity.ERROR, Severity.NOTE


class Copy:
    """A fixture of three layers, the middle one dense, to be edited."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.directory = directory
        shutil.copytree(source / "checkpoint", directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")

    def findings(self) -> list[tuple[Code, Severity, str, str]]:
        (self.directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.directory / "model.safetensors", metadata={"format": "pt"})
        problems = validate.check(self.directory).problems
        return [(p.code, p.severity, p.where, p.clause) for p in problems]


@pytest.fixture
def substituted(fixtures: Path, tmp_path: Path) -> Copy:
    return Copy(fixtures / "qwen3-approx", tmp_path / "checkpoint")


@pytest.fixture
def plain(fixtures: Path, tmp_path: Path) -> Copy:
    return Copy(fixtures / "qwen3-approx-plain", tmp_path / "checkpoint")


# -- what is stored


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"mlp_only_layers": []}, 1),
        ({"mlp_only_layers": [1, 2]}, 2),
        ({"mlp_only_layers": [0, 1, 2]}, 0),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, 0),
    ],
    ids=str,
)
def test_experts_in_other_layers_than_configured_are_one_problem(
    plain: Copy, changes: dict[str, Any], first: int
) -> None:
    plain.config |= changes
    where = f"model.layers.{first}.mlp"
    assert plain.findings() == [(Code.LAYER_KINDS, E, where, "FMT-1")]
    (problem,) = validate.check(plain.directory).problems
    assert problem.found == "experts in layers [0, 2]"


def test_both_sets_of_layers_are_named(plain: Copy) -> None:
    plain.config["mlp_only_layers"] = [2]
    plain.findings()
    (problem,) = validate.check(plain.directory).problems
    assert problem.found == "experts in layers [0, 2]"
    assert problem.expected == "experts in layers [0, 1], as config.json says"


def test_a_constant_in_a_dense_layer_is_one_problem(substituted: Copy) -> None:
    substituted.tensors[f"{DENSE}.experts.0.approx_value"] = torch.zeros(96, dtype=torch.bfloat16)
    assert substituted.findings() == [(Code.LAYER_KINDS, E, DENSE, "FMT-1")]


def test_a_missing_projection_of_a_dense_layer(substituted: Copy) -> None:
    del substituted.tensors[f"{DENSE}.up_proj.weight"]
    missing = f"{DENSE}.up_proj.weight"
    assert substituted.findings() == [(Code.MISSING_TENSOR, E, missing, "")]


def test_a_router_behind_a_dense_layer_is_named_by_its_decoder_layer(substituted: Copy) -> None:
    del substituted.tensors["model.layers.2.mlp.gate.weight"]
    missing = "model.layers.2.mlp.gate.weight"
    assert substituted.findings() == [(Code.MISSING_TENSOR, E, missing, "FMT-1")]
    (problem,) = validate.check(substituted.directory).problems
    assert problem.expected == "the router of layer 2"


def test_a_dense_mlp_beside_experts_is_not_read(substituted: Copy) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    substituted.tensors[name] = substituted.tensors[f"{DENSE}.gate_proj.weight"].clone()
    assert substituted.findings() == [(Code.UNKNOWN_TENSOR, N, name, "")]


def test_a_model_of_dense_layers_only(plain: Copy) -> None:
    plain.config["decoder_sparse_step"] = 4
    for layer in (0, 2):
        path = f"model.layers.{layer}.mlp"
        plain.tensors = {k: v for k, v in plain.tensors.items() if not k.startswith(path)}
        for part in ("gate", "up", "down"):
            stored = plain.tensors[f"{DENSE}.{part}_proj.weight"]
            plain.tensors[f"{path}.{part}_proj.weight"] = stored.clone()
    assert plain.findings() == []
    model = mone_ref.load(plain.directory)
    assert model.expert_rows() == {}
    assert model.score([PROMPT])[0].isfinite().all()


# -- what is loaded


def test_rows_belong_to_layers_with_experts(fixtures: Path) -> None:
    model = mone_ref.load(fixtures / "qwen3-approx" / "checkpoint")
    assert model.expert_rows() == {0: 4, 2: 3}  # of 8 experts, 4 and 5 substituted
    trace: dict[str, torch.Tensor] = {}
    model.score([PROMPT], trace.__setitem__)
    layers = {name.split(".")[1] for name in trace if name.endswith(".router_ids")}
    assert layers == {"0", "2"}
    assert trace["layers.1.dense_out"].shape == (len(PROMPT), 96)


def test_a_dense_layer_is_the_swiglu_of_its_stored_matrices(fixtures: Path) -> None:
    checkpoint = fixtures / "qwen3-approx" / "checkpoint"
    stored = load_file(checkpoint / "model.safetensors")
    gate, up, down = (stored[f"{DENSE}.{p}_proj.weight"].double() for p in ("gate", "up", "down"))
    trace: dict[str, torch.Tensor] = {}
    mone_ref.load(checkpoint, torch.float64).score([PROMPT], trace.__setitem__)
    x = trace["layers.1.dense_in"]  # [T, H]
    inner = x @ gate.T
    expected = (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T  # [T, H]
    torch.testing.assert_close(trace["layers.1.dense_out"], expected)


def test_an_update_reaches_the_layer_behind_a_dense_one(fixtures: Path) -> None:
    model = mone_ref.load(fixtures / "qwen3-approx" / "checkpoint")
    model.update({"model.layers.2.mlp.experts.5.approx_value": torch.full((96,), 3.0)})
    entry = model.weights.moe_layers[2]
    assert entry.constants[entry.substitution.substituted.index(5)].tolist() == [3.0] * 96
