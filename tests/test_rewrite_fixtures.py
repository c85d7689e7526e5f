"""Rewrites of whole models, loaded: what only shows when somebody else reads the output."""

from __future__ import annotations

from pathlib import Path

import handmade
import pytest
import rewriting
import small_moe
from safetensors import safe_open

from mone_ref import validate
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import read as read_config
from mone_ref.errors import Code
from mone_ref.rewrite import make, ranking, structure, verify, writer
from mone_ref.rewrite.plan import Form, Kind, LayerPlan, Mtp, Plan

FIXTURES = Path(__file__).parents[1] / "fixtures"
PAIRED = sorted(
    path.name.removesuffix("-plain")
    for path in FIXTURES.glob("*-plain")
    if (FIXTURES / path.name.removesuffix("-plain")).is_dir()
)

TOO_FEW = "deepseek3-approx"  # 4 groups of 2 experts, each of which stands by its 2 best


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = Checkpoint.open(directory)
    assert not checkpoint.errors
    return {
        name: (entry.dtype, entry.shape, checkpoint.read(name))
        for name, entry in checkpoint.tensors.items()
    }


def write(source: Path, plan: Plan, out: Path) -> Path:
    made = make.blueprint(source, plan, scan=True)
    assert made.blueprint, [str(problem) for problem in made.problems]
    writer.write(made.blueprint, out)
    return out


@pytest.mark.parametrize("name", PAIRED)
def test_substituting_the_plain_sibling_gives_the_fixture(name: str, tmp_path: Path) -> None:
    """The fixture was filled by other code: names, bytes and the list must come out the same."""
    wanted = FIXTURES / name / "checkpoint"
    config = read_config(wanted)
    substitution = config.substitution
    listed = {**substitution.layers, **substitution.unbuilt}
    derived = {
        name: config.model.family.constant_name(at, expert)
        for at, layer in listed.items()
        for expert, name in layer.constants.items()
    }
    expected = {derived.get(one, one): tensor for one, tensor in stored(wanted).items()}
    constants = {one: (dtype, list(shape), data) for one, (dtype, shape, data) in expected.items()}
    constants = {one: constants[one] for one in derived.values()}
    (tmp_path / "constants.safetensors").write_bytes(handmade.safetensors(constants))
    plan = Plan(
        Kind.SUBSTITUTE,
        {str(at): LayerPlan(layer.substituted, False) for at, layer in listed.items()},
        Form(substitution.form),
        tmp_path / "constants.safetensors",
        mtp=Mtp.PRUNE if substitution.unbuilt else None,
    )
    out = write(FIXTURES / f"{name}-plain" / "checkpoint", plan, tmp_path / "out")
    assert stored(out) == expected
    assert not validate.check(out).errors
    made = read_config(out).substitution
    assert made.form == substitution.form
    for one, other in ((made.layers, substitution.layers), (made.unbuilt, substitution.unbuilt)):
        assert {at: layer.substituted for at, layer in one.items()} == {
            at: layer.substituted for at, layer in other.items()
        }


@pytest.mark.parametrize("name", [name for name in PAIRED if name != TOO_FEW])
def test_a_pruned_model_is_a_sound_checkpoint(name: str, tmp_path: Path) -> None:
    source = FIXTURES / f"{name}-plain" / "checkpoint"
    read = structure.read(source)
    groups, _ = read.settings.groups()
    assert read.config
    best = read.config.model.family.group_best
    keep = max(best * groups if groups > 1 else 1, read.num_experts // 2)
    kept = ranking.uniform(read, keep, with_mtp=True)
    plan = Plan(
        Kind.PRUNE,
        {key: LayerPlan(ids) for key, ids in kept.items()},
        top_k=min(read.settings.top_k or 1, max(1, keep // 2)),
        mtp=Mtp.PRUNE if read.mtp else None,
    )
    out = write(source, plan, tmp_path / "out")
    report = validate.check(out)
    assert not report.errors, [str(problem) for problem in report.errors]
    assert report.config
    assert report.config.model.num_experts == keep


def test_groups_that_cannot_lose_an_expert_are_refused() -> None:
    source = FIXTURES / f"{TOO_FEW}-plain" / "checkpoint"
    kept = ranking.uniform(structure.read(source), 4, with_mtp=True)
    layers = {key: LayerPlan(ids) for key, ids in kept.items()}
    plan = Plan(Kind.PRUNE, layers, top_k=2, mtp=Mtp.PRUNE)
    made = make.blueprint(source, plan)
    assert made.blueprint is None
    assert [problem.code for problem in made.problems] == [Code.PLAN_GROUPS]


def test_both_bugs_of_the_source_a_pruned_olmoe_loads_in_transformers(tmp_path: Path) -> None:
    """A router under its published name, and ``format: pt``: nothing missing, nothing unused."""
    transformers = pytest.importorskip("transformers")
    source = FIXTURES / "olmoe-sharded-plain" / "checkpoint"
    read = structure.read(source)
    kept = ranking.uniform(read, read.num_experts // 2)
    plan = Plan(Kind.PRUNE, {key: LayerPlan(ids) for key, ids in kept.items()}, top_k=2)
    out = write(source, plan, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.config.num_experts == read.num_experts // 2
    assert model.config.num_experts_per_tok == 2


def test_f17_a_tensor_without_bytes_is_written_and_proven(tmp_path: Path) -> None:
    tensors = small_moe.per_expert()
    empty = {f"model.layers.{layer}.self_attn.scaled_fp8": [0] for layer in (0, 1)}
    named = small_moe.named(empty, "F8_E4M3")
    first, *rest = tensors
    source = small_moe.write(
        tmp_path / "in", {first: tensors[first], **named, **{one: tensors[one] for one in rest}}
    )
    plan = small_moe.prune({"0": [0, 2, 5], "1": [1, 2, 3]})
    out = write(source, plan, tmp_path / "out")
    assert {name: stored(out)[name] for name in empty} == dict.fromkeys(
        empty, ("F8_E4M3", (0,), b"")
    )
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert [list(file.get_slice(name).get_shape()) for name in empty] == [[0], [0]]
    blueprint = make.blueprint(source, plan).blueprint
    assert blueprint
    assert verify.verify(out, blueprint).problems == ()


def test_any_number_of_workers_writes_the_same(tmp_path: Path) -> None:
    source = FIXTURES / "olmoe-sharded-plain" / "checkpoint"
    kept = ranking.uniform(structure.read(source), 4)
    plan = Plan(Kind.PRUNE, {key: LayerPlan(ids) for key, ids in kept.items()})
    blueprint = make.blueprint(source, plan).blueprint
    assert blueprint
    assert len(blueprint.shards) == 3
    for workers in (1, 2, 5):
        writer.write(blueprint, tmp_path / str(workers), workers=workers)
    one, two, five = (rewriting.hashes(tmp_path / str(workers)) for workers in (1, 2, 5))
    assert one == two == five
