"""Rules between config and tensors: an edit of a clean checkpoint gives its findings, no other."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
from handmade import ONE, bf16, index, safetensors, write

from mone_ref import validate
from mone_ref.checkpoint import Checkpoint, dtypes
from mone_ref.errors import Code, Phase, Problem, Severity

ROOT = Path(__file__).parent.parent
FILE = "model.safetensors"
E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
NAN, INFINITY, TWO = b"\xc0\x7f", b"\x80\x7f", b"\x00\x40"  # in bfloat16


@dataclass
class Draft:
    """A checkpoint in memory, to be edited."""

    config: dict[str, Any] = field(default_factory=handmade.config)
    tensors: handmade.Tensors = field(default_factory=handmade.tensors)

    def write(self, directory: Path) -> Path:
        return write(directory, {"config.json": self.config, FILE: safetensors(self.tensors)})

    def drop(self, *names: str) -> None:
        for name in names:
            del self.tensors[name]

    def put(self, name: str, shape: list[int], value: bytes = ONE) -> None:
        self.tensors[name] = bf16(shape, value)

    def put_floats(self, name: str, dtype: str, values: list[float]) -> None:
        """Stored first, so that the wide type is aligned."""
        code = {"F64": "d", "F32": "f", "F16": "e"}[dtype]
        data = struct.pack(f"<{len(values)}{code}", *values)
        others = {other: stored for other, stored in self.tensors.items() if other != name}
        self.tensors = {name: (dtype, [len(values)], data), **others}

    def rename(self, old: str, new: str) -> None:
        self.tensors = {new if name == old else name: v for name, v in self.tensors.items()}


def expert(layer: int, number: int, part: str = "") -> str:
    return f"model.layers.{layer}.mlp.experts.{number}{part and '.'}{part}"


def constant(layer: int, number: int) -> str:
    return expert(layer, number, "approx_value")


def projections(layer: int, number: int) -> list[str]:
    return [expert(layer, number, f"{part}.weight") for part in handmade.EXPERT]


def findings(directory: Path, dtype: str | None = None) -> list[tuple[Code, Severity, str, str]]:
    problems = validate.check(directory, dtype).problems
    return [(p.code, p.severity, p.where, p.clause) for p in problems]


def test_the_clean_checkpoint_gives_no_finding(tmp_path: Path) -> None:
    report = validate.check(Draft().write(tmp_path), "float16")
    assert report.problems == ()
    assert report.config is not None
    assert report.checkpoint is not None
    # 3 of the model, 2 x 9 of the layers, 3 x 2 and 3 x 4 projections, 2 constants.
    assert len(report.checkpoint.tensors) == 41


Edit = Callable[[Draft], object]

C1, C3 = constant(0, 1), constant(0, 3)
ROUTER = "model.layers.0.mlp.gate.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


def no_list(draft: Draft) -> None:
    del draft.config["approximate_experts"]


def prune_unlisted(draft: Draft) -> None:
    draft.drop(*projections(1, 0), *projections(1, 2))
    draft.put(constant(1, 0), [4])
    draft.put(constant(1, 2), [4])


def stale_list(draft: Draft) -> None:
    """Expert 0 was pruned after the list was written."""
    draft.drop(*projections(0, 0))
    draft.put(constant(0, 0), [4])


def rename_experts(draft: Draft) -> None:
    for number in range(4):
        for name in projections(1, number):
            draft.rename(name, name.replace("experts", "expertz"))


def nothing_substituted(draft: Draft) -> None:
    draft.config["approximate_experts"] = {}
    draft.drop(C1, C3)
    for number in (1, 3):
        for part, shape in handmade.EXPERT.items():
            draft.put(expert(0, number, f"{part}.weight"), shape)


def fuse(draft: Draft, layer: int) -> None:
    for number in range(4):
        for name in projections(layer, number):
            draft.tensors.pop(name, None)
    draft.put(f"model.layers.{layer}.mlp.experts.gate_up_proj", [4, 6, 4])
    draft.put(f"model.layers.{layer}.mlp.experts.down_proj", [4, 4, 3])


def fuse_gate_up(draft: Draft) -> None:
    draft.drop(expert(0, 2, "gate_proj.weight"), expert(0, 2, "up_proj.weight"))
    draft.put(expert(0, 2, "gate_up_proj.weight"), [6, 4])


def tie(draft: Draft, head: bytes | None) -> None:
    draft.config["tie_word_embeddings"] = True
    if head is None:
        draft.drop(HEAD)
    else:
        draft.put(HEAD, [5, 4], head)


Expected = list[tuple[Code, Severity, str, str]]

EDITS: dict[str, tuple[Edit, Expected]] = {
    # -- constants
    "constant missing": (
        lambda d: d.drop(C1), [(Code.MISSING_CONSTANT, E, C1, "LOAD-7")],
    ),
    "all constants missing": (
        lambda d: d.drop(C3, C1),
        [(Code.MISSING_CONSTANT, E, C1, "LOAD-7"), (Code.MISSING_CONSTANT, E, C3, "LOAD-7")],
    ),
    "constant [1, H]": (
        lambda d: d.put(C1, [1, 4]), [(Code.CONSTANT_SHAPE, E, C1, "FMT-5")],
    ),
    "constant [H, 1]": (
        lambda d: d.put(C1, [4, 1]), [(Code.CONSTANT_SHAPE, E, C1, "FMT-5")],
    ),
    "constant too long": (
        lambda d: d.put(C1, [5]), [(Code.CONSTANT_SHAPE, E, C1, "FMT-5")],
    ),
    "constant a scalar": (
        lambda d: d.put(C1, []), [(Code.CONSTANT_SHAPE, E, C1, "FMT-5")],
    ),
    "constant empty": (
        lambda d: d.put(C1, [0]), [(Code.CONSTANT_SHAPE, E, C1, "FMT-5")],
    ),
    "constant of integers": (
        lambda d: d.tensors.update({C1: ("I16", [4], b"\0" * 8)}),
        [(Code.CONSTANT_DTYPE, E, C1, "FMT-27")],
    ),
    "constant in FP8": (
        lambda d: d.tensors.update({C1: ("F8_E4M3", [4], b"\0" * 4)}),
        [(Code.CONSTANT_DTYPE, E, C1, "FMT-27")],
    ),
    "constant NaN": (
        lambda d: d.put(C1, [4], NAN), [(Code.NON_FINITE_CONSTANT, E, C1, "LOAD-8")],
    ),
    "constant infinite": (
        lambda d: d.put_floats(C3, "F16", [0, -math.inf, 0, 0]),
        [(Code.NON_FINITE_CONSTANT, E, C3, "LOAD-8")],
    ),
    "constant of a retained expert": (
        lambda d: d.put(constant(0, 2), [4]),
        [(Code.UNLISTED_CONSTANT, E, constant(0, 2), "LOAD-9")],
    ),
    "constant of an expert that does not exist": (
        lambda d: d.put(constant(0, 4), [4]),
        [(Code.UNLISTED_CONSTANT, E, constant(0, 4), "LOAD-9")],
    ),
    "constant in a layer that is not listed": (
        lambda d: d.put(constant(1, 2), [4]),
        [(Code.UNLISTED_LAYER, E, constant(1, 2), "LOAD-9")],
    ),
    "constants of a layer past the last": (
        lambda d: d.put(constant(2, 1), [4]), [(Code.UNKNOWN_TENSOR, N, constant(2, 1), "LOAD-4")],
    ),
    # -- experts
    "projection of a retained expert missing": (
        lambda d: d.drop(expert(0, 2, "down_proj.weight")),
        [(Code.MISSING_EXPERT, E, expert(0, 2, "down_proj.weight"), "LOAD-10")],
    ),
    "projection of an unlisted layer missing": (
        lambda d: d.drop(expert(1, 3, "up_proj.weight")),
        [(Code.MISSING_EXPERT, E, expert(1, 3, "up_proj.weight"), "LOAD-10")],
    ),
    "retained expert of a listed layer missing": (
        lambda d: d.drop(*projections(0, 2)),
        [(Code.MISSING_EXPERT, E, name, "LOAD-10") for name in projections(0, 2)],
    ),
    "list stale": (
        stale_list,
        [
            (Code.UNLISTED_CONSTANT, E, constant(0, 0), "LOAD-9"),
            (Code.MISSING_EXPERT, E, "model.layers.0.mlp.experts", "LOAD-11"),
        ],
    ),
    "layer pruned without an entry": (
        prune_unlisted,
        [
            (Code.UNLISTED_LAYER, E, constant(1, 0), "LOAD-9"),
            (Code.MISSING_EXPERT, E, "model.layers.1.mlp.experts", "LOAD-11"),
        ],
    ),
    "list lost": (
        no_list,
        [
            (Code.UNLISTED_LAYER, E, C1, "LOAD-11"),
            (Code.MISSING_EXPERT, E, "model.layers.0.mlp.experts", "LOAD-11"),
        ],
    ),
    "list and constants lost": (
        lambda d: (no_list(d), d.drop(C1, C3)),
        [(Code.MISSING_EXPERT, E, "model.layers.0.mlp.experts", "LOAD-11")],
    ),
    "experts under another name": (
        rename_experts,
        [
            (Code.MISSING_EXPERT, E, "model.layers.1.mlp.experts", "LOAD-11"),
            (Code.UNKNOWN_TENSOR, N, projections(1, 0)[0].replace("experts", "expertz"), ""),
        ],
    ),
    "fused experts on a substituted layer": (
        lambda d: fuse(d, 0),
        [(Code.FUSED_EXPERTS, E, "model.layers.0.mlp.experts.gate_up_proj", "CAP-11")],
    ),
    "fused experts on another layer": (
        lambda d: fuse(d, 1),
        [(Code.FUSED_EXPERTS, E, "model.layers.1.mlp.experts.gate_up_proj", "")],
    ),
    "gate and up fused in one expert": (
        fuse_gate_up, [(Code.FUSED_EXPERTS, E, expert(0, 2, "gate_up_proj.weight"), "CAP-11")],
    ),
    "fused experts beside separate ones": (
        lambda d: d.put("model.layers.0.mlp.experts.down_proj", [4, 4, 3]),
        [(Code.FUSED_EXPERTS, E, "model.layers.0.mlp.experts.down_proj", "LOAD-13")],
    ),
    "projection of a substituted expert left": (
        lambda d: d.put(expert(0, 3, "up_proj.weight"), [3, 4]),
        [(Code.LEFTOVER_EXPERT, W, expert(0, 3, "up_proj.weight"), "LOAD-2")],
    ),
    "leftovers of any shape and value": (
        lambda d: d.put(expert(0, 3, "up_proj.weight"), [9, 9], NAN),
        [(Code.LEFTOVER_EXPERT, W, expert(0, 3, "up_proj.weight"), "LOAD-2")],
    ),
    "fused leftover of a substituted expert": (
        lambda d: d.put(expert(0, 3, "gate_up_proj.weight"), [6, 4]),
        [(Code.LEFTOVER_EXPERT, W, expert(0, 3, "gate_up_proj.weight"), "LOAD-2")],
    ),
    # -- the model
    "embedding missing": (
        lambda d: d.drop(EMBEDDING), [(Code.MISSING_TENSOR, E, EMBEDDING, "")],
    ),
    "router missing": (lambda d: d.drop(ROUTER), [(Code.MISSING_TENSOR, E, ROUTER, "FMT-1")]),
    "router with rows deleted": (
        lambda d: d.put(ROUTER, [2, 4]), [(Code.TENSOR_SHAPE, E, ROUTER, "FMT-28")],
    ),
    "attention of another size": (lambda d: d.put(Q, [4, 5]), [(Code.TENSOR_SHAPE, E, Q, "")]),
    "projection of another size": (
        lambda d: d.put(expert(1, 0, "down_proj.weight"), [3, 4]),
        [(Code.TENSOR_SHAPE, E, expert(1, 0, "down_proj.weight"), "")],
    ),
    "weight quantised": (
        lambda d: d.tensors.update({Q: ("F8_E4M3", [4, 4], b"\0" * 16)}),
        [(Code.TENSOR_DTYPE, E, Q, "")],
    ),
    "weight of an unknown type": (
        lambda d: d.tensors.update({Q: ("Q7", [4, 4], b"\0" * 16)}),
        [(Code.TENSOR_DTYPE, E, Q, "")],
    ),
    "router NaN": (
        lambda d: d.put(ROUTER, [4, 4], NAN), [(Code.NON_FINITE_ROUTER, W, ROUTER, "")],
    ),
    "other weight NaN": (lambda d: d.put(Q, [4, 4], NAN), []),
    "tied, no head": (lambda d: tie(d, None), []),
    "tied, equal head": (lambda d: tie(d, ONE), [(Code.TIED_HEAD, N, HEAD, "")]),
    "tied, other head": (lambda d: tie(d, TWO), [(Code.TIED_HEAD, E, HEAD, "")]),
    "not tied, no head": (lambda d: d.drop(HEAD), [(Code.MISSING_TENSOR, E, HEAD, "")]),
    # -- names that are not the model's
    "constant of an MTP stack": (
        lambda d: d.rename(C1, "mtp.layers.0.mlp.experts.1.approx_value"),
        [
            (Code.MISSING_CONSTANT, E, C1, "LOAD-7"),
            (Code.UNKNOWN_TENSOR, W, "mtp.layers.0.mlp.experts.1.approx_value", "LOAD-12"),
        ],
    ),
    "constant under a prefix": (
        lambda d: d.put(f"draft.{C1}", [4]), [(Code.UNKNOWN_TENSOR, W, f"draft.{C1}", "LOAD-12")],
    ),
    "constant of a near path": (
        lambda d: d.put("foo.0.bar.1.approx_value", [4]),
        [(Code.UNKNOWN_TENSOR, W, "foo.0.bar.1.approx_value", "LOAD-12")],
    ),
    "constant with a layer in another spelling": (
        lambda d: d.put("model.layers.00.mlp.experts.1.approx_value", [4]),
        [(Code.UNKNOWN_TENSOR, W, "model.layers.00.mlp.experts.1.approx_value", "LOAD-12")],
    ),
    "constant beside the experts": (
        lambda d: d.put("model.layers.0.mlp.shared_experts.1.approx_value", [4]),
        [(Code.UNKNOWN_TENSOR, W, "model.layers.0.mlp.shared_experts.1.approx_value", "LOAD-12")],
    ),
    "experts nested": (
        lambda d: d.put("model.layers.0.mlp.experts.experts.1.up_proj.weight", [3, 4]),
        [(Code.UNKNOWN_TENSOR, W, "model.layers.0.mlp.experts.experts.1.up_proj.weight", "")],
    ),
    "expert past the last": (
        lambda d: d.put(expert(1, 4, "up_proj.weight"), [3, 4]),
        [(Code.UNKNOWN_TENSOR, W, expert(1, 4, "up_proj.weight"), "")],
    ),
    "bias of a retained expert": (
        lambda d: d.put(expert(1, 0, "up_proj.bias"), [3]),
        [(Code.UNKNOWN_TENSOR, W, expert(1, 0, "up_proj.bias"), "")],
    ),
    "tensor of nothing": (
        lambda d: d.put("scaled_fp8", [0]), [(Code.UNKNOWN_TENSOR, N, "scaled_fp8", "")],
    ),
    "shared expert": (
        lambda d: d.put("model.layers.0.mlp.shared_experts.up_proj.weight", [3, 4]),
        [(Code.UNKNOWN_TENSOR, N, "model.layers.0.mlp.shared_experts.up_proj.weight", "")],
    ),
    # -- lawful variants
    "constants in another float type": (
        lambda d: (d.put_floats(C1, "F64", [1e4] * 4), d.put_floats(C3, "F32", [-0.0] * 4)), [],
    ),
    "one retained expert": (
        lambda d: (
            d.config.update(approximate_experts={"0": [3, 1, 0]}),
            d.drop(*projections(0, 0)), d.put(constant(0, 0), [4]),
        ),
        [],
    ),
    "nothing substituted": (nothing_substituted, []),
}  # fmt: skip


# -- the explicit form: experts 1 and 3 of layer 0, their constants under any names

V1, V3 = "novices.1", "novices.3"
NORM = "model.norm.weight"
COPY = expert(0, 3, "up_proj.weight")


def declare(draft: Draft, first: str, third: str) -> None:
    del draft.config["approximate_experts"]
    draft.config["compression_config"] = handmade.explicit({1: first, 3: third})


def explicit(draft: Draft, first: str = V1, third: str = V3) -> None:
    declare(draft, first, third)
    draft.drop(C1, C3)
    draft.put(first, [4])
    draft.put(third, [4])


def explicit_then(edit: Edit) -> Edit:
    return lambda draft: (explicit(draft), edit(draft))


def shared_then(edit: Edit) -> Edit:
    return lambda draft: (explicit(draft, "v", "v"), edit(draft))


EXPLICIT: dict[str, tuple[Edit, Expected]] = {
    "names of their own": (explicit, []),
    "one constant for two experts": (lambda d: explicit(d, "v", "v"), []),
    "derived names": (lambda d: declare(d, C1, C3), []),
    "the derived name of another expert": (lambda d: declare(d, C3, C1), []),
    "names below the experts": (
        lambda d: explicit(d, expert(0, 1, "novice"), "model.layers.0.mlp.experts.gate_up_proj"),
        [],
    ),
    "names in a layer that is not built": (
        lambda d: explicit(d, "model.layers.9.x", "model.layers.9.y"), [],
    ),
    "constant missing": (
        explicit_then(lambda d: d.drop(V3)), [(Code.MISSING_CONSTANT, E, V3, "LOAD-7")],
    ),
    "shared constant missing": (
        shared_then(lambda d: d.drop("v")), [(Code.MISSING_CONSTANT, E, "v", "LOAD-7")] * 2,
    ),
    "shared constant of another shape": (
        shared_then(lambda d: d.put("v", [1, 4])), [(Code.CONSTANT_SHAPE, E, "v", "FMT-5")],
    ),
    "shared constant not finite": (
        shared_then(lambda d: d.put("v", [4], NAN)),
        [(Code.NON_FINITE_CONSTANT, E, "v", "LOAD-8")],
    ),
    "stored under derived names, which are not declared": (
        lambda d: declare(d, V1, V3),
        [
            (Code.MISSING_CONSTANT, E, V1, "LOAD-7"), (Code.MISSING_CONSTANT, E, V3, "LOAD-7"),
            (Code.UNNAMED_CONSTANT, E, C1, "LOAD-9"), (Code.UNNAMED_CONSTANT, E, C3, "LOAD-9"),
        ],
    ),
    "second constant under the derived name": (
        explicit_then(lambda d: d.put(C1, [4], TWO)), [(Code.UNNAMED_CONSTANT, E, C1, "LOAD-9")],
    ),
    "constant of a retained expert": (
        explicit_then(lambda d: d.put(constant(0, 2), [4])),
        [(Code.UNLISTED_CONSTANT, E, constant(0, 2), "LOAD-9")],
    ),
    "constant in a layer without a target": (
        explicit_then(lambda d: d.put(constant(1, 2), [4])),
        [(Code.UNLISTED_LAYER, E, constant(1, 2), "LOAD-9")],
    ),
    "name of the model's own norm": (
        lambda d: (declare(d, V1, NORM), d.rename(C1, V1), d.drop(C3)),
        [(Code.CONSTANT_NAME, E, NORM, "LOAD-9")],
    ),
    "name of a matrix of the model": (
        lambda d: (declare(d, V1, Q), d.rename(C1, V1), d.drop(C3)),
        [(Code.CONSTANT_NAME, E, Q, "LOAD-9")],
    ),
    "name of the head, although it is tied": (
        lambda d: (tie(d, None), declare(d, V1, HEAD), d.rename(C1, V1), d.rename(C3, HEAD)),
        [(Code.CONSTANT_NAME, E, HEAD, "LOAD-9"), (Code.TIED_HEAD, E, HEAD, "")],
    ),
    "leftover projection": (
        explicit_then(lambda d: d.put(COPY, [3, 4])), [(Code.LEFTOVER_EXPERT, W, COPY, "LOAD-2")],
    ),
    "undeclared name": (
        explicit_then(lambda d: d.put("novices.2", [4])),
        [(Code.UNKNOWN_TENSOR, N, "novices.2", "")],
    ),
    "retained expert without projections": (
        explicit_then(lambda d: d.drop(*projections(1, 2))),
        [(Code.MISSING_EXPERT, E, "model.layers.1.mlp.experts", "LOAD-11")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "expected"), EXPLICIT.values(), ids=EXPLICIT)
def test_the_explicit_form_gives_its_findings(
    tmp_path: Path, edit: Edit, expected: Expected
) -> None:
    draft = Draft()
    edit(draft)
    assert findings(draft.write(tmp_path)) == expected


@pytest.mark.parametrize(("edit", "expected"), EDITS.values(), ids=EDITS)
def test_an_edit_gives_its_findings(tmp_path: Path, edit: Edit, expected: Expected) -> None:
    draft = Draft()
    edit(draft)
    directory = draft.write(tmp_path)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert findings(directory) == expected
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def only(directory: Path, dtype: str | None = None) -> Problem:
    (problem,) = validate.check(directory, dtype).problems
    return problem


def test_a_problem_names_file_phase_and_numbers(tmp_path: Path) -> None:
    draft = Draft()
    draft.tensors[C1] = ("BF16", [4], ONE + NAN + INFINITY + ONE)
    problem = only(draft.write(tmp_path))
    assert (problem.file, problem.phase) == (FILE, Phase.LOAD)
    assert problem.found == "2 values of NaN or infinity, the first at index 1"


def test_a_leftover_counts_its_bytes(tmp_path: Path) -> None:
    draft = Draft()
    for name in projections(0, 3):
        draft.put(name, [3, 4])
    problem = only(draft.write(tmp_path))
    assert "72 bytes" in problem.found  # 3 projections of 12 bfloat16 values
    assert "substituted expert 3" in problem.found


def test_many_unknown_tensors_give_one_finding_per_kind(tmp_path: Path) -> None:
    draft = Draft()
    for number in range(50):
        draft.put(f"model.layers.0.mlp.experts.experts.{number}.up_proj.weight", [1])
        draft.put(f"vision.{number}", [1])
        draft.put(f"vision.{number}.approx_value", [1])
    problems = validate.check(draft.write(tmp_path)).problems
    assert [problem.found.partition(":")[0] for problem in problems] == [
        "50 constants", "50 expert tensors", "50 tensors",
    ]  # fmt: skip


def test_a_missing_tensor_is_placed_in_the_index_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    draft = Draft()
    draft.drop(C1)
    names = list(draft.tensors)
    shards = {"x.safetensors": names[:20], "y.safetensors": names[20:]}
    weight_map = {name: shard for shard, stored in shards.items() for name in stored}
    total = sum(len(data) for _, _, data in draft.tensors.values())
    files: dict[str, bytes | dict[str, Any]] = {
        shard: safetensors({name: draft.tensors[name] for name in stored})
        for shard, stored in shards.items()
    }
    files |= {"config.json": draft.config, "model.safetensors.index.json": index(weight_map, total)}
    problem = only(write(tmp_path, files))
    assert (problem.code, problem.where) == (Code.MISSING_CONSTANT, C1)
    assert problem.file == "model.safetensors.index.json"


# -- overflow: expected bounds from numpy's own rounding, not from the table under test


@pytest.mark.parametrize(
    ("dtype", "values", "overflows"),
    [
        ("float16", [65504.0] * 4, False),
        ("float16", [65519.99] * 4, False),  # rounds to 65504
        ("float16", [1, -65520.0, 1, 1], True),  # a tie, rounds to infinity
        ("float16", [1, 1, 1e5, 1], True),
        ("bfloat16", [1e5] * 4, False),
        ("bfloat16", [3.389e38] * 4, False),
        ("bfloat16", [3.3962e38] * 4, True),  # finite in float32
        ("float32", [3.4028235e38] * 4, False),
        ("float32", [1e39] * 4, True),
        ("float64", [1e308] * 4, False),
        (None, [1e308] * 4, False),
    ],
)
def test_a_constant_must_stay_finite_in_the_parameter_dtype(
    tmp_path: Path, dtype: str | None, values: list[float], overflows: bool
) -> None:
    draft = Draft()
    draft.put_floats(C1, "F64", values)
    expected = [(Code.CONSTANT_OVERFLOW, E, C1, "LOAD-8")] if overflows else []
    assert findings(draft.write(tmp_path), dtype) == expected


@pytest.mark.parametrize(("dtype", "kind"), [("float16", np.float16), ("float32", np.float32)])
def test_the_overflow_bound_is_where_numpy_rounds_to_infinity(dtype: str, kind: Any) -> None:
    bound = dtypes.overflow_bound(dtype)
    with np.errstate(over="ignore"):
        assert np.isinf(kind(bound))
        assert np.isfinite(kind(np.nextafter(bound, 0)))


def test_an_overflow_names_the_first_value(tmp_path: Path) -> None:
    draft = Draft()
    draft.put_floats(C1, "F32", [0, 1e5, 0, -1e6])
    problem = only(draft.write(tmp_path), "float16")
    assert problem.found == "2 values beyond float16, the first at index 1: 100000"


def test_non_finite_values_are_not_reported_as_overflow_too(tmp_path: Path) -> None:
    draft = Draft()
    draft.put(C1, [4], INFINITY)
    assert only(draft.write(tmp_path), "float16").code is Code.NON_FINITE_CONSTANT


@pytest.mark.parametrize("dtype", ["float8", "torch.float16", "", "FLOAT16"])
def test_an_unknown_parameter_dtype_is_a_programming_error(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        validate.check(tmp_path, dtype)


@pytest.mark.parametrize(
    ("bits", "value"),
    [(0x3F80, 1.0), (0xC000, -2.0), (0x0001, 2.0**-133), (0x7F7F, 255 * 2.0**120),
     (0xFF80, -math.inf), (0x8000, -0.0)],
)  # fmt: skip
def test_bfloat16_is_decoded_exactly(bits: int, value: float) -> None:
    (decoded,) = dtypes.decode(bits.to_bytes(2, "little"), "BF16").tolist()
    assert decoded == value
    assert math.copysign(1, decoded) == math.copysign(1, value)


# -- config, files and tensors together


def test_config_problems_keep_their_phase_and_file_problems_come_too(tmp_path: Path) -> None:
    draft = Draft()
    draft.config["approximate_experts"] = {"0": [1, 1]}
    directory = draft.write(tmp_path)
    (directory / FILE).write_bytes(safetensors(draft.tensors)[:-1])
    report = validate.check(directory)
    assert [(p.code, p.phase, p.file) for p in report.problems] == [
        (Code.ID_DUPLICATE, Phase.PARSE, "config.json"),
        (Code.TRUNCATED, Phase.LOAD, FILE),
    ]
    assert report.config is None
    assert report.checkpoint is not None


def test_warnings_of_the_config_are_kept(tmp_path: Path) -> None:
    draft = Draft()
    draft.config["approximate_expert"] = {}
    report = validate.check(draft.write(tmp_path))
    assert [(p.severity, p.file) for p in report.problems] == [(W, "config.json")]
    assert report.warnings == report.problems
    assert report.errors == report.notes == ()


def test_a_broken_file_is_reported_alone(tmp_path: Path) -> None:
    """Its tensors are not reported as missing on top."""
    directory = Draft().write(tmp_path)
    (directory / FILE).write_bytes(b"")
    assert findings(directory) == [(Code.TRUNCATED, E, "file", "")]


def test_a_file_that_changes_while_it_is_checked_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Draft().write(tmp_path)
    opened = Checkpoint.open(directory)
    (directory / FILE).write_bytes(b"")
    monkeypatch.setattr(Checkpoint, "open", lambda _: opened)
    assert findings(directory) == [(Code.TRUNCATED, E, C1, "")]


def test_no_directory_is_one_problem(tmp_path: Path) -> None:
    report = validate.check(tmp_path / "absent")
    assert [problem.code for problem in report.problems] == [Code.NOT_A_CHECKPOINT]
    assert (report.config, report.checkpoint) == (None, None)


def test_an_empty_directory_lacks_config_and_weights(tmp_path: Path) -> None:
    assert [code for code, *_ in findings(tmp_path)] == [Code.NO_CONFIG, Code.NO_WEIGHTS]


@pytest.mark.parametrize(
    "fixture", sorted(path.parent.name for path in ROOT.glob("fixtures/*/recipe.yaml"))
)
def test_the_fixtures_give_no_finding_in_any_dtype(fixture: str) -> None:
    """Nor a note, unless a checkpoint carries what a text decoder does not build."""
    carried = CARRIED.get(fixture.removesuffix("-plain"))
    expected = [(Code.UNKNOWN_TENSOR, Severity.NOTE, *carried)] if carried else []
    for dtype in (None, *dtypes.PARAMETER_DTYPES):
        assert findings(ROOT / "fixtures" / fixture / "checkpoint", dtype) == expected


CARRIED = {
    "deepseek3-approx": ("model.layers.3.mlp.gate.e_score_correction_bias", "LOAD-4"),
    "qwen3-vl": ("model.visual.blocks.0.attn.qkv.weight", ""),
}
"""The first tensor of an MTP layer, or of a vision tower, and the clause that skips it."""


def test_nothing_imports_torch(tmp_path: Path) -> None:
    script = "import sys; from mone_ref import validate; validate.check(sys.argv[1]);"
    script += "print([name for name in ('torch', 'typer', 'safetensors') if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", script, str(Draft().write(tmp_path))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert json.loads(run.stdout) == []
