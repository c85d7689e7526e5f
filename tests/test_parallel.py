"""Ranks in one process: the same model, cut; field cases C01, C03, C05, C07, C08."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mone_ref import layout, loading
from mone_ref.errors import Code, Phase, Rejected
from mone_ref.model_config import ModelConfig
from mone_ref.parallel import model, plan
from mone_ref.parallel.group import InProcess, summed
from mone_ref.parallel.model import ParallelModel
from mone_ref.parallel.plan import Plan
from mone_ref.suite import data

FIXTURES = data.root() / "fixtures"
PROMPT = [1, 5, 9, 2, 7, 11, 3]


def checkpoint(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


def over(name: str, tensor: int, pipeline: int, dtype: torch.dtype = torch.float64):
    return model.load(checkpoint(name), dtype, Plan(tensor, pipeline))


def held(loaded: ParallelModel) -> str:
    """A hash of every tensor on every rank."""
    found = hashlib.sha256()

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, list):
            for one in value:
                visit(one)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    visit(loaded.stages)
    return found.hexdigest()


SPLIT = [
    ("olmoe-ranks", 2, 1),  # one norm over all heads
    ("olmoe-ranks", 4, 2),  # two ranks to a key head, and 90 tokens on 4 ranks
    ("olmoe-approx", 1, 2),
    ("qwen3-explicit", 4, 2),
    ("mixtral-approx", 3, 1),
    ("glm4-approx", 2, 3),  # shared experts, a dense layer, biases
    ("deepseek2-approx", 2, 2),  # latent attention
    ("deepseek3-approx", 1, 3),  # an MTP layer behind the last stage
]


@pytest.mark.parametrize(("name", "tensor", "pipeline"), SPLIT)
def test_ranks_answer_as_one_device(name, tensor, pipeline):
    # Float64 rounds 2^29 times finer than float32: a structural mistake stands far above it.
    whole = loading.load(checkpoint(name), torch.float64)
    split = over(name, tensor, pipeline)
    right = whole.score([PROMPT])[0]
    away = (split.score([PROMPT])[0] - right).abs().max()
    assert away <= torch.finfo(torch.float32).eps * right.abs().max()
    assert split.expert_rows() == whole.expert_rows()


def test_stages_alone_change_no_bit():
    whole = loading.load(checkpoint("olmoe-ranks"), torch.bfloat16)
    assert torch.equal(
        over("olmoe-ranks", 1, 3, torch.bfloat16).score([PROMPT])[0], whole.score([PROMPT])[0]
    )


def test_the_layers_of_stages():
    assert plan.stage_layers(5, 3) == [range(2), range(2, 4), range(4, 5)]


# -- C07: sizes that do not divide


def sizes(**changed: int) -> ModelConfig:
    config = copy.copy(loading.load(checkpoint("glm4-approx")).config.model)
    for name, value in changed.items():
        object.__setattr__(config, name, value)
    return config


def test_a_size_that_does_not_divide_is_told_with_both_numbers_and_those_that_work():
    (problem,) = plan.problems(sizes(intermediate_size=6), Plan(tensor=4))
    assert (problem.code, problem.phase) == (Code.RANKS, Phase.INIT)
    assert (problem.where, problem.found) == ("intermediate_size", "6 among 4 ranks")
    assert problem.expected == "1, 2, 3, 6 ranks"
    assert plan.problems(sizes(intermediate_size=6), Plan(tensor=2)) == []


def test_every_size_that_does_not_divide_is_told_before_anything_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(loading.Tensors, "read", lambda *_: read.append(1))
    with pytest.raises(Rejected) as raised:
        over("glm4-approx", 3, 4)
    assert [problem.where for problem in raised.value.problems] == [
        "num_heads",
        "dense_intermediate_size",
        "num_kv_heads",
        "num_layers",
    ]
    assert read == []


@pytest.mark.parametrize("asked", [Plan(0, 1), Plan(-1, 1), Plan(1, 0)])
def test_no_rank_is_no_plan(asked):
    with pytest.raises(Rejected, match="UNSUPPORTED/ranks"):
        model.load(checkpoint("olmoe-ranks"), torch.float32, asked)


# -- C08, C05: what ranks and stages hold


def test_slices_of_ranks_are_the_source_bit_for_bit():
    whole = loading.load(checkpoint("olmoe-ranks")).weights
    (ranks,) = over("olmoe-ranks", 2, 1, torch.float32).stages
    for layer, source in enumerate(whole.layers):
        parts = [shard.layers[layer] for shard in ranks]
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            joined = torch.cat([getattr(part.mlp.experts, name) for part in parts], dim)
            assert torch.equal(joined, getattr(source.mlp.experts, name))
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            joined = torch.cat([getattr(part.attention, name) for part in parts], dim)
            assert torch.equal(joined, getattr(source.attention, name))
        assert all(torch.equal(part.mlp.constants, source.mlp.constants) for part in parts)
    assert torch.equal(torch.cat([shard.head for shard in ranks])[: len(whole.head)], whole.head)


@pytest.mark.parametrize("stages", [2, 3])
def test_what_stages_load_adds_up_to_the_checkpoint(monkeypatch, stages):
    names: list[str] = []
    read = loading.Tensors.read

    def noted(self, name, dtype=None):
        names.append(name)
        return read(self, name, dtype)

    monkeypatch.setattr(loading.Tensors, "read", noted)
    loaded = over("qwen3-approx", 1, stages)
    assert sorted(names) == sorted(layout.expected(loaded.config))


def test_a_stage_without_a_listed_layer_holds_no_constant():
    first, last = over("olmoe-ranks", 1, 2).stages
    assert [len(layer.constants) for layer in first[0].moe_layers.values()] == [2, 3]
    assert [len(layer.constants) for layer in last[0].moe_layers.values()] == [0, 0]


# -- C01: one constant, however many ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_constant_is_there_once_by_hand(size):
    loaded = over("olmoe-ranks", size, 1, torch.float32)
    trace: dict[str, torch.Tensor] = {}
    for shard in loaded.ranks:
        layer = shard.layers[0].mlp
        layer.experts.down.zero_()  # constants alone are left
        layer.constants[:] = torch.tensor([[4.0], [-8.0]]).expand_as(layer.constants)
    loaded.logits(PROMPT, trace.__setitem__)
    ids, weights = trace["layers.0.router_ids"], trace["layers.0.router_weights"]
    paid = (weights * ((ids == 1) * 4.0 + (ids == 5) * -8.0)).sum(dim=-1)  # [T]
    assert paid.count_nonzero() > 0
    found = trace["layers.0.moe_out"]
    # A token meets each constant once at most: two products by powers of two, and one sum.
    assert torch.equal(found, paid[:, None].expand_as(found))


def test_the_reduction_adds_what_each_rank_has_rounded():
    # 256 + 1 is no bfloat16: three partials that were rounded before, and one sum after.
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert summed(parts).item() == 258
    assert InProcess(3).held == [(0, 3), (1, 3), (2, 3)]


# -- changes


def constants_of(name: str) -> dict[str, torch.Tensor]:
    source = load_file(checkpoint(name) / "model.safetensors")
    named = layout.constants(loading.load(checkpoint(name)).config)
    return {name: source[name] for name in named}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (2, 2)])
def test_an_update_reaches_every_rank_and_back(tensor, pipeline):
    loaded = over("qwen3-explicit", tensor, pipeline, torch.float32)
    before = held(loaded)
    loaded.update(constants_of("qwen3-explicit-updated"))
    fresh = over("qwen3-explicit-updated", tensor, pipeline, torch.float32)
    assert held(loaded) == held(fresh) != before
    loaded.update(constants_of("qwen3-explicit"))
    assert held(loaded) == before


def test_a_shared_constant_reaches_the_owner_on_each_stage():
    loaded = over("olmoe-explicit-shared", 1, 2)
    (name,) = {
        name
        for name in loaded.config.substitution.layers[0].constants.values()
        if name in loaded.config.substitution.layers[1].constants.values()
    }
    loaded.update({name: torch.full((96,), 3.0)})
    rows = [
        row
        for shard in loaded.ranks
        for layer in shard.moe_layers.values()
        for row in layer.constants
        if (row == 3).all()
    ]
    assert len(rows) == 2


@pytest.mark.parametrize("bad", ["unknown name", "shape", "nan", "integers"])
def test_a_refused_update_leaves_every_rank_unchanged(bad):
    loaded = over("qwen3-explicit", 2, 2, torch.float32)
    good = constants_of("qwen3-explicit-updated")
    last = [*good][-1]
    wrong = {
        "unknown name": {"nowhere": good[last]},
        "shape": {last: good[last][None]},
        "nan": {last: good[last] * float("nan")},
        "integers": {last: good[last].int()},
    }[bad]
    before = held(loaded)
    with pytest.raises(Rejected):
        loaded.update(good | wrong)
    assert held(loaded) == before


def test_a_refused_reload_leaves_every_rank_unchanged():
    loaded = over("olmoe-ranks", 2, 2, torch.float32)
    before = held(loaded)
    with pytest.raises(Rejected, match="UNSUPPORTED/layerwise-reload"):
        loaded.reload(checkpoint("olmoe-ranks-plain"))
    assert held(loaded) == before


@pytest.mark.parametrize("layer", [0, 1])
def test_a_constant_missing_on_any_stage_fails_the_whole_load(tmp_path, layer):
    source = checkpoint("olmoe-approx")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    lost = next(name for name in tensors if f"layers.{layer}." in name and "approx" in name)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Rejected, match="MISSING_CONSTANT/absent"):
        model.load(tmp_path, torch.float32, Plan(1, 2))
