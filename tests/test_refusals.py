"""What the oracle does not compute is refused by name, before a single weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import handmade
import pytest
from handmade import Tensors, bf16, safetensors, write

import mone_ref
from mone_ref import families, loading
from mone_ref.errors import Code, Rejected

LAYERS = (0, 1)
FP8 = {"quant_method": "fp8"}
COMPRESSED = {"quant_method": "compressed-tensors"}
MXFP4 = {"quant_method": "mxfp4"}
GPTQ = {"quant_method": "gptq"}
SCALE = ("F32", [1], b"\0\0\x80\x3f")


def experts_path(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def with_each_projection(
    stored: Tensors, replace: Callable[[str, list[int]], dict[str, tuple[str, list[int], bytes]]]
) -> Tensors:
    """Every projection that is stored, in another form under names of its own."""
    made: Tensors = {}
    for name, (dtype, shape, data) in stored.items():
        inside = ".experts." in name and name.endswith(".weight")
        made |= replace(name, shape) if inside else {name: (dtype, shape, data)}
    return wide_first(made)


def wide_first(stored: Tensors) -> Tensors:
    """Every tensor aligned: four bytes before two before one."""
    order = {"F32": 0, "I32": 0, "BF16": 1}
    return dict(sorted(stored.items(), key=lambda item: order.get(item[1][0], 2)))


def fp8(stored: Tensors) -> Tensors:
    """Codes of eight bits, and one scale for each matrix."""
    return with_each_projection(
        stored,
        lambda name, shape: {
            name: ("F8_E4M3", shape, b"\x38" * 12),
            f"{name}_scale_inv": SCALE,
        },
    )


def packed(stored: Tensors) -> Tensors:
    """Eight codes of four bits in each word, as compressed-tensors stores them."""
    return with_each_projection(
        stored,
        lambda name, shape: {
            f"{name}_packed": ("I32", [shape[0], 1], b"\0" * 4 * shape[0]),
            f"{name}_scale": bf16([shape[0], 1]),
        },
    )


def gptq(stored: Tensors) -> Tensors:
    """Packed words under names without ``weight``."""
    return with_each_projection(
        stored,
        lambda name, shape: {
            name.replace("weight", "qweight"): ("I32", [1, shape[0]], b"\0" * 4 * shape[0]),
            name.replace("weight", "scales"): bf16([1, shape[0]]),
        },
    )


def fused(stored: Tensors) -> Tensors:
    """All experts of a layer in two tensors, a row for each logical expert."""
    made = {name: tensor for name, tensor in stored.items() if not is_projection(name)}
    for layer in LAYERS:
        made[f"{experts_path(layer)}.gate_up_proj"] = bf16([4, 6, 4])
        made[f"{experts_path(layer)}.down_proj"] = bf16([4, 4, 3])
    return made


def mxfp4(stored: Tensors) -> Tensors:
    """Fused blocks of four-bit codes, with a scale of eight bits for each block."""
    made = {name: tensor for name, tensor in stored.items() if not is_projection(name)}
    for layer in LAYERS:
        for part, size in (("gate_up_proj", 6), ("down_proj", 4)):
            blocks = f"{experts_path(layer)}.{part}"
            made[f"{blocks}_blocks"] = ("U8", [4, size, 1, 16], b"\0" * 64 * size)
            made[f"{blocks}_scales"] = ("U8", [4, size, 1], b"\x7f" * 4 * size)
    return wide_first(made)


def is_projection(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def unlisted(config: dict[str, Any], stored: Tensors) -> None:
    """The same model with nothing substituted."""
    del config["approximate_experts"]
    for expert in (1, 3):
        del stored[f"{experts_path(0)}.{expert}.approx_value"]
        for part, shape in handmade.EXPERT.items():
            stored[f"{experts_path(0)}.{expert}.{part}.weight"] = bf16(shape)


def explicit(config: dict[str, Any], stored: Tensors) -> None:
    """The same substitution in the explicit form."""
    del config["approximate_experts"]
    names = {expert: f"{experts_path(0)}.{expert}.approx_value" for expert in (1, 3)}
    config["compression_config"] = handmade.explicit(names)


def approx(config: dict[str, Any], stored: Tensors) -> None:
    """As it is."""


FORMS = (approx, explicit, unlisted)


def refusal(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Rejected:
    """Why a load is refused; a weight that is read is a failure."""
    monkeypatch.setattr(loading.Tensors, "read", lambda self, name, dtype=None: pytest.fail(name))
    with pytest.raises(Rejected) as caught:
        mone_ref.load(directory)
    return caught.value


def checkpoint(
    directory: Path,
    form: Callable[[dict[str, Any], Tensors], None],
    store: Callable[[Tensors], Tensors] = dict,
    **changes: Any,
) -> Path:
    config, stored = handmade.config(), handmade.tensors()
    form(config, stored)
    config |= changes
    return write(
        directory, {"config.json": config, "model.safetensors": safetensors(store(stored))}
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_checkpoint_of_all_cases_loads(
    form: Callable[[dict[str, Any], Tensors], None], tmp_path: Path
) -> None:
    model = mone_ref.load(checkpoint(tmp_path, form))
    assert model.expert_rows() == {0: 4 if form is unlisted else 2, 1: 4}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("store", "declared"),
    [(fp8, FP8), (packed, COMPRESSED), (gptq, GPTQ), (mxfp4, MXFP4)],
)
def test_declared_quantisation_is_refused_by_its_name(
    store: Callable[[Tensors], Tensors],
    declared: dict[str, str],
    form: Callable[[dict[str, Any], Tensors], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(tmp_path, form, store, quantization_config=declared)
    problems = refusal(directory, monkeypatch).problems
    (named,) = (p for p in problems if p.where == "$.quantization_config")
    assert named.code is Code.MODEL_FEATURE
    assert declared["quant_method"] in named.found
    compressed = form is explicit and declared is COMPRESSED
    assert named.clause == ("FMT-12" if compressed else "CAP-8")


UP, GATE_UP = "up_proj", f"{experts_path(0)}.gate_up_proj"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("store", "code", "where"),
    [
        (fp8, Code.TENSOR_DTYPE, f"{experts_path(0)}.0.up_proj.weight"),
        (packed, Code.MISSING_EXPERT, ""),
        (gptq, Code.MISSING_EXPERT, ""),
        (mxfp4, Code.FUSED_EXPERTS, f"{GATE_UP}_blocks"),
        (fused, Code.FUSED_EXPERTS, GATE_UP),
    ],
)
def test_what_no_config_declares_is_refused_by_its_tensors(
    store: Callable[[Tensors], Tensors],
    code: Code,
    where: str,
    form: Callable[[dict[str, Any], Tensors], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes are never taken for weights: their type, their names or their layout tell."""
    problems = refusal(checkpoint(tmp_path, form, store), monkeypatch).problems
    found = [p for p in problems if p.code is code]
    assert found
    assert not where or where in [p.where for p in found]


def test_quantised_experts_beside_whole_ones_are_refused_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix is enough; the message names it and its type."""
    name = f"{experts_path(1)}.2.down_proj.weight"

    def store(stored: Tensors) -> Tensors:
        return wide_first(
            stored | {name: ("F8_E4M3", [4, 3], b"\x38" * 12), f"{name}_scale_inv": SCALE}
        )

    problems = refusal(checkpoint(tmp_path, approx, store), monkeypatch).problems
    (problem,) = problems
    assert (problem.code, problem.where) == (Code.TENSOR_DTYPE, name)
    assert problem.found == "type 'F8_E4M3'"
    assert problem.expected == "one of F64, F32, F16, BF16"


@pytest.mark.parametrize("form", [approx, explicit])
def test_fused_experts_under_a_list_are_refused_with_what_is_expected(
    form: Callable[[dict[str, Any], Tensors], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One message a layer; the one of the substituted layer cites its clause."""
    problems = refusal(checkpoint(tmp_path, form, fused), monkeypatch).problems
    told = [(p.where, p.clause) for p in problems if p.code is Code.FUSED_EXPERTS]
    assert told == [(GATE_UP, "CAP-11"), (f"{experts_path(1)}.gate_up_proj", "")]
    first = problems[0]
    assert first.found == f"fused 2 tensors: {GATE_UP}, {experts_path(0)}.down_proj"
    assert first.expected == "one tensor per expert and projection: unfuse them under logical ids"


@pytest.mark.parametrize("shape", [[4, 6, 4], [4, 4, 6]], ids=["rows", "transposed"])
def test_fused_experts_are_never_guessed_at(
    shape: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D07: neither orientation is read, though one of the shapes would fit."""

    def store(stored: Tensors) -> Tensors:
        return fused(stored) | {GATE_UP: bf16(shape)}

    problems = refusal(checkpoint(tmp_path, unlisted, store), monkeypatch).problems
    assert {p.code for p in problems} == {Code.FUSED_EXPERTS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", families.REFUSED)
def test_an_architecture_without_this_substitution_is_refused_with_its_reason(
    architecture: str,
    form: Callable[[dict[str, Any], Tensors], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B16: with a list, in either form, and without one."""
    directory = checkpoint(tmp_path, form, architectures=[architecture], model_type="other")
    (problem, *_) = refusal(directory, monkeypatch).problems
    assert problem.code is Code.UNKNOWN_FAMILY
    assert problem.found == families.REFUSED[architecture]
