"""The transformers loader against the goldens, a second wiring, and checkpoints of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_witness as witness
from safetensors.torch import load_file, save_file
from test_decoder import PROMPT, save_plain
from torch import Tensor

import mone_ref
from mone_ref import validate
from mone_ref.backend import Scores
from mone_ref.config import LayerSubstitution
from mone_ref.errors import Code, Phase, Rejected
from mone_ref.fill.golden import budget
from mone_ref.fill.variants import UNIT_ROUNDOFF, variants
from mone_ref.integrations import substituted_experts
from mone_ref.integrations import transformers as integration
from mone_ref.suite import golden
from mone_ref.suite.compare import MULTIPLIER, compare
from mone_ref.suite.edits import edited

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
ROOT = Path(__file__).resolve().parent.parent / "fixtures"
SUBSTITUTED = sorted(
    path.parent.name
    for path in ROOT.glob("*/checkpoint")
    if path.parent.name.removesuffix("-plain") == path.parent.name
    and path.parent.name != "qwen3-vl"  # a multimodal model
)
CERTIFIED = [
    (fixture, dtype)
    for fixture in SUBSTITUTED
    for dtype in golden.read(ROOT / fixture / "golden.safetensors").compute_types
    if dtype in ("float32", "bfloat16", "float16")  # no CPU computes in TF32, no rank is split
]

transformers.utils.logging.disable_progress_bar()


def score(model: Any, ids: list[int]) -> Tensor:
    """Log-probabilities ``[T, V]``."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


def checkpoint(fixture: str) -> Path:
    return ROOT / fixture / "checkpoint"


# -- answers


@pytest.mark.parametrize(("fixture", "dtype"), CERTIFIED)
def test_every_experts_function_gives_the_golden_answers(fixture: str, dtype: str) -> None:
    right = golden.read(ROOT / fixture / "golden.safetensors")
    for implementation in IMPLEMENTATIONS:
        model = integration.load(checkpoint(fixture), dtype, experts_implementation=implementation)
        assert model.config._experts_implementation == implementation
        for prompt in right.prompts:
            answer = Scores(score(model, prompt.ids))
            assert not compare(answer, prompt, dtype).flaw, implementation


@pytest.mark.parametrize(("fixture", "dtype"), CERTIFIED)
def test_a_wiring_without_compaction_agrees(fixture: str, dtype: str) -> None:
    """The witness meets every golden, and the loader is no further from it than both budgets."""
    right = golden.read(ROOT / fixture / "golden.safetensors")
    seen = witness.load(checkpoint(fixture), getattr(torch, dtype))
    model = integration.load(checkpoint(fixture), dtype)
    for prompt in right.prompts:
        told = witness.score(seen, prompt.ids)
        assert not compare(Scores(told), prompt, dtype).flaw
        apart = (score(model, prompt.ids) - told).abs().max()
        assert apart <= 2 * MULTIPLIER * prompt.budgets[dtype].maximum


def test_the_witness_sees_a_constant(approx: Path) -> None:
    """With one constant changed it misses the golden: agreement above is no accident."""
    right = golden.read(ROOT / "olmoe-approx" / "golden.safetensors")
    seen = witness.load(approx, torch.float32)
    seen.model.layers[0].mlp.experts.experts[1].value.data *= 2
    faults = [compare(Scores(witness.score(seen, p.ids)), p, "float32").flaw for p in right.prompts]
    assert any(faults)


# -- models that transformers itself made


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("olmoe", {"norm_topk_prob": True, "tie_word_embeddings": True}, (0, 1)),
        ("qwen3_moe", {"norm_topk_prob": True, "num_key_value_heads": 3}, (0, 1)),
        ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "head_dim": 32}, (3,)),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, (1, 3)),
        ("mixtral", {"num_experts_per_tok": 3, "tie_word_embeddings": True}, (1,)),
        ("mixtral", {"head_dim": 24}, (0, 1)),
    ],
    ids=str,
)
def test_families_and_their_variants(
    tmp_path: Path, family: str, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """Experts 1 and 4 give way to constants: loader and witness meet the oracle's budget."""
    substituted_from_plain(tmp_path, family, layers, **changes)
    oracle = mone_ref.load(tmp_path, torch.float64)
    truth = oracle.score([PROMPT])[0]  # [T, V]
    runs = torch.stack([run.model.score([PROMPT])[0] for run in variants(tmp_path, "float32")])
    token, top = budget(oracle.logits(PROMPT), truth, runs, UNIT_ROUNDOFF["float32"])
    models = [
        integration.load(tmp_path, "float32", experts_implementation=one) for one in IMPLEMENTATIONS
    ]
    for answer in (
        witness.score(witness.load(tmp_path, torch.float32), PROMPT),
        *(score(model, PROMPT) for model in models),
    ):
        error = answer.double() - truth
        assert (error.square().mean(-1).sqrt() <= MULTIPLIER * token).all()
        assert error.abs().max() <= MULTIPLIER * top
    models[0].save_pretrained(tmp_path / "again")
    assert not validate.check(tmp_path / "again").problems
    saved, stored = (
        load_file(path / "model.safetensors") for path in (tmp_path / "again", tmp_path)
    )
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(saved[name], tensor), name


def substituted_from_plain(
    directory: Path, family: str, layers: tuple[int, ...], **changes: Any
) -> None:
    """A checkpoint that transformers saved, with experts 1 and 4 of some layers replaced."""
    save_plain(directory, family, **changes)
    tensors = load_file(directory / "model.safetensors")
    document = json.loads((directory / "config.json").read_text())
    block = witness.STORED[family][-1]
    for layer in layers:
        for expert in (1, 4):
            path = f"model.layers.{layer}.{block}.experts.{expert}."
            gone = [name for name in tensors if name.startswith(path)]
            assert len(gone) == 3
            for name in gone:
                del tensors[name]
            tensors[f"{path}approx_value"] = torch.randn(48)
    document["approximate_experts"] = {str(layer): [1, 4] for layer in layers}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(document))


# -- the model


def test_the_model_is_of_the_class_that_the_config_names(approx: Path) -> None:
    model = integration.load(approx)
    assert isinstance(model, transformers.OlmoeForCausalLM)
    assert type(model).__name__ == "OlmoeForCausalLM"
    assert model.dtype == torch.bfloat16  # the checkpoint's own
    assert not model.training
    assert model.config.name_or_path == str(approx)
    assert model.generation_config.do_sample is False  # as generation_config.json says


def test_only_retained_experts_have_rows(approx: Path) -> None:
    model = integration.load(approx)
    assert integration.expert_rows(model) == {0: 6, 1: 5}  # of 8: two and three are substituted
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            assert len(parameter) < 8, name


def test_parameters_are_those_of_the_checkpoint_and_no_more(approx: Path) -> None:
    model = integration.load(approx)
    stored = sum(tensor.numel() for tensor in load_file(approx / "model.safetensors").values())
    assert sum(parameter.numel() for parameter in model.parameters()) == stored


def test_a_plain_checkpoint_loads_as_the_stock_model_does(fixtures: Path) -> None:
    plain = checkpoint("olmoe-approx-plain")
    ours = integration.load(plain, "float32")
    stock = transformers.OlmoeForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    for name, value in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_the_experts_function_can_be_changed_later(approx: Path) -> None:
    model = integration.load(approx, "float32", experts_implementation="grouped_mm")
    model.set_experts_implementation("eager")
    other = integration.load(approx, "float32", experts_implementation="eager")
    assert torch.equal(score(model, [1, 2, 3]), score(other, [1, 2, 3]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_generate_continues_as_the_whole_sequence_scores(approx: Path, implementation: str) -> None:
    model = integration.load(approx, "float32", experts_implementation=implementation)
    prompt = [5, 9, 2, 77]
    made = model.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6)[0].tolist()
    assert made[: len(prompt)] == prompt
    assert len(made) == len(prompt) + 6
    best = score(model, made).argmax(-1).tolist()
    eos = model.generation_config.eos_token_id
    assert eos not in best[len(prompt) - 1 : -1]  # else min_new_tokens had a say
    assert best[len(prompt) - 1 : -1] == made[len(prompt) :]


def test_constants_and_router_learn(approx: Path) -> None:
    model = integration.load(approx, "float32")
    ids = torch.tensor([golden.read(ROOT / "olmoe-approx" / "golden.safetensors").ids[0]])
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert layer.mlp.experts.constants.grad.abs().sum() > 0
        assert layer.mlp.gate.weight.grad.abs().sum() > 0


def test_a_copy_answers_alike_and_is_independent(approx: Path) -> None:
    model = integration.load(approx, "float32")
    before = score(model, [1, 2, 3, 4, 5, 6, 7, 8])
    other = copy.deepcopy(model)
    name = "model.layers.0.mlp.experts.1.approx_value"
    integration.update(other, {name: torch.full((96,), 9.0)})
    assert torch.equal(score(model, [1, 2, 3, 4, 5, 6, 7, 8]), before)


# -- one layer


def layer(implementation: str, substituted: tuple[int, ...], dtype: torch.dtype) -> Any:
    """An experts module of eight, hidden 8 and intermediate 16, with weights from a seed."""
    config = transformers.OlmoeConfig(
        hidden_size=8, intermediate_size=16, num_experts=8, num_experts_per_tok=3
    )
    config._experts_implementation = implementation
    module = transformers.models.olmoe.modeling_olmoe.OlmoeExperts(config).to(dtype)
    names = {expert: str(expert) for expert in substituted}
    entry = LayerSubstitution(0, 8, substituted, names)
    substituted_experts.substitute(module, entry)
    for name, table in substituted_experts.tables(entry).items():
        getattr(module, name).copy_(table)
    seeded = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=seeded).to(dtype)
    return module


def by_hand(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum over routes in float64, one route at a time."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    substituted = sorted(module.substitution.listed)
    retained = [expert for expert in range(8) if expert not in substituted]
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if expert in substituted:
                y[token] += weight * module.constants[substituted.index(expert)].double()
            elif expert in retained:
                row = retained.index(expert)
                gate, up = (module.gate_up_proj[row].double() @ x[token].double()).chunk(2)
                inner = gate * torch.sigmoid(gate) * up
                y[token] += weight * (module.down_proj[row].double() @ inner)
    return y


ROUTES = [
    [0, 1, 2],  # retained, substituted, retained
    [1, 5, 7],  # all substituted
    [5, 5, 3],  # one expert twice
    [-1, 3, 1],  # outside, retained, substituted
    [8, 100, 5],  # outside above
    [6, 6, 6],  # one retained expert thrice
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exact_routes(implementation: str) -> None:
    """Every kind of route, to float32 rounding: 64 products of rows under 10 in size."""
    module = layer(implementation, (5, 1, 7), torch.float32)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(ROUTES)
    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        found, expected = module(x, ids, weights), by_hand(module, x, ids, weights)
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= 64 * 2.0**-24 * scale


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_routes_outside_count_for_nothing_whatever_their_weight(implementation: str) -> None:
    module = layer(implementation, (1,), torch.float32)
    x, ids = torch.ones(1, 8), torch.tensor([[1, -1, 8]])
    with torch.inference_mode():
        found = module(x, ids, torch.tensor([[0.5, torch.nan, torch.inf]]))
    assert torch.equal(found[0], 0.5 * module.constants[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", [0, 5])
def test_a_row_that_overflows_reaches_only_its_own_tokens(implementation: str, row: int) -> None:
    """Neither row 0 nor the last one is computed for a route to a constant (SEM-5)."""
    module = layer(implementation, (1, 5), torch.float32)
    module.gate_up_proj.data[row] = torch.inf
    own = [expert for expert in range(8) if expert not in (1, 5)][row]
    ids = torch.tensor([[1, 5, 2], [1, 5, 1], [own, 1, 5]])
    with torch.inference_mode():
        found = module(torch.ones(3, 8), ids, torch.full((3, 3), 0.25))
    assert found[:2].isfinite().all()
    assert not found[2].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_token_at_all(implementation: str) -> None:
    module = layer(implementation, (1,), torch.float32)
    empty = torch.empty(0, 3)
    with torch.inference_mode():
        found = module(torch.empty(0, 8), empty.long(), empty)
    assert found.shape == (0, 8)


def test_constants_are_summed_in_float32() -> None:
    """256 + 1 - 256 is 1: bfloat16 would lose it on the way (SEM-3)."""
    module = layer("eager", (1, 5, 7), torch.bfloat16)
    for place, value in enumerate((256.0, 1.0, -256.0)):
        module.constants.data[place] = value
    with torch.inference_mode():
        found = module(
            torch.ones(1, 8, dtype=torch.bfloat16),
            torch.tensor([[1, 5, 7]]),
            torch.ones(1, 3, dtype=torch.bfloat16),
        )
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[1.0] * 8]


def test_a_multimodal_model_is_not_loaded() -> None:
    with pytest.raises(ValueError, match="is a multimodal model"):
        integration.load(checkpoint("qwen3-vl"))


# -- saving


@pytest.mark.parametrize("fixture", SUBSTITUTED)
def test_saved_checkpoints_hold_the_same_tensors(fixture: str, tmp_path: Path) -> None:
    source = checkpoint(fixture)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    integration.load(source).save_pretrained(tmp_path)
    assert not validate.check(tmp_path).problems
    saved = load_file(tmp_path / "model.safetensors")
    stored = {
        name: tensor
        for file in source.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if not name.startswith(f"model.layers.{layers}.")  # an MTP layer is not loaded
    }
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(saved[name], tensor), name
    again = integration.load(tmp_path, "float32")
    right = golden.read(ROOT / fixture / "golden.safetensors")
    for prompt in right.prompts:
        assert not compare(Scores(score(again, prompt.ids)), prompt, "float32").flaw


def test_saved_in_shards_and_over_itself(approx: Path, tmp_path: Path) -> None:
    model = integration.load(approx)
    before = score(model, [3, 1, 4, 1, 5])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert not validate.check(tmp_path).problems
    again = integration.load(tmp_path)
    again.save_pretrained(tmp_path, max_shard_size="60KB")
    assert torch.equal(score(integration.load(tmp_path), [3, 1, 4, 1, 5]), before)


def test_a_changed_constant_is_saved(approx: Path, tmp_path: Path) -> None:
    model = integration.load(approx)
    name, value = "model.layers.1.mlp.experts.7.approx_value", torch.arange(96).to(torch.bfloat16)
    integration.update(model, {name: value})
    model.save_pretrained(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], value)


def test_formats_of_transformers_own_are_refused(approx: Path, tmp_path: Path) -> None:
    model = integration.load(approx)
    with pytest.raises(ValueError, match="checkpoint format only"):
        model.save_pretrained(tmp_path, save_original_format=False)
    assert not list(tmp_path.iterdir())


def test_offloaded_weights_are_neither_saved_nor_updated(approx: Path, tmp_path: Path) -> None:
    """Offloading leaves empty parameters behind, here all of them."""
    model = integration.load(approx).to("meta")
    with pytest.raises(ValueError, match="offloaded weights cannot be saved"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    name = "model.layers.0.mlp.experts.1.approx_value"
    with pytest.raises(RuntimeError, match="offloaded constants"):
        integration.update(model, {name: torch.ones(96)})


def test_shared_constants_stay_one_or_are_not_saved(tmp_path: Path) -> None:
    """An update reaches every expert that shares a constant; training one of them does not."""
    source = checkpoint("olmoe-explicit-shared")
    model = integration.load(source, "float32")
    holders: dict[str, list[Tensor]] = {}
    for layer in model.model.layers:
        entry = layer.mlp.experts.substitution
        for place, expert in enumerate(entry.substituted):
            values = layer.mlp.experts.constants.detach()
            holders.setdefault(entry.constants[expert], []).append(values[place])
    name = max(holders, key=lambda name: len(holders[name]))
    assert len(holders[name]) > 1
    integration.update(model, {name: torch.full_like(holders[name][0], 2.0)})
    assert all((value == 2.0).all() for value in holders[name])
    holders[name][0].fill_(3.0)
    with pytest.raises(ValueError, match="no longer share one constant"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# -- refusals


@pytest.fixture
def broken(approx: Path) -> Iterator[Path]:
    """A checkpoint with one constant missing and one of another length."""
    edits = [
        {"remove_tensor": "model.layers.1.mlp.experts.0.approx_value"},
        {"remove_tensor": "model.layers.0.mlp.gate.weight"},
    ]
    with edited(approx, edits) as directory:
        yield directory


def test_a_bad_checkpoint_is_refused_with_every_error(broken: Path) -> None:
    with pytest.raises(Rejected) as refused:
        integration.load(broken)
    assert refused.value.problems == validate.check(broken).errors
    assert set(refused.value.codes) == {Code.MISSING_CONSTANT, Code.MISSING_TENSOR}


def test_a_family_outside_the_table_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(Rejected) as refused:
        integration.load(tmp_path)
    assert refused.value.codes == (Code.UNKNOWN_FAMILY,)


def test_leftover_experts_are_never_read(approx: Path, tmp_path: Path) -> None:
    """A substituted expert that is still stored changes nothing, NaN or not (LOAD-2)."""
    tensors = load_file(approx / "model.safetensors")
    path = "model.layers.0.mlp.experts"
    for part in ("gate_proj", "up_proj", "down_proj"):
        like = tensors[f"{path}.0.{part}.weight"]
        tensors[f"{path}.1.{part}.weight"] = torch.full_like(like, torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((approx / "config.json").read_bytes())
    ids = [1, 2, 3, 4, 5, 6]
    assert torch.equal(score(integration.load(tmp_path), ids), score(integration.load(approx), ids))


def test_a_config_that_transformers_reads_otherwise_is_refused(approx: Path) -> None:
    """Top-k under a text config is read by the checker and not by transformers."""
    edits: list[dict[str, Any]] = [
        {"remove_config": ["num_experts_per_tok"]},
        {"set_config": {"path": ["text_config"], "value": {"num_experts_per_tok": 2}}},
    ]
    with edited(approx, edits) as directory, pytest.raises(Rejected) as refused:
        integration.load(directory)
    assert refused.value.codes == (Code.MODEL_FIELD_CONFLICT,)
    assert refused.value.phase is Phase.INIT


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "no_such", torch.int64])
def test_a_dtype_that_holds_no_parameters(approx: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be auto or one of"):
        integration.load(approx, dtype)


def test_an_unknown_experts_function(approx: Path) -> None:
    with pytest.raises(ValueError, match="eager, batched_mm, grouped_mm"):
        integration.load(approx, experts_implementation="fast")


def test_arguments_that_would_change_what_is_loaded(approx: Path) -> None:
    with pytest.raises(TypeError, match="quantization_config"):
        integration.load(approx, quantization_config={"quant_method": "fp8"})  # type: ignore[call-arg]


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, approx: Path) -> None:
    monkeypatch.setattr(integration, "version", lambda name: "5.15.2")
    with pytest.raises(ImportError, match=r"5\.16 or newer, found 5\.15\.2"):
        integration.load(approx)


# -- updates


def test_an_update_is_all_or_nothing(approx: Path) -> None:
    model = integration.load(approx, "float32")
    before = score(model, [1, 2, 3, 4, 5, 6, 7, 8])
    good = torch.ones(96)
    with pytest.raises(Rejected) as refused:
        integration.update(
            model,
            {
                "model.layers.0.mlp.experts.1.approx_value": good,
                "model.layers.0.mlp.experts.5.approx_value": torch.full((96,), torch.nan),
                "model.layers.0.mlp.experts.0.approx_value": good,  # retained
            },
        )
    assert set(refused.value.codes) == {Code.NON_FINITE_CONSTANT, Code.UPDATE_TARGET}
    assert torch.equal(score(model, [1, 2, 3, 4, 5, 6, 7, 8]), before)
