"""Loading into compact rows, and what may change afterwards."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mone_ref
from mone_ref import loading
from mone_ref.errors import Code, Phase, Rejected

PROMPT = [5, 17, 3, 99, 64, 2]


@pytest.fixture
def copy(approx, tmp_path):
    shutil.copytree(approx, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def name(layer, expert, leaf):
    return f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"


def test_every_retained_expert_stands_in_its_ascending_row_and_no_other_is_allocated(fixtures):
    checkpoint = fixtures / "olmoe-twelve" / "checkpoint"
    declared = json.loads((checkpoint / "config.json").read_text())["approximate_experts"]
    stored = load_file(checkpoint / "model.safetensors")
    model = mone_ref.load(checkpoint)
    for index, layer in enumerate(model.weights.layers):
        retained = [j for j in range(12) if j not in declared[str(index)]]
        assert layer.mlp.experts.rows == len(retained)
        for row, expert in enumerate(retained):
            for leaf in ("gate", "up", "down"):
                tensor = stored[name(index, expert, f"{leaf}_proj.weight")].float()
                assert torch.equal(getattr(layer.mlp.experts, leaf)[row], tensor)
        for row, expert in enumerate(sorted(declared[str(index)])):
            tensor = stored[name(index, expert, "approx_value")].float()
            assert torch.equal(layer.mlp.constants[row], tensor)
    assert model.expert_rows() == {0: 6, 1: 7}


def test_nothing_is_read_from_a_checkpoint_with_a_problem(copy, monkeypatch):
    edit_tensors(copy, lambda tensors: tensors.pop(name(1, 2, "approx_value")))
    monkeypatch.setattr(loading.Tensors, "read", lambda self, tensor: pytest.fail(tensor))
    with pytest.raises(Rejected) as refusal:
        mone_ref.load(copy)
    assert refusal.value.codes == (Code.MISSING_CONSTANT,)
    assert refusal.value.phase == Phase.LOAD


def test_a_refusal_reaches_another_process_with_its_problems(tmp_path):
    with pytest.raises(Rejected) as refusal:
        mone_ref.load(tmp_path)
    carried = pickle.loads(pickle.dumps(refusal.value))
    assert carried.problems == refusal.value.problems
    assert str(carried) == str(refusal.value)


def test_a_constant_that_overflows_in_the_parameters_dtype_is_refused_there_only(copy):
    def make_large(tensors):
        large = tensors[name(0, 1, "approx_value")].clone()
        large[3] = 1e5
        tensors[name(0, 1, "approx_value")] = large

    edit_tensors(copy, make_large)
    mone_ref.load(copy, torch.bfloat16)
    with pytest.raises(Rejected) as refusal:
        mone_ref.load(copy, torch.float16)
    assert refusal.value.codes == (Code.CONSTANT_OVERFLOW,)


def test_loading_twice_answers_bit_for_bit(approx):
    first, second = (mone_ref.load(approx, torch.bfloat16).score([PROMPT])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_an_update_changes_its_constant_and_no_other_tensor(approx):
    model = mone_ref.load(approx)
    before = [layer.mlp.constants.clone() for layer in model.weights.layers]
    answers = model.score([PROMPT])[0]
    model.update({name(1, 2, "approx_value"): torch.full((96,), 3.0)})
    after = [layer.mlp.constants for layer in model.weights.layers]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1][[0, 2]], before[1][[0, 2]])  # rows of experts 0 and 7
    assert after[1][1].tolist() == [3.0] * 96
    assert not torch.equal(model.score([PROMPT])[0], answers)


def test_a_shared_constant_is_loaded_and_updated_in_every_place(fixtures):
    model = mone_ref.load(fixtures / "olmoe-explicit-shared" / "checkpoint")
    first, second = (layer.mlp.constants for layer in model.weights.layers)
    assert torch.equal(first[0], second[1])  # experts 1 of layer 0 and 2 of layer 1
    assert torch.equal(second[0], second[2])  # experts 0 and 7 of layer 1
    alone = first[1].clone()
    model.update({"novices.0.1": torch.full((96,), 3.0)})
    assert first[0].tolist() == second[1].tolist() == [3.0] * 96
    assert torch.equal(first[1], alone)
    assert torch.equal(second[0], second[2])
    assert second[0].tolist() != [3.0] * 96


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({name(1, 3, "approx_value"): torch.zeros(96)}, Code.UPDATE_TARGET),
        ({name(1, 2, "gate_proj.weight"): torch.zeros(40, 96)}, Code.UPDATE_TARGET),
        ({name(1, 2, "approx_value"): torch.zeros(1, 96)}, Code.CONSTANT_SHAPE),
        ({name(1, 2, "approx_value"): torch.zeros(95)}, Code.CONSTANT_SHAPE),
        ({name(1, 2, "approx_value"): torch.zeros(96, dtype=torch.int64)}, Code.CONSTANT_DTYPE),
        ({name(1, 2, "approx_value"): torch.full((96,), torch.nan)}, Code.NON_FINITE_CONSTANT),
        (
            {name(1, 2, "approx_value"): torch.full((96,), 1e39, dtype=torch.float64)},
            Code.NON_FINITE_CONSTANT,
        ),
    ],
    ids=["retained", "projection", "two-axes", "short", "integers", "nan", "overflow"],
)
def test_an_update_with_one_bad_tensor_changes_nothing(approx, bad, code):
    model = mone_ref.load(approx)
    answers = model.score([PROMPT])[0]
    good = {name(0, 1, "approx_value"): torch.ones(96)}
    with pytest.raises(Rejected) as refusal:
        model.update(good | bad)
    assert refusal.value.codes == (code,)
    assert refusal.value.phase == Phase.UPDATE
    assert torch.equal(model.score([PROMPT])[0], answers)


def test_a_reload_is_refused_and_the_old_weights_answer_identically(approx):
    model = mone_ref.load(approx)
    answers = model.score([PROMPT])[0]
    with pytest.raises(Rejected) as refusal:
        model.reload(approx)
    assert refusal.value.codes == (Code.UNSUPPORTED_RELOAD,)
    assert torch.equal(model.score([PROMPT])[0], answers)


def test_only_float_dtypes_load(approx):
    with pytest.raises(ValueError, match="dtype"):
        mone_ref.load(approx, torch.int8)


def test_leftover_projections_of_a_substituted_expert_change_nothing(copy, approx):
    def add_leftovers(tensors):
        for leaf in ("gate", "up", "down"):
            loud = tensors[name(0, 0, f"{leaf}_proj.weight")] * 8
            tensors[name(0, 1, f"{leaf}_proj.weight")] = loud

    edit_tensors(copy, add_leftovers)
    clean, same = (mone_ref.load(path).score([PROMPT])[0] for path in (approx, copy))
    assert torch.equal(clean, same)


def test_importing_the_package_loads_no_framework():
    import subprocess
    import sys

    code = "import sys, mone_ref, mone_ref.backend; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
