"""Plans: their files, plans of other tools, and plans made by rule."""

from __future__ import annotations

import json
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
import rewriting
import small_moe
from hypothesis import given
from hypothesis import strategies as st
from small_moe import per_expert
from typer.testing import CliRunner

from mone_ref.checkpoint.findings import MOST
from mone_ref.checkpoint.text import plain
from mone_ref.cli import application
from mone_ref.errors import Code, Rejected
from mone_ref.rewrite import plan, ranking, structure
from mone_ref.rewrite.cut import runs
from mone_ref.rewrite.plan import Form, Kind, LayerPlan, Mtp, Plan

BASE = {"version": 1, "kind": "prune", "layers": {"0": {"keep": [0, 1]}}}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application("plan"), ["plan", *arguments])
    return result.exit_code, result.output


def problems(document: Any) -> list[tuple[str, Code]]:
    with pytest.raises(Rejected) as caught:
        plan.from_document(document, Path())
    return [(problem.where, problem.code) for problem in caught.value.problems]


# -- the file


IDS = st.lists(st.integers(0, 10**6), unique=True).map(tuple)
PLANS = st.builds(
    Plan,
    kind=st.just(Kind.SUBSTITUTE),
    layers=st.dictionaries(
        st.integers(0, 99).map(str), st.builds(LayerPlan, IDS, st.booleans()), max_size=5
    ),
    form=st.sampled_from(Form),
    mtp=st.none() | st.sampled_from(Mtp),
    provenance=st.text(max_size=30),
)


@given(PLANS)
def test_a_written_plan_reads_as_itself(made: Plan) -> None:
    text = plan.as_yaml(made).encode()
    assert plan.from_document(plan.load(text), Path()) == made
    as_json = json.dumps(plan.as_document(made)).encode()
    assert plan.from_document(plan.load(as_json), Path()) == made


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"version": 2}, "$.version"),
        ({"kind": "delete"}, "$.kind"),
        ({"layer": {}}, "$"),
        ({"layers": [[0]]}, "$.layers"),
        ({"layers": {"0": {"keep": [0], "substitute": [1]}}}, '$.layers["0"]'),
        ({"layers": {"0": {}}}, '$.layers["0"]'),
        ({"layers": {"0": {"keep": [-1]}}}, '$.layers["0"].keep[0]'),
        ({"layers": {"0": {"keep": [True]}}}, '$.layers["0"].keep[0]'),
        ({"layers": {"0": {"keep": ["1"]}}}, '$.layers["0"].keep[0]'),
        ({"layers": {"0": {"keep": [1.0]}}}, '$.layers["0"].keep[0]'),
        ({"top_k": 0}, "$.top_k"),
        ({"form": "approx"}, "$.form"),
        ({"constants": "c.safetensors"}, "$.constants"),
        ({"kind": "substitute", "top_k": 2}, "$.top_k"),
        ({"mtp": "skip"}, "$.mtp"),
    ],
)
def test_every_wrong_field_is_told_by_its_path(changes: dict[str, Any], where: str) -> None:
    assert [found for found, _ in problems({**BASE, **changes})] == [where]


def test_all_problems_at_once() -> None:
    wrong = {"version": 1, "kind": "prune", "layers": {"0": {"keep": [-1]}, "1": {"keep": [-2]}}}
    assert len(problems(wrong)) == 2


def test_a_long_list_of_wrong_ids_is_cut() -> None:
    wrong = {"version": 1, "kind": "prune", "layers": {"0": {"keep": ["x"] * 5000}}}
    assert len(problems(wrong)) == MOST + 1


@pytest.mark.parametrize(
    "text",
    [
        "layers: {0: {keep: [1]}, 0: {keep: [2]}}",
        "{a: 1, a: 2}",
        "a: [",
        "a: !!python/object:os.system {}",
        "a: !!bool zz",
        "a: !!int ''",
        "!!map [1]",
        "a: 0x" + "f" * 9000,
        "a: " + "9" * 9000,
        "a: [010]",
        "a: 1:30",
        "a: " + "1:" * 300 + "00.5",
        "? [1, 2]\n: 3",
        "\xff",
        "[" * 5000,
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Rejected) as caught:
        plan.read(path)
    assert [problem.code for problem in caught.value.problems] == [Code.PLAN_FILE]
    assert caught.value.problems[0].file == "plan.yaml"


# -- plans of other tools


def read(tmp_path: Path, document: Any) -> Plan:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    return plan.read(path)


def test_moe_watcher_by_position(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        {
            "format_version": 1,
            "source_num_experts": 6,
            "target_topk": 1,
            "strategy": "frequency",
            "layer_keep_ids": [[0, 2], [1, 3]],
        },
    )
    assert (made.kind, made.top_k) == (Kind.PRUNE, 1)
    assert made.layers == {"0": LayerPlan((0, 2)), "1": LayerPlan((1, 3))}
    assert "frequency" in made.provenance


def test_mtplx_lists_layers_beside_their_experts(tmp_path: Path) -> None:
    made = read(tmp_path, {"k": 2, "layers": [1, 3], "keep": [[0, 2], [1, 3]]})
    assert made.layers == {"1": LayerPlan((0, 2)), "3": LayerPlan((1, 3))}


def test_mode_pd_lists_what_is_substituted(tmp_path: Path) -> None:
    made = read(tmp_path, {"approximate_experts": {"0": [1], "1": []}})
    assert made.kind is Kind.SUBSTITUTE
    assert made.layers == {"0": LayerPlan((1,), False)}


@pytest.mark.parametrize(
    "document",
    [
        [{"0": [1, 0, 2]}, {"1": [2, 1, 0]}],
        {"k": 3, "layers": [0], "keep": [[0, 2]]},
        {"k": 1, "layers": [0], "keep": [[0]], "mtp_keep": [1]},
        {"k": 1, "layers": [0, 0], "keep": [[0], [1]]},
        {"layer_keep_ids": 3},
    ],
)
def test_what_would_need_a_guess_is_refused(tmp_path: Path, document: Any) -> None:
    with pytest.raises(Rejected) as caught:
        read(tmp_path, document)
    assert [problem.code for problem in caught.value.problems] == [Code.PLAN_FILE]


# -- plans by rule


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_moe.write(tmp_path / "in", per_expert())


def test_a23_ties_go_to_the_lowest_id() -> None:
    assert ranking.per_layer({"0": [5, 3, 3, 3, 1, 0]}, 3) == {"0": (0, 1, 2)}


def test_a23_ranking_all_layers_is_uneven_and_empties_none() -> None:
    scores = {"0": [9.0, 8.0, 7.0, 6.0], "1": [1.0, 2.0, 0.5, 0.0]}
    assert ranking.across_layers(scores, 2) == {"0": (0, 1, 2), "1": (1,)}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_rankings_keep_as_many_as_asked_and_no_worse_expert(
    rows: list[list[int]], keep: int
) -> None:
    scores = {str(at): [float(one) for one in row] for at, row in enumerate(rows)}
    kept = ranking.per_layer(scores, keep)
    for key, ids in kept.items():
        assert len(ids) == keep
        gone = set(range(5)) - set(ids)
        assert all((scores[key][a], -a) > (scores[key][b], -b) for a in ids for b in gone)
    across = ranking.across_layers(scores, keep)
    assert sum(map(len, across.values())) == keep * len(rows)
    assert all(across.values())


@given(st.lists(st.integers(0, 30), unique=True).map(sorted))
def test_runs_are_the_ids_they_came_from(ids: list[int]) -> None:
    found = runs(ids)
    assert [one for first, last in found for one in range(first, last)] == ids
    assert all(left[1] < right[0] for left, right in pairwise(found))


def test_uniform_spreads_over_groups(source: Path) -> None:
    read_ = structure.read(source)
    assert ranking.uniform(read_, 3) == {"0": (0, 2, 4), "1": (0, 2, 4)}


@pytest.mark.parametrize("form", ["json", "rows", "safetensors", "npz", "jsonl"])
def test_scores_in_every_format(source: Path, tmp_path: Path, form: str) -> None:
    scores = {"0": [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], "1": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    path = tmp_path / f"scores.{'json' if form == 'rows' else form}"
    if form == "json":
        path.write_text(json.dumps(scores))
    elif form == "rows":
        path.write_text(json.dumps(list(scores.values())))
    elif form == "npz":
        np.savez(path, scores=np.array(list(scores.values())))
    elif form == "jsonl":
        path.write_text('{"0": [0, 1, 2, 3, 4, 5]}\n{"1": [5, 4, 3, 2, 1, 0]}\n')
    else:
        stored = {key: ("F32", [6], np.array(one, "<f4").tobytes()) for key, one in scores.items()}
        path.write_bytes(handmade.safetensors(stored))
    assert ranking.read(path, structure.read(source)) == scores


def test_one_line_of_ordered_ids_is_no_object_of_scores(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    path.write_text('{"0": [5, 4, 3, 2, 1, 0], "1": [1, 0, 2, 3, 4, 5]}\n')
    read = ranking.read(path, structure.read(source))
    assert read == {"0": [1, 2, 3, 4, 5, 6], "1": [5, 6, 4, 3, 2, 1]}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({"0": [1, 2, 3, 4, 5, 6]}, Code.PLAN_FILE),
        ({"0": [1] * 6, "1": [1] * 5}, Code.PLAN_SCORES),
        ({"0": [1] * 6, "1": [1] * 6, "2": [1] * 6}, Code.PLAN_SCORES),
        ({"0": [1] * 6, "1": ["a"] * 6}, Code.PLAN_SCORES),
        ({"0": [1] * 6, "1": [10**400] * 6}, Code.PLAN_SCORES),
        ([[1] * 6], Code.PLAN_FILE),
        ("text", Code.PLAN_FILE),
    ],
)
def test_scores_that_rank_nothing(source: Path, tmp_path: Path, value: Any, code: Code) -> None:
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(value))
    with pytest.raises(Rejected) as caught:
        ranking.read(path, structure.read(source))
    assert {problem.code for problem in caught.value.problems} == {code}


def npy(shape: str) -> bytes:
    """An array file that has a header and no values."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode()


@pytest.mark.parametrize(
    "member",
    [b"text", b"", npy("(2, 6)"), npy("(10**9,)"), npy("(1000000000000,)"), b"\0" * 2**27],
    ids=["no-array", "empty", "cut", "no-shape", "more-than-memory", "bomb"],
)
def test_archives_that_lie(source: Path, tmp_path: Path, member: bytes) -> None:
    path = tmp_path / "scores.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("scores.npy", member)
    with pytest.raises(Rejected) as caught:
        ranking.read(path, structure.read(source))
    assert [problem.code for problem in caught.value.problems] == [Code.PLAN_FILE]


def test_an_array_that_is_no_archive(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    with path.open("wb") as file:
        np.save(file, np.ones((2, 6)))
    with pytest.raises(Rejected) as caught:
        ranking.read(path, structure.read(source))
    assert [problem.code for problem in caught.value.problems] == [Code.PLAN_FILE]


@pytest.mark.parametrize("shape", [[2, 2**31, 0], [1] * 100])
def test_stored_scores_of_another_shape(source: Path, tmp_path: Path, shape: list[int]) -> None:
    path = tmp_path / "scores.safetensors"
    path.write_bytes(handmade.safetensors({"s": ("F64", shape, b"\0" * 8 * (0 not in shape))}))
    with pytest.raises(Rejected) as caught:
        ranking.read(path, structure.read(source))
    assert [problem.code for problem in caught.value.problems] == [Code.PLAN_FILE]


# -- the command


def test_a_plan_that_cannot_be_written_whole_is_not_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    words = ("plan", "uniform", source, "--keep", 4, "--out", out)
    status, output = rewriting.run(*words, prefix=rewriting.no_file_above(20))
    assert (status, output) == (1, f"error: {plain(str(out))}: file too large\n")
    assert not out.exists()


def test_plan_uniform_writes_a_plan_that_fits(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    status, output = run("uniform", str(source), "--keep", "4", "--out", str(out))
    assert (status, output) == (0, f"wrote {plain(str(out))}: 2 layers, 4 experts kept in each\n")
    assert plan.read(out).layers["1"] == LayerPlan((0, 1, 3, 4))


def test_a_plan_that_exists_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    out.write_text("mine")
    assert run("uniform", str(source), "--keep", "4", "--out", str(out))[0] == 1
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("--keep", "1"), 1, "PLAN/top-k"),
        (("--keep", "6"), 1, "PLAN/empty"),
        (("--keep", "7"), 1, "PLAN/counts"),
        (("--ratio", "0.01"), 1, "PLAN/empty"),  # E09: the share rounds to no expert
    ],
)
def test_e09_plans_that_do_not_fit_are_not_written(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, code: str
) -> None:
    scores, out = tmp_path / "scores.json", tmp_path / "plan.yaml"
    scores.write_text(json.dumps([[6, 5, 4, 3, 2, 1]] * 2))
    found, output = run("from-scores", str(source), str(scores), *arguments, "--out", str(out))
    assert (found, code in output, out.exists()) == (status, True, False)


def test_e09_scores_that_are_all_equal_are_flagged(source: Path, tmp_path: Path) -> None:
    scores, out = tmp_path / "scores.json", tmp_path / "plan.yaml"
    scores.write_text(json.dumps([[0] * 6, [6, 5, 4, 3, 2, 1]]))
    status, output = run(
        "from-scores", str(source), str(scores), "--ratio", "0.5", "--out", str(out)
    )
    assert status == 0
    assert 'warning PLAN/scores scores.json: $["0"]' in output


def test_usage_errors_exit_with_2(source: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "p.yaml"))
    assert run("from-scores", str(source), "s.json", *out)[0] == 2
    assert run("from-scores", str(source), "s.json", "--ratio", "1.5", *out)[0] == 2
    assert run("uniform", str(source), "--keep", "3", "--constants", "c", *out)[0] == 2
    assert run("from-scores", str(source), "absent.json", "--keep", "3", *out)[0] == 2
    assert run("uniform", str(tmp_path / "absent"), "--keep", "3", *out)[0] == 2
