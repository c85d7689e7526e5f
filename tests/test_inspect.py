"""``mone-ref inspect`` on architectures known and unknown, and on broken checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import handmade
import pytest
import small_moe
from small_moe import HIDDEN, per_expert
from typer.testing import CliRunner

from mone_ref.cli import application
from mone_ref.errors import Code
from mone_ref.rewrite.inspection import Inspection, decode_speed, inspect

FIXTURES = Path(__file__).parents[1] / "fixtures"


def codes(found: Inspection) -> list[Code]:
    return [problem.code for problem in found.problems if problem.severity == "error"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application("inspect"), ["inspect", *arguments])
    return result.exit_code, result.output


# -- architectures that no table knows


def test_an_unknown_architecture_is_counted(tmp_path: Path) -> None:
    found = inspect(small_moe.write(tmp_path, per_expert()))
    assert not found.problems
    assert (found.family, found.model_type, found.stack) == (None, "some_moe", "model.layers")
    assert (found.router_keys, found.expert_keys, found.shared) == (2, 36, 6)
    assert (found.num_experts, found.top_k) == (6, 2)
    assert {layer.layout for layer in found.layers} == {"per expert"}
    assert found.size == sum(len(data) for _, _, data in per_expert().values())  # D09


@pytest.mark.parametrize(
    ("block", "router"),
    [
        ("block_sparse_moe", "gate"),
        ("mlp", "router"),
        ("feed_forward", "router"),
        ("mixer", "gate"),
        ("mlp", "gate.wg"),
    ],
)
def test_d01_routers_have_many_names(tmp_path: Path, block: str, router: str) -> None:
    found = inspect(small_moe.write(tmp_path, per_expert(block=block, router=router)))
    assert (found.router_keys, codes(found)) == (2, [])


def test_d01_first_bug_of_the_source_a_router_under_another_name(tmp_path: Path) -> None:
    """0 routers against 36 expert tensors is a naming mismatch; the candidate is named."""
    found = inspect(small_moe.write(tmp_path, per_expert(router="chooser")))
    assert (found.router_keys, found.expert_keys) == (0, 36)
    (problem,) = found.problems
    assert problem.code is Code.MISSING_TENSOR
    assert "naming mismatch" in problem.found
    assert "model.layers.0.mlp.chooser.weight" in problem.found


def test_published_olmoe_names_are_read() -> None:
    """The published router key is ``mlp.gate.weight``, whatever the model card says."""
    found = inspect(FIXTURES / "olmoe-approx-plain" / "checkpoint")
    assert found.family == "olmoe"
    assert found.router_keys == len(found.layers) > 0


def test_d02_shared_experts_are_not_routed(tmp_path: Path) -> None:
    found = inspect(small_moe.write(tmp_path, per_expert()))
    shared = [data for name, (_, _, data) in per_expert().items() if "shared_experts" in name]
    assert found.bytes["shared"] == sum(map(len, shared))


@pytest.mark.parametrize(
    "stack", ["model.language_model.layers", "language_model.model.layers", "model.layers"]
)
def test_d11_any_outer_prefix(tmp_path: Path, stack: str) -> None:
    found = inspect(small_moe.write(tmp_path, per_expert(stack=stack)))
    assert (found.stack, found.router_keys, found.expert_keys) == (stack, 2, 36)


def test_d06_the_layout_is_told_per_layer(tmp_path: Path) -> None:
    mixed = per_expert((0,), experts=4)
    mixed |= {name.replace("s.0.", "s.1."): one for name, one in small_moe.fused(4).items()}
    document = small_moe.config(num_experts=4)
    found = inspect(small_moe.write(tmp_path, mixed, document))
    assert [layer.layout for layer in found.layers] == ["per expert", "fused"]
    assert not codes(found)


def test_d06_both_layouts_in_one_layer_are_an_error(tmp_path: Path) -> None:
    both = per_expert((0,), experts=4) | small_moe.fused(4)
    document = small_moe.config(num_experts=4, num_hidden_layers=1)
    assert codes(inspect(small_moe.write(tmp_path, both, document))) == [Code.FUSED_EXPERTS]


def test_d09_fused_names_have_no_weight_ending(tmp_path: Path) -> None:
    tensors = small_moe.fused(4, gate_up_proj=[4, 16, 12], down_proj=[4, 6, 16])
    document = small_moe.config(model_type="gpt_oss", num_experts=4, num_hidden_layers=1)
    found = inspect(small_moe.write(tmp_path, tensors, document))
    assert found.expert_keys == 2
    assert found.bytes["experts"] == 4 * (16 * 12 + 6 * 16) * 2


def test_d10_no_expert_recognised_is_an_error(tmp_path: Path) -> None:
    renamed = {name.replace(".experts.", ".expertz."): one for name, one in per_expert().items()}
    found = inspect(small_moe.write(tmp_path, renamed))
    (problem,) = found.problems
    assert problem.code is Code.MISSING_EXPERT
    assert "expertz" in problem.found


def test_d13_unknown_nesting_is_reported(tmp_path: Path) -> None:
    nested = {name.replace(".experts.", ".experts.experts."): t for name, t in per_expert().items()}
    found = inspect(small_moe.write(tmp_path, nested))
    (problem,) = found.problems
    assert problem.code is Code.UNKNOWN_TENSOR
    assert "experts.experts" in problem.found


def test_bare_fused_experts_of_granite(tmp_path: Path) -> None:
    path = "model.layers.0.block_sparse_moe"
    shapes = {
        f"{path}.input_linear.weight": [4, 12, HIDDEN],
        f"{path}.output_linear.weight": [4, HIDDEN, 6],
        f"{path}.router.layer.weight": [4, HIDDEN],
        "model.layers.0.shared_mlp.input_linear.weight": [12, HIDDEN],
    }
    document = small_moe.config(num_experts=None, num_local_experts=4, num_hidden_layers=1)
    found = inspect(small_moe.write(tmp_path, small_moe.named(shapes), document))
    assert not codes(found)
    (layer,) = found.layers
    assert (layer.experts, layer.layout, found.router_keys) == (4, "fused", 1)


def test_f25_companions_and_correction_bias(tmp_path: Path) -> None:
    tensors = per_expert((0,))
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = small_moe.tensor("b", [6], "F32")
    for expert in range(6):
        path = f"model.layers.0.mlp.experts.{expert}.up_proj"
        tensors[f"{path}.weight_scale_inv"] = small_moe.tensor(path, [1, 1], "F32")
    found = inspect(small_moe.write(tmp_path, tensors, small_moe.config(num_hidden_layers=1)))
    assert found.companions == {"weight_scale_inv": 6}
    assert found.correction_biases == ("gate.e_score_correction_bias",)


# -- substitution


def test_a23_retained_experts_per_layer() -> None:
    found = inspect(FIXTURES / "olmoe-approx" / "checkpoint")
    plain = inspect(FIXTURES / "olmoe-approx-plain" / "checkpoint")
    assert not codes(found)
    assert (found.form, plain.form) == ("approx", "none")
    assert found.substituted == sum(layer.experts - layer.retained for layer in found.layers) > 0
    assert plain.size - found.size == found.saved_bytes


def test_the_explicit_form_is_named() -> None:
    found = inspect(FIXTURES / "olmoe-explicit" / "checkpoint")
    assert (found.form, codes(found)) == ("explicit", [])
    assert found.substituted > 0


def test_a01_other_dialects_are_named(tmp_path: Path) -> None:
    document = small_moe.config(
        model_type="olmoe_compressed",
        approximate_experts={"0": [1]},
        approximate_expert_init_tokens={"0": [0]},
        mone={"version": 1},
    )
    found = inspect(small_moe.write(tmp_path, per_expert(), document))
    assert found.dialects == ("mone", "approximate_expert_init_tokens", "mode-pd")


# -- the config against the tensors


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"num_local_experts": 128}, Code.MODEL_FIELD_CONFLICT),
        ({"num_experts": 8}, Code.MODEL_FIELD_CONFLICT),
        ({"num_experts": None, "ffn_config": {"moe_num_experts": 8}}, Code.MODEL_FIELD_CONFLICT),
        ({"num_experts_per_tok": None}, Code.MODEL_FIELD),
        ({"moe_topk": [2, 2, 3]}, Code.MODEL_FIELD_CONFLICT),
    ],
)
def test_e01_e02_counts_and_top_k_must_agree(
    tmp_path: Path, changes: dict[str, Any], code: Code
) -> None:
    found = inspect(small_moe.write(tmp_path, per_expert(), small_moe.config(**changes)))
    assert codes(found) == [code]


def test_e01_e02_other_names_are_read(tmp_path: Path) -> None:
    document = small_moe.config(num_experts=None, num_experts_per_tok=None, top_k_experts=2)
    document["ffn_config"] = {"moe_num_experts": 6}
    found = inspect(small_moe.write(tmp_path, per_expert(), document))
    assert (codes(found), found.top_k) == ([], 2)


def test_e06_the_config_of_a_known_family_says_which_layers_have_experts(tmp_path: Path) -> None:
    source = FIXTURES / "qwen3-approx-plain" / "checkpoint"
    document = json.loads((source / "config.json").read_text())
    document["mlp_only_layers"] = [0]
    handmade.write(tmp_path, {"config.json": document})
    for file in source.glob("model*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert Code.LAYER_KINDS in codes(inspect(tmp_path))


def test_a16_an_expert_without_a_projection(tmp_path: Path) -> None:
    tensors = per_expert()
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    found = inspect(small_moe.write(tmp_path, tensors))
    (problem,) = found.problems
    assert (problem.code, problem.where) == (
        Code.MISSING_EXPERT,
        "model.layers.1.mlp.experts.3",
    )


# -- broken checkpoints: what validate says


def test_f03_f23_broken_files_come_first(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path / "cut", per_expert(), shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    assert codes(inspect(source)) == [Code.MISSING_SHARD]
    status, output = run(str(source))
    assert status == 1
    assert output.startswith("error CHECKPOINT/missing-shard")
    (tmp_path / "empty").mkdir()
    assert run(str(tmp_path / "empty"))[0] == 1
    status, output = run(str(tmp_path / "absent"))
    assert status == 2
    assert "CHECKPOINT/not-a-directory" in output


# -- what decoding reads


def test_the_estimate_is_that_of_the_source() -> None:
    """gpt-oss-20b: 3.6e9 active parameters of 2 bytes at 800 GB/s are 111 tokens/s."""
    assert round(decode_speed(800, 3.6e9 * 2)) == 111


def test_active_parameters_by_hand(tmp_path: Path) -> None:
    """Two layers: 2 of 6 experts, the shared one, router, attention, norm; head and one row."""
    found = inspect(small_moe.write(tmp_path, per_expert()))
    expert = 3 * 6 * 16
    layer = 2 * expert + expert + 6 * 16 + 16 * 16 + 16
    assert found.active.parameters == 2 * layer + 20 * 16 + 16
    assert found.active.bytes == 2 * found.active.parameters
    expected = 1e9 / found.active.bytes
    assert found.tokens_per_second(1.0) == expected


def test_json_and_bandwidth(tmp_path: Path) -> None:
    source = small_moe.write(tmp_path, per_expert())
    status, output = run(str(source), "--json", "--bandwidth", "800")
    document = json.loads(output)
    assert (status, document["exit_code"], document["router_keys"]) == (0, 0, 2)
    assert document["tokens_per_second"] == 800e9 / document["active"]["bytes"]
    assert run(str(source), "--bandwidth", "-1")[0] == 2


def test_text_counts_routers_and_experts_separately(tmp_path: Path) -> None:
    status, output = run(str(small_moe.write(tmp_path, per_expert())))
    assert status == 0
    assert "router keys    2\nexpert keys    36\n" in output
    assert "unknown (model_type 'some_moe')" in output
