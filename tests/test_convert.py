"""Conversion between the two forms: bytes, config, the dialect of mode-pd, and every refusal."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import pytest
import rewriting
import small_moe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_moe import HIDDEN, contents, document

from mone_ref import validate
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import read as read_config
from mone_ref.declaration import LayerSubstitution
from mone_ref.errors import Code
from mone_ref.rewrite import convert, verify, writer
from mone_ref.rewrite.blueprint import Blueprint
from mone_ref.rewrite.forecast import forecast
from mone_ref.rewrite.plan import Form

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
CONSTANTS = sorted(
    path.name for path in FIXTURES.iterdir() if path.is_dir() and not path.name.endswith("-plain")
)
FORM = {
    name: Form(read_config(FIXTURES / name / "checkpoint").substitution.form) for name in CONSTANTS
}
OTHER = {Form.APPROX: Form.EXPLICIT, Form.EXPLICIT: Form.APPROX}
EXPLICIT = ("compression_config", "transform_config", "expert_substitution")


def made(directory: Path, form: Form) -> Blueprint:
    outcome = convert.blueprint(directory, form, scan=True)
    assert outcome.blueprint, [str(problem) for problem in outcome.problems]
    return outcome.blueprint


def converted(directory: Path, form: Form, out: Path) -> Path:
    writer.write(made(directory, form), out)
    return out


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = Checkpoint.open(directory)
    assert not checkpoint.errors
    return {
        name: (entry.dtype, entry.shape, checkpoint.read(name))
        for name, entry in checkpoint.tensors.items()
    }


def listed(directory: Path) -> dict[int, LayerSubstitution]:
    substitution = read_config(directory).substitution
    return {**substitution.layers, **substitution.unbuilt}


def values(directory: Path) -> dict[tuple[int, int], Any]:
    """The constant of every place."""
    tensors = stored(directory)
    return {
        (at, expert): tensors[name]
        for at, layer in listed(directory).items()
        for expert, name in layer.constants.items()
    }


def config(directory: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return read


# -- bytes and config, of every fixture


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_and_every_other_byte_arrives(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    form = OTHER[FORM[name]]
    out = converted(source, form, tmp_path / "out")
    assert {problem.severity for problem in validate.check(out).problems} <= {"note"}
    assert read_config(out).substitution.form == form
    assert values(out) == values(source)
    assert {at: layer.listed for at, layer in listed(out).items()} == {
        at: layer.listed for at, layer in listed(source).items()
    }
    family = read_config(source).model.family
    for at, layer in listed(out).items():
        experts = family.experts_path(at)
        usual = experts.removesuffix("experts") + "expert_replacements"
        assert dict(layer.constants) == {
            expert: f"{experts}.{expert}.approx_value"
            if form is Form.APPROX
            else f"{usual}.{expert}.value"
            for expert in layer.substituted
        }
    before, after = stored(source), stored(out)
    for directory, tensors in ((source, before), (out, after)):
        for layer in listed(directory).values():
            for constant in layer.constants.values():
                tensors.pop(constant, None)
    assert after == before


@pytest.mark.parametrize("name", CONSTANTS)
def test_there_and_back_is_where_it_began(name: str, tmp_path: Path) -> None:
    """From the approx form; an explicit source is first brought there."""
    source = FIXTURES / name / "checkpoint"
    if FORM[name] is Form.EXPLICIT:
        source = converted(source, Form.APPROX, tmp_path / "approx")
    there = converted(source, Form.EXPLICIT, tmp_path / "there")
    back = converted(there, Form.APPROX, tmp_path / "back")
    assert stored(back) == stored(source)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in (
            "model.safetensors.index.json",
            "mone-ref-manifest.json",
        ):
            assert (back / path.name).read_bytes() == path.read_bytes()


def test_the_rest_of_the_config_keeps_its_order_and_place(tmp_path: Path) -> None:
    """A24: notes beside the declaration stay, what held nothing else goes."""
    source = Path(shutil.copytree(FIXTURES / "olmoe-approx" / "checkpoint", tmp_path / "in"))
    first = {"compression_config": {"producer": {"name": "x"}}}
    last = {"llmcompressor_mone_implementation": {"algorithm": "mone"}}
    written = {**first, **config(source), **last}
    (source / "config.json").write_text(json.dumps(written))
    there = converted(source, Form.EXPLICIT, tmp_path / "there")
    assert list(config(there)) == [key for key in written if key != "approximate_experts"]
    assert config(there)["compression_config"]["producer"] == {"name": "x"}
    back = converted(there, Form.APPROX, tmp_path / "back")
    assert config(back) == written
    assert config(back)["compression_config"] == {"producer": {"name": "x"}}


def test_text_of_any_kind_passes_through(tmp_path: Path) -> None:
    """A lone surrogate is lawful in JSON, as an escape, and in no UTF-8."""
    source = Path(shutil.copytree(FIXTURES / "olmoe-approx" / "checkpoint", tmp_path / "in"))
    notes = {"note": "\ud800 \u20ac \n \\ud800", "\udfff": 1e-7}
    (source / "config.json").write_text(json.dumps({**notes, **config(source)}))
    there = converted(source, Form.EXPLICIT, tmp_path / "there")
    back = converted(there, Form.APPROX, tmp_path / "back")
    assert config(back) == config(source)
    blueprint = made(there, Form.APPROX)
    assert verify.verify(tmp_path / "back", blueprint).problems == ()


def test_the_explicit_form_is_at_the_top_and_the_list_in_the_text_config(tmp_path: Path) -> None:
    there = converted(FIXTURES / "qwen3-vl" / "checkpoint", Form.EXPLICIT, tmp_path / "there")
    assert "approximate_experts" not in config(there)["text_config"]
    targets = config(there)[EXPLICIT[0]][EXPLICIT[1]][EXPLICIT[2]]["targets"]
    assert list(targets) == [
        "model.language_model.layers.0.mlp.experts",
        "model.language_model.layers.1.mlp.experts",
    ]
    back = converted(there, Form.APPROX, tmp_path / "back")
    assert config(back)["text_config"]["approximate_experts"] == {"0": [7, 1, 4], "1": [0, 3, 5]}


def test_equal_lists_in_both_holders_become_one_declaration(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FIXTURES / "qwen3-vl" / "checkpoint", tmp_path / "in"))
    twice = config(source)
    twice["approximate_experts"] = twice["text_config"]["approximate_experts"]
    (source / "config.json").write_text(json.dumps(twice))
    there = converted(source, Form.EXPLICIT, tmp_path / "there")
    assert not validate.check(there).errors


def test_a10_a_shared_constant_becomes_one_per_expert(tmp_path: Path) -> None:
    """By hand: experts 1 and 3 of layer 0 name one tensor."""
    tensors = handmade.tensors()
    vector = ("BF16", [4], b"\1\2\3\4\5\6\7\x08")
    for expert in (1, 3):
        del tensors[f"model.layers.0.mlp.experts.{expert}.approx_value"]
    tensors["shared"] = vector
    document_ = {
        **{key: value for key, value in handmade.config().items() if key != "approximate_experts"},
        "compression_config": handmade.explicit({1: "shared", 3: "shared"}),
    }
    files = {"config.json": document_, "model.safetensors": handmade.safetensors(tensors)}
    result = contents(made(handmade.write(tmp_path / "in", files), Form.APPROX))
    for expert in (1, 3):
        assert result[f"model.layers.0.mlp.experts.{expert}.approx_value"] == ((4,), vector[2])
    assert "shared" not in result


def test_constants_of_an_mtp_layer_go_along(tmp_path: Path) -> None:
    source = FIXTURES / "deepseek3-approx" / "checkpoint"
    unbuilt = read_config(source).substitution.unbuilt
    assert unbuilt
    there = converted(source, Form.EXPLICIT, tmp_path / "there")
    for at, layer in unbuilt.items():
        path = f"model.layers.{at}.mlp"
        for expert in layer.substituted:
            name = f"{path}.experts.{expert}.approx_value"
            assert name in stored(source)
            assert f"{path}.expert_replacements.{expert}.value" in stored(there)
            assert name not in stored(there)


def test_an_mtp_layer_that_is_not_stored_is_still_declared(tmp_path: Path) -> None:
    source = unknown_family(tmp_path, {"0": [1]}, num_nextn_predict_layers=1)
    written = config(source)
    written["approximate_experts"]["2"] = [4]
    (source / "config.json").write_text(json.dumps(written))
    blueprint = made(source, Form.EXPLICIT)
    targets = document(blueprint)[EXPLICIT[0]][EXPLICIT[1]][EXPLICIT[2]]["targets"]
    assert list(targets) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    assert targets["model.layers.2.mlp.experts"]["num_logical_experts"] == 6


# -- families that are not in the table


def unknown_family(directory: Path, gone: dict[str, list[int]], **changes: Any) -> Path:
    """A model of an architecture without a row, some of its experts substituted."""
    tensors = small_moe.per_expert()
    for layer, ids in gone.items():
        for expert in ids:
            path = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors = {name: one for name, one in tensors.items() if f"{path}." not in name}
            tensors |= small_moe.named({f"{path}.approx_value": [HIDDEN]})
    document_ = small_moe.config(approximate_experts=gone, **changes)
    return small_moe.write(directory / "in", tensors, document_, shards=2)


IDS = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    gone=st.dictionaries(st.sampled_from(["0", "1"]), IDS, min_size=1),
    note=st.sampled_from([{}, {"compression_config": {"by": "x", "transform_config": {"a": 1}}}]),
)
def test_there_and_back_of_a_family_without_a_row(
    tmp_path_factory: pytest.TempPathFactory, gone: dict[str, list[int]], note: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("any")
    source = unknown_family(directory, gone, **note)
    there = converted(source, Form.EXPLICIT, directory / "there")
    back = converted(there, Form.APPROX, directory / "back")
    assert stored(back) == stored(source)
    assert config(back) == config(source)
    assert config(back)["approximate_experts"] == gone
    for layer, ids in gone.items():
        path = f"model.layers.{layer}.mlp"
        for expert in ids:
            one = stored(source)[f"{path}.experts.{expert}.approx_value"]
            assert stored(there)[f"{path}.expert_replacements.{expert}.value"] == one


def another_stack(document_: dict[str, Any]) -> None:
    targets = document_[EXPLICIT[0]][EXPLICIT[1]][EXPLICIT[2]]["targets"]
    targets["mtp.layers.0.mlp.experts"] = targets.pop("model.layers.0.mlp.experts")


def shortened(document_: dict[str, Any]) -> None:
    targets = document_[EXPLICIT[0]][EXPLICIT[1]][EXPLICIT[2]]["targets"]
    targets["layers.0.mlp.experts"] = targets.pop("model.layers.0.mlp.experts")


def test_a_path_of_another_stack_is_never_taken_for_the_decoder(tmp_path: Path) -> None:
    there = converted(unknown_family(tmp_path, {"0": [1]}), Form.EXPLICIT, tmp_path / "there")
    edit_config(there, another_stack)
    assert codes(there, Form.APPROX) == [Code.TARGET_UNBOUND]
    edit_config(there, lambda one: [another_stack_back(one), shortened(one)])
    assert document(made(there, Form.APPROX))["approximate_experts"] == {"0": [1]}


def another_stack_back(document_: dict[str, Any]) -> None:
    targets = document_[EXPLICIT[0]][EXPLICIT[1]][EXPLICIT[2]]["targets"]
    targets["model.layers.0.mlp.experts"] = targets.pop("mtp.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.1.approx_value"), Code.MISSING_CONSTANT),
        (
            lambda t: t.update(small_moe.named({"model.layers.0.mlp.experts.1.approx_value": [1]})),
            Code.CONSTANT_SHAPE,
        ),
        (
            lambda t: t.update(
                small_moe.named({"model.layers.0.mlp.experts.1.approx_value": [HIDDEN]}, "U8")
            ),
            Code.CONSTANT_DTYPE,
        ),
        (
            lambda t: t.update(
                small_moe.named({"model.layers.0.mlp.experts.2.approx_value": [HIDDEN]})
            ),
            Code.UNLISTED_CONSTANT,
        ),
        (lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"), Code.MISSING_EXPERT),
        (
            lambda t: t.update(small_moe.named({"model.layers.0.mlp.experts.down_proj": [6, 4]})),
            Code.FUSED_EXPERTS,
        ),
        (
            lambda t: t.update(
                small_moe.named({"model.layers.0.mlp.expert_replacements.1.value": [HIDDEN]})
            ),
            Code.CONSTANT_NAME,
        ),
    ],
)
def test_tensors_against_the_list_without_a_row(
    tmp_path: Path, edit: Callable[[Any], object], expected: Code
) -> None:
    tensors = small_moe.per_expert()
    path = "model.layers.0.mlp.experts.1"
    tensors = {name: one for name, one in tensors.items() if f"{path}." not in name}
    tensors |= small_moe.named({f"{path}.approx_value": [HIDDEN]})
    edit(tensors)
    source = small_moe.write(
        tmp_path / "in", tensors, small_moe.config(approximate_experts={"0": [1]})
    )
    assert expected in codes(source, Form.EXPLICIT)


def test_a_list_for_a_layer_without_experts_is_refused(tmp_path: Path) -> None:
    source = unknown_family(tmp_path, {"0": [1]}, num_hidden_layers=3)
    edit_config(source, lambda one: one["approximate_experts"].update({"2": [1]}))
    assert codes(source, Form.EXPLICIT) == [Code.LAYER_NOT_MOE]
    edit_config(source, lambda one: one["approximate_experts"].update({"3": [1]}))
    assert codes(source, Form.EXPLICIT) == [Code.LAYER_NOT_MOE]


def test_a_list_without_any_expert_is_refused(tmp_path: Path) -> None:
    document_ = small_moe.config(approximate_experts={"0": [1]}, num_experts=None)
    tensors = small_moe.named({"model.embed_tokens.weight": [20, HIDDEN]})
    source = small_moe.write(tmp_path / "in", tensors, document_)
    assert codes(source, Form.EXPLICIT) == [Code.MISSING_EXPERT]


# -- the dialect of mode-pd


def dialect(
    directory: Path, fixture: str = "olmoe-approx", tokens: int = 0, **changes: Any
) -> Path:
    """A fixture as mode-pd writes it."""
    source = Path(shutil.copytree(FIXTURES / fixture / "checkpoint", directory / "in"))
    written = config(source)
    counts = {layer: [tokens for _ in ids] for layer, ids in written["approximate_experts"].items()}
    written |= {
        "model_type": f"{written['model_type']}_compressed",
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
        "approximate_expert_init_tokens": counts,
        **changes,
    }
    (source / "config.json").write_text(json.dumps(written))
    (source / "modeling.py").write_text("class Model: ...\n")
    return source


@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("olmoe-approx", {"architectures": ["OlmoneForCausalLM"]}),
        ("olmoe-approx", {"architectures": ["OlmoneForCausalLM"], "model_type": "olmoe"}),
        ("deepseek2-approx", {}),
        ("deepseek3-approx", {}),
        ("minimax-approx", {}),
    ],
)
def test_mode_pd_becomes_the_stock_model(
    tmp_path: Path, fixture: str, changes: dict[str, Any]
) -> None:
    source = dialect(tmp_path, fixture, **changes)
    outcome = convert.blueprint(source, Form.APPROX, scan=True)
    notes = {problem.code: problem.found for problem in outcome.problems}
    notes.pop(Code.UNKNOWN_TENSOR, None)  # of MTP layers
    assert notes == {Code.DIALECT: "zeros only", Code.OMITTED_FILE: "1 file: modeling.py"}
    stock = FIXTURES / fixture / "checkpoint"
    out = converted(source, Form.APPROX, tmp_path / "out")
    assert config(out) == config(stock)
    assert stored(out) == stored(stock)
    assert not (out / "modeling.py").exists()
    assert (out / "tokenizer.json").read_bytes() == (stock / "tokenizer.json").read_bytes()
    other = converted(source, Form.EXPLICIT, tmp_path / "other")
    assert values(other) == values(stock)
    assert not validate.check(other).errors


def test_a_stock_model_keeps_its_own_code(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FIXTURES / "olmoe-approx" / "checkpoint", tmp_path / "in"))
    written = {**config(source), "auto_map": {"AutoConfig": "configuration.Config"}}
    (source / "config.json").write_text(json.dumps(written))
    (source / "configuration.py").write_text("class Config: ...\n")
    out = converted(source, Form.EXPLICIT, tmp_path / "out")
    assert config(out)["auto_map"] == written["auto_map"]
    assert (out / "configuration.py").exists()


def test_constants_that_change_are_refused_and_so_is_an_unknown_custom_class(
    tmp_path: Path,
) -> None:
    assert codes(dialect(tmp_path / "a", tokens=128), Form.APPROX) == [Code.EVOLVING] * 2
    unknown = dialect(tmp_path / "b", model_type="other_compressed", architectures=["Other"])
    assert codes(unknown, Form.APPROX) == [Code.DIALECT]
    plain = dialect(tmp_path / "c", approximate_experts={}, approximate_expert_init_tokens={})
    assert Code.UNLISTED_LAYER in codes(plain, Form.APPROX)


# -- refusals


def codes(directory: Path, form: Form) -> list[Code]:
    outcome = convert.blueprint(directory, form)
    assert outcome.blueprint is None
    return [problem.code for problem in outcome.problems if problem.severity == "error"]


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    written = config(directory)
    edit(written)
    (directory / "config.json").write_text(json.dumps(written))


def both_forms(document_: dict[str, Any]) -> None:
    document_["compression_config"] = copy.deepcopy(handmade.explicit({1: "x"}))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (both_forms, Code.BOTH_FORMS),
        (lambda one: one["approximate_experts"]["0"].append(99), Code.ID_RANGE),
        (lambda one: one["approximate_experts"]["0"].append(0), Code.MISSING_CONSTANT),
        (lambda one: one.pop("approximate_experts"), Code.UNLISTED_LAYER),
        (lambda one: one.update(num_experts=7), Code.ID_RANGE),
        (
            lambda one: one.update(quantization_config={"quant_method": "compressed-tensors"}),
            Code.MODEL_FEATURE,
        ),
    ],
)
def test_a_broken_source_gives_the_findings_of_validate(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], expected: Code
) -> None:
    source = Path(shutil.copytree(FIXTURES / "olmoe-approx" / "checkpoint", tmp_path / "in"))
    edit_config(source, edit)
    assert expected in codes(source, Form.EXPLICIT)
    assert expected in {problem.code for problem in validate.check(source).problems} | {
        problem.code for problem in validate.check(source).not_modelled
    }


def test_a_constant_that_is_no_number_is_found_where_values_are_read(tmp_path: Path) -> None:
    tensors = handmade.tensors()
    name = "model.layers.0.mlp.experts.1.approx_value"
    tensors[name] = handmade.bf16([4], b"\xc0\x7f")
    files = {"config.json": handmade.config(), "model.safetensors": handmade.safetensors(tensors)}
    source = handmade.write(tmp_path / "in", files)
    assert convert.blueprint(source, Form.EXPLICIT).blueprint
    outcome = convert.blueprint(source, Form.EXPLICIT, scan=True)
    assert [problem.code for problem in outcome.problems] == [Code.NON_FINITE_CONSTANT]


def test_a24_compressed_tensors_beside_the_approx_form_stays_out_of_the_explicit(
    tmp_path: Path,
) -> None:
    """The other way is a way out: FMT-12 forbids the explicit form only."""
    quantised = {"quantization_config": {"quant_method": "compressed-tensors"}}
    approx = unknown_family(tmp_path, {"0": [1]}, **quantised)
    assert codes(approx, Form.EXPLICIT) == [Code.MODEL_FEATURE]
    edit_config(approx, lambda one: one.pop("quantization_config"))
    there = converted(approx, Form.EXPLICIT, tmp_path / "there")
    edit_config(there, lambda one: one.update(quantised))
    assert (
        document(made(there, Form.APPROX))["quantization_config"]
        == quantised["quantization_config"]
    )


@pytest.mark.parametrize(
    ("fixture", "form", "found"),
    [
        ("olmoe-approx", Form.APPROX, "the approx form already"),
        ("olmoe-explicit", Form.EXPLICIT, "the explicit form already"),
        ("olmoe-approx-plain", Form.APPROX, "no substituted expert"),
    ],
)
def test_nothing_to_convert(fixture: str, form: Form, found: str) -> None:
    outcome = convert.blueprint(FIXTURES / fixture / "checkpoint", form)
    assert outcome.blueprint is None
    assert [(one.code, one.found) for one in outcome.problems] == [(Code.SAME_FORM, found)]


# -- the command


@pytest.mark.parametrize("name", ["deepseek3-approx", "olmoe-explicit"])
def test_the_forecast_counts_constants_by_either_name(name: str) -> None:
    outcome = convert.blueprint(FIXTURES / name / "checkpoint", OTHER[FORM[name]])
    assert outcome.blueprint
    told = forecast(outcome.structure, outcome.blueprint)
    assert told.before.components["constants"] > 0
    assert told.after == told.before


def test_the_command_writes_once_and_its_output_is_proven(tmp_path: Path) -> None:
    source, out = FIXTURES / "olmoe-sharded" / "checkpoint", tmp_path / "out"
    status, told = rewriting.run("convert", source, "--to", "explicit", "--dry-run")
    assert (status, list(tmp_path.iterdir())) == (0, [])
    assert "constants" in told
    assert rewriting.run("convert", source, "--to", "explicit", "--out", out)[0] == 0
    assert rewriting.run("verify", out, "--against", source)[0] == 0
    before = rewriting.hashes(out)
    status, told = rewriting.run("convert", source, "--to", "explicit", "--out", out)
    assert (status, rewriting.hashes(out)) == (1, before)
    assert "OUTPUT/exists" in told
    status, told = rewriting.run("convert", out, "--to", "approx", "--out", out / "in")
    assert status == 1
    assert "OUTPUT/place" in told
    assert rewriting.run("convert", out, "--to", "approx", "--out", tmp_path / "back")[0] == 0
    assert rewriting.run("verify", tmp_path / "back", "--against", out)[0] == 0
    assert stored(tmp_path / "back") == stored(source)


def test_the_command_refuses_and_writes_nothing(tmp_path: Path) -> None:
    source = FIXTURES / "olmoe-approx" / "checkpoint"
    out = tmp_path / "out"
    status, told = rewriting.run("convert", source, "--to", "approx", "--out", out, "--json")
    answer = json.loads(told)
    assert (status, answer["exit_code"], answer["output"], answer["forecast"]) == (1, 1, None, None)
    assert [one["code"] for one in answer["findings"]] == ["REWRITE/same-form"]
    assert rewriting.run("convert", tmp_path / "absent", "--to", "approx", "--out", out)[0] == 2
    assert rewriting.run("convert", source, "--to", "explicit")[0] == 2
    assert rewriting.run("convert", source, "--to", "other", "--dry-run")[0] == 2
    assert list(tmp_path.iterdir()) == []
