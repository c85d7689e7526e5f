"""Blueprints of prune and substitute: which bytes go where, and what the config says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import handmade
import pytest
import rewriting
import small_moe
from small_moe import HIDDEN, INNER, contents, document, per_expert, prune, substitute, tensor

from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.findings import MOST
from mone_ref.errors import Code
from mone_ref.rewrite import make, output
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.plan import Plan

KEEP = {"0": [0, 2, 5], "1": [1, 2, 3]}


def made(directory: Path, plan: Plan) -> Blueprint:
    outcome = make.blueprint(directory, plan)
    assert outcome.blueprint, [str(problem) for problem in outcome.problems]
    return outcome.blueprint


def codes(directory: Path, plan: Plan) -> list[Code]:
    outcome = make.blueprint(directory, plan)
    assert outcome.blueprint is None
    return [problem.code for problem in outcome.problems]


def rows(data: bytes, count: int, keep: list[int]) -> bytes:
    size = len(data) // count
    return b"".join(data[row * size : (row + 1) * size] for row in keep)


# -- prune


def test_prune_compacts_ids_and_cuts_the_router(tmp_path: Path) -> None:
    tensors = per_expert()
    result = contents(made(small_moe.write(tmp_path / "in", tensors), prune(KEEP)))
    for layer, keep in KEEP.items():
        path = f"model.layers.{layer}.mlp"
        gate = tensors[f"{path}.gate.weight"][2]
        assert result[f"{path}.gate.weight"] == ((3, HIDDEN), rows(gate, 6, keep))
        for new, old in enumerate(keep):
            for part in ("gate_proj", "up_proj", "down_proj"):
                source = tensors[f"{path}.experts.{old}.{part}.weight"]
                assert result[f"{path}.experts.{new}.{part}.weight"][1] == source[2]
        assert f"{path}.experts.3.up_proj.weight" not in result
    untouched = [name for name in tensors if ".experts." not in name and ".gate." not in name]
    assert len(untouched) == 12  # D02: 3 shared tensors per layer among them
    for name in untouched:
        assert result[name][1] == tensors[name][2]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.gate.e_score_correction_bias", [6]),
        ("mlp.e_score_correction_bias", [6]),
        ("mlp.experts.e_score_correction_bias", [6]),
        ("mlp.moe_statics.e_score_correction_bias", [1, 6]),
        ("mlp.expert_bias", [6]),
        ("mlp.gate.bias", [6]),
    ],
)
def test_e10_w2_every_bias_is_cut_with_the_router(
    tmp_path: Path, name: str, shape: list[int]
) -> None:
    full = f"model.layers.0.mlp.{name.removeprefix('mlp.')}"
    data = b"".join(bytes([value]) * 4 for value in range(6))
    tensors = {**per_expert((0,)), full: ("F32", shape, data)}
    source = small_moe.write(tmp_path / "in", tensors, small_moe.config(num_hidden_layers=1))
    blueprint = made(source, prune({"0": [0, 2, 5]}))
    cut = b"\0" * 4 + b"\2" * 4 + b"\5" * 4
    assert contents(blueprint)[full] == ((1, 3) if len(shape) == 2 else (3,), cut)


def test_d03_other_gates_are_no_routers(tmp_path: Path) -> None:
    others = small_moe.named(
        {
            "model.layers.0.mlp.shared_expert_gate.weight": [1, HIDDEN],
            "model.layers.0.self_attn.gate.weight": [6, HIDDEN],
        }
    )
    source = small_moe.write(
        tmp_path / "in", per_expert((0,)) | others, small_moe.config(num_hidden_layers=1)
    )
    result = contents(made(source, prune({"0": [1, 2, 4]})))
    for name, (_, shape, data) in others.items():
        assert result[name] == (tuple(shape), data)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("temperature", [6]), ("temperature", [1, 6]), ("gate.e_score_correction_bias", [2, 6])],
)
def test_a_tensor_with_an_expert_axis_that_is_not_cut_stops_a_prune(
    tmp_path: Path, name: str, shape: list[int]
) -> None:
    tensors = {**per_expert(), **small_moe.named({f"model.layers.0.mlp.{name}": shape})}
    source = small_moe.write(tmp_path / "in", tensors)
    assert codes(source, prune(KEEP)) == [Code.CANNOT_CUT]


def experts_in_the_layer() -> small_moe.Tensors:
    """Experts beside attention and a dense MLP, as in gemma4; some sizes equal their number."""
    path = "model.layers.0"
    shapes = {
        "router.proj.weight": [4, HIDDEN],
        "router.per_expert_scale": [4],
        "experts.gate_up_proj": [4, 2 * INNER, HIDDEN],
        "experts.down_proj": [4, HIDDEN, INNER],
        "self_attn.k_norm.weight": [4],
        "self_attn.k_proj.weight": [4, HIDDEN],
        "post_feedforward_layernorm_1.weight": [4],
        "mlp.up_proj.weight": [4, HIDDEN],
        "layer_scalar": [1],
    }
    return small_moe.named({f"{path}.{name}": shape for name, shape in shapes.items()})


def test_what_every_layer_has_stays_beside_experts_in_the_layer(tmp_path: Path) -> None:
    config = small_moe.config(num_experts=4, num_hidden_layers=1)
    source = small_moe.write(tmp_path / "in", experts_in_the_layer(), config)
    result = contents(made(source, prune({"0": [1, 2]})))
    shapes = {name.removeprefix("model.layers.0."): shape for name, (shape, _) in result.items()}
    assert shapes == {
        "router.proj.weight": (2, HIDDEN),
        "router.per_expert_scale": (2,),
        "experts.gate_up_proj": (2, 2 * INNER, HIDDEN),
        "experts.down_proj": (2, HIDDEN, INNER),
        "self_attn.k_norm.weight": (4,),
        "self_attn.k_proj.weight": (4, HIDDEN),
        "post_feedforward_layernorm_1.weight": (4,),
        "mlp.up_proj.weight": (4, HIDDEN),
        "layer_scalar": (1,),
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [("router.mix.weight", [HIDDEN, 4]), ("per_expert_gain", [4]), ("mlp.expert_mix", [4, 4])],
)
def test_an_unknown_tensor_beside_experts_in_the_layer_stops_a_prune(
    name: str, shape: list[int], tmp_path: Path
) -> None:
    full = f"model.layers.0.{name}"
    tensors = experts_in_the_layer() | {full: tensor(full, shape)}
    config = small_moe.config(num_experts=4, num_hidden_layers=1)
    outcome = make.blueprint(
        small_moe.write(tmp_path / "in", tensors, config), prune({"0": [1, 2]})
    )
    assert outcome.blueprint is None
    assert [(p.code, p.where) for p in outcome.problems] == [(Code.CANNOT_CUT, full)]


def test_w6_fused_experts_are_cut_with_their_companions(tmp_path: Path) -> None:
    tensors = small_moe.fused(4) | {
        "model.layers.0.mlp.experts.gate_up_proj_scales": tensor("s", [4, 12, 2], "U8"),
        "model.layers.0.mlp.experts.gate_up_proj_bias": tensor("b", [4, 12]),
    }
    document_ = small_moe.config(num_experts=4, num_hidden_layers=1)
    source = small_moe.write(tmp_path / "in", tensors, document_)
    result = contents(made(source, prune({"0": [1, 2]})))
    for name, (_, shape, data) in tensors.items():
        if "embed" in name:
            assert result[name][1] == data
        else:
            assert result[name] == ((2, *shape[1:]), rows(data, 4, [1, 2]))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "Q7"])
def test_f19_f25_any_dtype_passes_with_its_companions(tmp_path: Path, dtype: str) -> None:
    tensors = per_expert((0,))
    for expert in range(6):
        path = f"model.layers.0.mlp.experts.{expert}.up_proj"
        tensors[f"{path}.weight"] = tensor(f"{path}.w", [INNER, HIDDEN], dtype)
        tensors[f"{path}.weight_scale_inv"] = tensor(f"{path}.s", [1, 1], "F32")
    source = small_moe.write(tmp_path / "in", tensors, small_moe.config(num_hidden_layers=1))
    result = contents(made(source, prune({"0": [3, 4]})))
    for new, old in ((0, 3), (1, 4)):
        for ending in ("weight", "weight_scale_inv"):
            name = "model.layers.0.mlp.experts.{}.up_proj." + ending
            assert result[name.format(new)][1] == tensors[name.format(old)][2]
    assert sum(".weight_scale_inv" in name for name in result) == 2


def test_e01_e03_w7_counts_in_every_holder(tmp_path: Path) -> None:
    text = {"n_routed_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    nested = {
        "num_experts": 6,
        "text_config": {**text, "ffn_config": {"moe_num_experts": 6, "moe_topk": [2, 2]}},
        "quantization_config": {"num_experts": 6},
    }
    source = small_moe.write(tmp_path / "in", per_expert(), nested)
    result = document(made(source, prune(KEEP, top_k=1)))
    assert result["num_experts"] == 3
    assert result["text_config"]["n_routed_experts"] == 3
    assert result["text_config"]["num_experts_per_tok"] == 1
    assert result["text_config"]["ffn_config"] == {"moe_num_experts": 3, "moe_topk": [1, 1]}
    assert result["quantization_config"] == {"num_experts": 6}


def test_layers_without_experts_keep_their_0_in_a_list(tmp_path: Path) -> None:
    counts = {"num_experts": [0, 6, 6], "num_experts_per_tok": [None, 2, 2]}
    config = small_moe.config(num_hidden_layers=3, **counts)
    source = small_moe.write(tmp_path / "in", per_expert((1, 2)), config)
    result = document(made(source, prune({"1": [0, 2, 5], "2": [1, 2, 3]}, top_k=1)))
    assert result["num_experts"] == [0, 3, 3]
    assert result["num_experts_per_tok"] == [None, 1, 1]


def test_a_count_that_would_stay_stops_a_prune(tmp_path: Path) -> None:
    unknown = small_moe.config(n_experts=6)
    del unknown["num_experts"]
    block = {"n_routed_experts": 6, "num_experts_per_tok": 2}
    in_list = small_moe.config(block_configs=[{"type": "attention"}, block])
    for name, config, where in (
        ("unknown", unknown, "$.num_experts"),
        ("list", in_list, "$.block_configs[1].n_routed_experts"),
    ):
        source = small_moe.write(tmp_path / name, per_expert(), config)
        outcome = make.blueprint(source, prune(KEEP))
        assert outcome.blueprint is None
        found = [(problem.code, problem.where) for problem in outcome.problems]
        assert found == [(Code.MODEL_FIELD, where)]


def test_e12_what_is_stored_is_copied_whatever_tying_says(tmp_path: Path) -> None:
    source = small_moe.write(
        tmp_path / "in", per_expert(), small_moe.config(tie_word_embeddings=True)
    )
    blueprint = made(source, prune(KEEP))
    assert "lm_head.weight" in contents(blueprint)
    assert document(blueprint)["tie_word_embeddings"] is True


# -- MTP layers


def mtp_model(tmp_path: Path, key: str = "num_nextn_predict_layers") -> Path:
    tensors = per_expert((0, 1, 2))
    return small_moe.write(tmp_path / "in", tensors, small_moe.config(**{key: 1}))


def test_w5_an_mtp_layer_needs_a_policy(tmp_path: Path) -> None:
    assert codes(mtp_model(tmp_path), prune(KEEP)) == [Code.MTP_POLICY]


def test_mtp_keep_drop_and_prune(tmp_path: Path) -> None:
    source = mtp_model(tmp_path)
    gate = "model.layers.2.mlp.gate.weight"
    kept = make.blueprint(source, prune(KEEP, mtp="keep"))
    assert kept.blueprint
    assert contents(kept.blueprint)[gate][0] == (6, HIDDEN)
    assert [p.where for p in kept.problems if p.code is Code.ENGINE_LIMIT] == ["$.layers", "$.mtp"]
    dropped = made(source, prune(KEEP, mtp="drop"))
    assert not [name for name in contents(dropped) if name.startswith("model.layers.2.")]
    assert document(dropped)["num_nextn_predict_layers"] == 0
    pruned = made(source, prune({**KEEP, "2": [0, 1, 5]}, mtp="prune"))
    assert contents(pruned)[gate][0] == (3, HIDDEN)
    assert codes(source, prune(KEEP, mtp="prune")) == [Code.MTP_POLICY]
    assert codes(source, prune({**KEEP, "2": [0, 1, 5]}, mtp="drop")) == [Code.MTP_POLICY]


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"])
def test_no_mtp_layer_is_counted_after_a_drop(key: str, tmp_path: Path) -> None:
    dropped = made(mtp_model(tmp_path, key), prune(KEEP, mtp="drop"))
    assert document(dropped)[key] == 0


@pytest.mark.parametrize("kind", ["prune", "substitute"])
def test_a_count_of_mtp_layers_that_are_not_stored_goes_too(kind: str, tmp_path: Path) -> None:
    config = small_moe.config(num_nextn_predict_layers=1)
    source = small_moe.write(tmp_path / "in", per_expert(), config)
    lists = {"0": [1, 3], "1": [4]}
    plan = prune(KEEP, mtp="drop") if kind == "prune" else substitute(tmp_path, lists, mtp="drop")
    assert document(made(source, plan))["num_nextn_predict_layers"] == 0


def test_layers_of_an_encoder_do_not_end_the_decoder(tmp_path: Path) -> None:
    """Its layers past the encoder's last would be MTP layers, and dropped."""
    text = small_moe.config()
    config = {"model_type": "some_vl", "vit_config": {"num_hidden_layers": 1}, "llm_config": text}
    source = small_moe.write(tmp_path / "in", per_expert(), config)
    outcome = make.blueprint(source, prune(KEEP, mtp="drop"))
    assert outcome.blueprint
    assert "model.layers.1.mlp.gate.weight" in contents(outcome.blueprint)


def test_an_mtp_stack_of_its_own_is_named_by_its_path(tmp_path: Path) -> None:
    tensors = per_expert() | per_expert((0,), stack="mtp.layers")
    source = small_moe.write(tmp_path / "in", tensors)
    plan = prune({**KEEP, "mtp.layers.0": [0, 1, 2]}, mtp="prune")
    assert contents(made(source, plan))["mtp.layers.0.mlp.gate.weight"][0] == (3, HIDDEN)


# -- substitute


def test_substitute_keeps_ids_and_router(tmp_path: Path) -> None:
    tensors = per_expert()
    source = small_moe.write(tmp_path / "in", tensors)
    gone = {"0": [1, 4], "1": [0, 2, 3, 4, 5]}  # E08: fewer retained than top-k is legal
    blueprint = made(source, substitute(tmp_path, gone))
    result = contents(blueprint)
    constants = {name for name in result if name.endswith("approx_value")}
    assert len(constants) == 7
    path = "model.layers.0.mlp.experts.4.approx_value"
    assert result[path][1] == tensor(path, [HIDDEN])[2]
    for name, (_, shape, data) in tensors.items():
        parts = name.split(".")
        is_gone = ".experts." in name and int(parts[5]) in gone[parts[2]]
        assert (name not in result) if is_gone else (result[name] == (tuple(shape), data))
    assert document(blueprint) == {
        **small_moe.config(),
        "approximate_experts": {"0": [1, 4], "1": [0, 2, 3, 4, 5]},
    }


def test_r12_the_list_goes_into_the_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "some_vl", "text_config": small_moe.config()}
    source = small_moe.write(tmp_path / "in", per_expert(), nested)
    result = document(made(source, substitute(tmp_path, {"1": [3]})))
    assert result["text_config"]["approximate_experts"] == {"1": [3]}
    assert "approximate_experts" not in result


def test_the_explicit_form_names_every_constant(tmp_path: Path) -> None:
    source = small_moe.write(
        tmp_path / "in", per_expert(), small_moe.config(compression_config={"note": "kept"})
    )
    result = document(made(source, substitute(tmp_path, {"1": [3]}, form="explicit")))
    assert result["compression_config"]["note"] == "kept"
    block = result["compression_config"]["transform_config"]["expert_substitution"]
    assert block["version"] == 1
    path = "model.layers.1.mlp.experts"
    name = f"{path}.3.approx_value"
    assert block["targets"] == {
        path: {
            "num_logical_experts": 6,
            "weight_layout": "compact_retained_experts",
            "replacements": {"3": {"format": "constant-v1", "tensors": {"value": name}}},
        }
    }


def test_f21_fused_experts_are_taken_apart_as_byte_ranges(tmp_path: Path) -> None:
    tensors = small_moe.fused(4)
    document_ = small_moe.config(model_type="qwen3_5_moe", num_experts=4, num_hidden_layers=1)
    source = small_moe.write(tmp_path / "in", tensors, document_)
    result = contents(made(source, substitute(tmp_path, {"0": [0, 3]})))
    path = "model.layers.0.mlp.experts"
    gate_up, down = (tensors[f"{path}.{part}"][2] for part in ("gate_up_proj", "down_proj"))
    for expert in (1, 2):
        own = rows(gate_up, 4, [expert])
        half = len(own) // 2
        assert result[f"{path}.{expert}.gate_proj.weight"] == ((INNER, HIDDEN), own[:half])
        assert result[f"{path}.{expert}.up_proj.weight"] == ((INNER, HIDDEN), own[half:])
        whole = rows(down, 4, [expert])
        assert result[f"{path}.{expert}.down_proj.weight"] == ((HIDDEN, INNER), whole)
    assert f"{path}.gate_up_proj" not in result


@pytest.mark.parametrize(
    ("model_type", "shapes"),
    [
        ("qwen3_vl_moe", {"gate_up_proj": [4, 16, 12], "down_proj": [4, 6, 16]}),
        ("gpt_oss", {"gate_up_proj": [4, 16, 12], "down_proj": [4, 6, 16]}),
        ("some_moe", {"gate_up_proj": [4, 12, 16], "down_proj": [4, 16, 6]}),
        ("qwen3_5_moe", {"gate_up_proj": [4, 16, 12], "down_proj": [4, 16, 6]}),
    ],
)
def test_d07_other_orientations_are_refused(
    tmp_path: Path, model_type: str, shapes: dict[str, list[int]]
) -> None:
    document_ = small_moe.config(model_type=model_type, num_experts=4, num_hidden_layers=1)
    source = small_moe.write(tmp_path / "in", small_moe.fused(4, **shapes), document_)
    assert Code.CANNOT_CUT in codes(source, substitute(tmp_path, {"0": [0, 3]}))
    assert made(source, prune({"0": [0, 3]}))  # rows of all experts need no orientation


def test_a24_quantised_experts_beside_constants_are_a_warning(tmp_path: Path) -> None:
    tensors = per_expert((0,))
    for expert in range(6):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight_scale_inv"
        tensors[name] = tensor(name, [1, 1], "F32")
    source = small_moe.write(tmp_path / "in", tensors, small_moe.config(num_hidden_layers=1))
    outcome = make.blueprint(source, substitute(tmp_path, {"0": [5]}))
    assert outcome.blueprint
    assert [problem.code for problem in outcome.problems] == [Code.ENGINE_LIMIT]
    assert "model.layers.0.mlp.experts.5.up_proj.weight_scale_inv" not in contents(
        outcome.blueprint
    )


def test_constants_must_be_there_and_fit(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    plan = substitute(tmp_path, {"0": [1], "1": [2]})
    path = "model.layers.{}.mlp.experts.{}.approx_value"
    wrong = small_moe.named({path.format(0, 1): [HIDDEN, 1], path.format(0, 5): [HIDDEN]})
    (tmp_path / "constants.safetensors").write_bytes(handmade.safetensors(wrong))
    outcome = make.blueprint(source, plan)
    assert {(p.where, p.code, str(p.severity)) for p in outcome.problems} == {
        (path.format(1, 2), Code.PLAN_CONSTANTS, "error"),
        (path.format(0, 1), Code.PLAN_CONSTANTS, "error"),
        (path.format(0, 5), Code.PLAN_CONSTANTS, "warning"),
    }


def test_r8_constants_are_scanned_where_something_will_be_written(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    plan = substitute(tmp_path, {"0": [1]})
    name = "model.layers.0.mlp.experts.1.approx_value"
    bad = {name: ("BF16", [HIDDEN], b"\x80\x7f" * HIDDEN)}
    (tmp_path / "constants.safetensors").write_bytes(handmade.safetensors(bad))
    assert make.blueprint(source, plan).blueprint  # a dry run reads headers only
    outcome = make.blueprint(source, plan, scan=True)
    assert outcome.blueprint is None
    assert [(p.code, p.where) for p in outcome.problems] == [(Code.NON_FINITE_CONSTANT, name)]


def test_a_substituted_source_is_refused(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "olmoe-approx" / "checkpoint"
    assert Code.ALREADY_SUBSTITUTED in codes(fixture, prune({"0": [0, 2], "1": [0, 2]}))


# -- files


def test_f01_f10_w8_w12_shards_index_and_metadata(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert(), shards=3)
    blueprint = made(source, prune(KEEP))
    numbers = [shard.name for shard in blueprint.shards]
    assert numbers == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    metadata = [dict(shard.metadata) for shard in blueprint.shards]
    assert metadata == [{"format": "pt", "shard": str(n)} for n in range(3)]
    index = document(blueprint, "model.safetensors.index.json")
    total = sum(len(data) for _, data in contents(blueprint).values())
    assert index["metadata"] == {"total_size": total, "by": "somebody"}
    assert set(index["weight_map"]) == set(contents(blueprint))
    assert "moe_pruner" not in document(blueprint)
    assert blueprint.copies == ("modeling.py", "tokenizer.json")


def test_w12_a_shard_that_became_empty_is_not_written(tmp_path: Path) -> None:
    tensors = per_expert((0,))
    gone = {name for name in tensors if ".experts.5." in name}
    ordered = {name: tensors[name] for name in tensors if name not in gone}
    source = small_moe.write(
        tmp_path / "in", ordered, small_moe.config(num_hidden_layers=1), shards=2
    )
    extra = "model-00003-of-00003.safetensors"
    stored = {name: tensors[name] for name in tensors if name in gone}
    (source / extra).write_bytes(handmade.safetensors(stored))
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] |= dict.fromkeys(stored, extra)
    value["metadata"]["total_size"] += sum(len(data) for _, _, data in stored.values())
    index.write_text(json.dumps(value))
    blueprint = made(source, prune({"0": [0, 1, 2]}))
    assert [shard.name for shard in blueprint.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_w8_a_single_file_stays_one_without_an_index(tmp_path: Path) -> None:
    blueprint = made(small_moe.write(tmp_path / "in", per_expert()), prune(KEEP))
    assert [shard.name for shard in blueprint.shards] == ["model.safetensors"]
    assert list(blueprint.documents) == ["config.json"]


def test_f07_what_is_copied_and_what_is_not(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    handmade.write(source / "assets", {"chat.jinja": b"x", "pytorch_model.bin": b"x"})
    handmade.write(source / ".cache", {"lock": b"x"})
    (source / "outside.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("secret")
    outcome = make.blueprint(source, prune(KEEP))
    assert outcome.blueprint
    assert outcome.blueprint.copies == ("assets/chat.jinja", "modeling.py", "tokenizer.json")
    (note,) = (p for p in outcome.problems if p.code is Code.OMITTED_FILE)
    assert note.found.startswith("3 other files")


def test_f13_a_header_is_split_before_it_gets_too_long(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    checkpoint = Checkpoint.open(source)
    plain = contents(made(source, prune(KEEP)))
    tensors = {"model.safetensors": made(source, prune(KEEP)).shards[0].tensors}
    split = output.assemble(checkpoint, tensors, {}, (), longest_header=2000)
    assert len(split.shards) > 1
    assert contents(split) == plain
    assert "model.safetensors.index.json" in split.documents


def test_f16_wide_types_come_first(tmp_path: Path) -> None:
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    odd = {"model.odd.weight": tensor("odd", [1]), bias: tensor("b", [6], "F32")}
    source = small_moe.write(
        tmp_path / "in", per_expert((0,)) | odd, small_moe.config(num_hidden_layers=1)
    )
    first, *_ = made(source, prune({"0": [0, 1]})).shards[0].tensors
    assert first.name == bias


def test_f20_bytes_are_never_decoded(tmp_path: Path) -> None:
    special = b"\xc1\x7f" + b"\x00\x80" * (HIDDEN - 1)  # NaN 0x7FC1, then -0.0
    name = "model.layers.0.input_layernorm.weight"
    tensors = {**per_expert(), name: ("BF16", [HIDDEN], special)}
    source = small_moe.write(tmp_path / "in", tensors)
    assert contents(made(source, prune(KEEP)))[name][1] == special


# -- plans that do not fit


@pytest.mark.parametrize(
    ("keep", "fields", "where", "code"),
    [
        ({**KEEP, "0": [0, 2, 2]}, {}, '$.layers["0"].keep[2]', Code.PLAN_EXPERTS),
        ({**KEEP, "0": [0, 2, 6]}, {}, '$.layers["0"].keep[2]', Code.PLAN_EXPERTS),
        ({**KEEP, "0": []}, {}, '$.layers["0"].keep', Code.PLAN_EXPERTS),
        ({**KEEP, "2": [0, 1, 2]}, {}, '$.layers["2"]', Code.PLAN_LAYER),
        ({**KEEP, "01": [0, 1, 2]}, {}, '$.layers["01"]', Code.PLAN_LAYER),
        ({"1": [0, 1, 2]}, {}, "$.layers", Code.PLAN_LAYER),  # E05
        ({**KEEP, "1": [0, 1, 2, 3]}, {}, '$.layers["1"].keep', Code.PLAN_COUNTS),  # W4
        ({"0": [1], "1": [2]}, {}, "$.top_k", Code.PLAN_TOP_K),  # E08
        (KEEP, {"top_k": 4}, "$.top_k", Code.PLAN_TOP_K),
        ({"0": [0, 1, 2, 3, 4, 5], "1": [0, 1, 2, 3, 4, 5]}, {}, "$.layers", Code.PLAN_EMPTY),
    ],
)
def test_w3_every_plan_error_has_a_place(
    tmp_path: Path, keep: dict[str, list[int]], fields: dict[str, Any], where: str, code: Code
) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    outcome = make.blueprint(source, prune(keep, **fields))
    assert outcome.blueprint is None
    assert [(p.where, p.code) for p in outcome.problems] == [(where, code)]


def test_w4_a23_layers_may_differ_where_the_format_can_say_so(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    uneven = {"0": [0, 1, 2, 3], "1": [1, 2]}
    assert codes(source, prune(uneven)) == [Code.PLAN_COUNTS]
    blueprint = made(source, substitute(tmp_path, uneven))
    assert document(blueprint)["approximate_experts"] == uneven


@pytest.mark.parametrize(
    ("keep", "top_k", "code"),
    [
        ([0, 1, 3, 5], 2, Code.PLAN_GROUPS),  # 2 of the first group, 1 of the others, E09
        ([0, 1, 4], 2, Code.PLAN_GROUPS),
        ([0, 2, 4], 3, Code.PLAN_TOP_K),  # two groups of one expert each can be chosen
        ([0, 2, 4], 2, None),
    ],
)
def test_b11_groups_are_filled_evenly(
    tmp_path: Path, keep: list[int], top_k: int, code: Code | None
) -> None:
    grouped = small_moe.config(n_group=3, topk_group=2, num_hidden_layers=1)
    source = small_moe.write(tmp_path / "in", per_expert((0,)), grouped)
    outcome = make.blueprint(source, prune({"0": keep}, top_k=top_k))
    errors = [p.code for p in outcome.problems if p.severity == "error"]
    assert errors == ([] if code is None else [code])


@pytest.mark.parametrize("key", ["n_group", "num_expert_group", "topk_group"])
def test_groups_that_two_holders_tell_differently_are_a_conflict(key: str, tmp_path: Path) -> None:
    config = small_moe.config(**{key: 3}, text_config=small_moe.config(**{key: 2}))
    source = small_moe.write(tmp_path / "in", per_expert(), config)
    (problem,) = make.blueprint(source, prune(KEEP)).problems
    assert (problem.code, problem.where) == (Code.MODEL_FIELD_CONFLICT, f"$.{key}")
    assert problem.found == f"3 here and 2 at $.text_config.{key}"
    config["text_config"][key] = 3
    same = small_moe.write(tmp_path / "same", per_expert(), config)
    found = {one.code for one in make.blueprint(same, prune(KEEP)).problems}
    assert Code.MODEL_FIELD_CONFLICT not in found


def quantised(directory: Path, *entries: str) -> Path:
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head", *entries],
    }
    return small_moe.write(directory, per_expert(), small_moe.config(quantization_config=settings))


@pytest.mark.parametrize(
    "entry",
    [
        r"re:.*mlp\.experts\.3\.up_proj$",
        r"re:.*\.experts\.(?:0|1)\..*",
        r"re:.*experts.[2-4].down_proj",
        r"re:model\.layers\.\d+\.mlp\.experts\.1\d?\.",
    ],
)
def test_a_pattern_with_numbers_of_experts_is_warned_of(entry: str, tmp_path: Path) -> None:
    outcome = make.blueprint(quantised(tmp_path / "in", entry), prune(KEEP))
    assert outcome.blueprint
    (warning,) = [p for p in outcome.problems if p.where.startswith("$.quantization_config")]
    assert (warning.code, str(warning.severity)) == (Code.ENGINE_LIMIT, "warning")
    assert warning.where == "$.quantization_config.ignore[1]"
    assert warning.found.endswith("which names experts by their old numbers")


@pytest.mark.parametrize(
    "entry",
    [
        r"re:.*mlp\.experts\.\d+\.up_proj$",
        r"re:.*mlp\.experts\.[0-9]{1,3}\.w1",
        r"re:.*mlp\.shared_experts\.0\.up_proj",
        r"re:.*mlp\.experts.*w13",
        r"re:.*layers\.1\..*",
        r"re:.*mlp\.experts.*",
        "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.0.up_proj",  # stays number 0
        "model.layers.7.mlp.experts.3.up_proj",  # a layer that is not there
        "model.layers.0.mlp.experts.9.up_proj",  # an expert that is not there
    ],
)
def test_an_entry_that_holds_for_the_same_experts_passes(entry: str, tmp_path: Path) -> None:
    outcome = make.blueprint(quantised(tmp_path / "in", entry), prune(KEEP))
    assert [p.where for p in outcome.problems] == ["$.layers"]  # the count without a kernel


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        ("model.layers.0.mlp.experts.2.up_proj", "an expert that becomes number 1"),
        ("layers.0.mlp.experts.5", "an expert that becomes number 2"),
        ("language_model.model.layers.1.mlp.experts.0.up_proj", "an expert that is not kept"),
    ],
)
def test_a_name_of_an_expert_whose_number_changes_is_refused(
    entry: str, change: str, tmp_path: Path
) -> None:
    outcome = make.blueprint(quantised(tmp_path / "in", entry), prune(KEEP))
    assert outcome.blueprint is None
    (problem,) = outcome.problems
    assert (problem.code, problem.where) == (Code.MODEL_FIELD, "$.quantization_config.ignore[1]")
    assert problem.found == f"'{entry}', {change}"


def test_an_expert_count_without_a_kernel_is_a_warning(tmp_path: Path) -> None:
    outcome = make.blueprint(small_moe.write(tmp_path / "in", per_expert()), prune(KEEP))
    (warning,) = outcome.problems
    assert (warning.code, str(warning.severity)) == (Code.ENGINE_LIMIT, "warning")
    assert "3 experts" in warning.found


# -- hostile input


@pytest.mark.parametrize("groups", [4, 7, 10**20])
def test_groups_that_the_experts_do_not_fill(tmp_path: Path, groups: int) -> None:
    source = small_moe.write(tmp_path / "in", per_expert(), small_moe.config(n_group=groups))
    assert set(codes(source, prune(KEEP))) == {Code.PLAN_GROUPS}


def test_a_long_list_of_wrong_ids_is_cut(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    assert len(codes(source, prune({"0": [*range(6, 5000)], "1": [0]}))) < 2 * MOST


def test_a_constant_that_no_expert_needs_may_be_of_any_type(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    plan = substitute(tmp_path, {"0": [1]})
    name = "model.layers.0.mlp.experts.1.approx_value"
    tensors = {name: tensor(name, [HIDDEN]), "other": ("Q7", [1], b"\0")}
    (tmp_path / "constants.safetensors").write_bytes(handmade.safetensors(tensors))
    outcome = make.blueprint(source, plan, scan=True)
    assert [problem.code for problem in outcome.problems] == [Code.PLAN_CONSTANTS]
    assert outcome.blueprint


def test_a_path_of_constants_with_a_nul(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    plan = substitute(tmp_path, {"0": [1]}, constants="a\0b")
    assert codes(source, plan) == [Code.UNREADABLE]


def test_a_pipe_in_place_of_the_config_is_not_waited_for(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "in", per_expert())
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")
    status, output = rewriting.run("inspect", source)
    assert status == 1
    assert "CHECKPOINT/unreadable config.json" in output
