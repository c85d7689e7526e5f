"""Conversion: every operation and its reverse, layouts of experts, errors, memory."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
import weakref

import handmade
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import mone_ref
from mone_ref import config as config_file
from mone_ref.checkpoint import Checkpoint
from mone_ref.conversion import (
    Chunk,
    Concatenate,
    Deinterleave,
    Interleave,
    MergeModulelist,
    Request,
    SplitModulelist,
    Transpose,
    WeightConverter,
    convert,
    experts,
    grouped,
    plan,
    stream,
    streaming,
)
from mone_ref.conversion.experts import Fused
from mone_ref.errors import Code, Rejected

EXPERT = "layers.{layer}.experts.{expert}."
GATE, UP = f"{EXPERT}gate.weight", f"{EXPERT}up.weight"
FUSED = "layers.{layer}.experts.gate_up"
PACK = WeightConverter([GATE, UP], [FUSED], [MergeModulelist(0), Concatenate(1)])


def counted(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Every value once, so that a value tells its place."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.int32).to(dtype).reshape(shape)


def projections(count: int, inner: int = 3, hidden: int = 4) -> dict[str, torch.Tensor]:
    """Experts of layer 0, gate 100 * j + ..., up 50 more."""
    named = {}
    for j in range(count):
        named[f"layers.0.experts.{j}.gate.weight"] = counted(inner, hidden, start=100 * j)
        named[f"layers.0.experts.{j}.up.weight"] = counted(inner, hidden, start=100 * j + 50)
    return named


def convert_all(tensors, converters, **request):
    groups = plan.make(tensors, converters, Request(**request))
    return groups, convert(groups, tensors)


def refused(call, *args, **kwargs) -> list[tuple[Code, str]]:
    with pytest.raises(Rejected) as refusal:
        call(*args, **kwargs)
    return [(problem.code, problem.where) for problem in refusal.value.problems]


# -- operations


def in_torch(operation, parts: list[torch.Tensor]) -> torch.Tensor:
    """What an operation is, in torch's own words."""
    if isinstance(operation, MergeModulelist):
        return torch.stack(parts, operation.dim)
    if isinstance(operation, Interleave):
        return torch.stack(parts, operation.dim + 1).flatten(operation.dim, operation.dim + 1)
    return torch.cat(parts, operation.dim)


def joined(converter: WeightConverter, cells: list[list[torch.Tensor]]) -> torch.Tensor:
    """The whole of a converter, step by step in torch's own words."""
    for step in converter.joins:
        if isinstance(step, Transpose):
            cells = [[cell.transpose(step.first, step.second) for cell in row] for row in cells]
        elif step.across_patterns:
            cells = [[in_torch(step, list(column)) for column in zip(*cells, strict=True)]]
        else:
            cells = [[in_torch(step, row)] for row in cells]
    return cells[0][0]


def test_each_operation_on_values_written_out():
    a, b = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])
    assert in_torch(MergeModulelist(0), [a, b]).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert in_torch(MergeModulelist(1), [a, b]).tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert in_torch(Concatenate(0), [a, b]).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert in_torch(Concatenate(1), [a, b]).tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]
    assert in_torch(Interleave(0), [a, b]).tolist() == [[1, 2], [5, 6], [3, 4], [7, 8]]
    assert in_torch(Interleave(1), [a, b]).tolist() == [[1, 5, 2, 6], [3, 7, 4, 8]]


@pytest.mark.parametrize(
    ("join", "split"),
    [
        (MergeModulelist(1), SplitModulelist(1)),
        (Concatenate(1), Chunk(1)),
        (Concatenate(0, (2, 5)), Chunk(0, (2, 5))),
        (Interleave(2), Deinterleave(2)),
        (Transpose(0, 2), Transpose(0, 2)),
    ],
)
def test_the_reverse_of_an_operation_is_its_counterpart(join, split):
    assert join.reverse == split
    assert split.reverse == join


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_views_of_the_whole_are_the_parts_that_were_joined(shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = [counted(*shape, start=1000 * i) for i in range(count)]
    for join in (MergeModulelist(dim), Concatenate(dim), Interleave(dim)):
        whole = in_torch(join, parts)
        assert join.shape([tuple(part.shape) for part in parts]) == tuple(whole.shape)
        views = join.split(whole, count)
        assert all(torch.equal(view, part) for view, part in zip(views, parts, strict=True))
        assert all(view.data_ptr() - whole.data_ptr() < whole.nbytes for view in views)
    uneven = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    parts = [torch.rand([*shape[:dim], size, *shape[dim + 1 :]]) for size in uneven]
    join = Concatenate(dim, tuple(uneven))
    whole = in_torch(join, parts)
    assert join.shape([tuple(part.shape) for part in parts]) == tuple(whole.shape)
    views = join.split(whole, len(uneven))
    assert all(torch.equal(view, part) for view, part in zip(views, parts, strict=True))


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (MergeModulelist(0), [(2, 3), (3, 3)]),
        (MergeModulelist(3), [(2, 3), (2, 3)]),
        (Concatenate(0), [(2, 3), (2, 4)]),
        (Concatenate(0), [(2, 3), (4, 3)]),  # of equal size unless sizes are told
        (Concatenate(0, (2, 5)), [(2, 3), (4, 3)]),
        (Concatenate(2), [(2, 3), (2, 3)]),
        (Interleave(1), [(2, 3), (2, 4)]),
        (Interleave(2), [(2, 3), (2, 3)]),
    ],
)
def test_parts_that_do_not_fit_together(operation, shapes):
    with pytest.raises(ValueError, match="do not fit together"):
        operation.shape(shapes)


def test_a_transpose_needs_both_axes():
    assert Transpose(0, 2).shape((2, 3, 4)) == (4, 3, 2)
    with pytest.raises(ValueError, match="too few axes"):
        Transpose(0, 2).shape((2, 3))


def test_a_plan_does_not_import_the_compiler_of_torch():
    """Operations on meta tensors do, in Python of their own: more than a second of a load."""
    program = (
        "import sys, torch; from mone_ref.conversion import *;"
        "from mone_ref.conversion import plan;"
        "part = torch.empty(2, 3, device='meta');"
        "rule = WeightConverter(['{e}.a', '{e}.b'], ['all'], [MergeModulelist(), Concatenate(1)]);"
        "groups = plan.make({f'{i}.{n}': part for i in range(2) for n in 'ab'}, [rule], Request());"
        "groups[0].reverse; print(groups[0].shape, 'sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(2, 4, 3) False\n", "")


def test_an_axis_of_size_one_survives_a_split():
    whole = counted(2, 1, 3)
    assert [part.shape for part in MergeModulelist(0).split(whole, 2)] == [(1, 3), (1, 3)]


STEPS = st.lists(
    st.sampled_from(["transpose", "concatenate", "interleave", "merge"]), unique=True, max_size=3
)
DTYPES = st.sampled_from(
    [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]
)


@settings(max_examples=60)
@given(steps=STEPS, sizes=st.tuples(*[st.integers(1, 4)] * 3), dtype=DTYPES)
def test_a_pipeline_there_and_back_gives_the_same_bytes_names_and_dtypes(steps, sizes, dtype):
    experts_, inner, hidden = sizes
    operations = {
        "transpose": Transpose(0, 1),
        "concatenate": Concatenate(0),
        "interleave": Interleave(1),
        "merge": MergeModulelist(0),
    }
    if {"concatenate", "interleave"} <= set(steps):
        steps.remove("interleave")
    paired, merged = bool({"concatenate", "interleave"} & set(steps)), "merge" in steps
    sources = [GATE, UP] if paired else [GATE]
    target = FUSED if merged else f"{EXPERT}out"
    converter = WeightConverter(sources, [target], [operations[step] for step in steps])
    stored = {
        name: counted(inner, hidden, dtype=torch.uint8, start=17 * j).view(-1).to(dtype)
        for j, name in enumerate(
            pattern.fill({"layer": layer, "expert": expert})
            for pattern in converter.sources
            for layer in (0, 11)
            for expert in range(experts_)
        )
    }
    stored = {name: tensor.reshape(inner, hidden) for name, tensor in stored.items()}
    groups, made = convert_all(stored, [converter])
    assert len(made) == 2 * (1 if merged else experts_)
    for group in groups:  # by the joins in torch's own words
        cells = [[stored[name] for name in row] for row in group.sources]
        (name,) = {name for row in group.targets for name in row}
        assert torch.equal(bytes_of(made[name]), bytes_of(joined(converter, cells)))
    for reverse in (
        [group.reverse for group in groups],
        plan.make(made, [converter.reverse], Request()),
    ):
        back = convert(reverse, made)
        assert back.keys() == stored.keys()
        for name, tensor in stored.items():
            assert back[name].dtype == dtype
            assert torch.equal(bytes_of(back[name]), bytes_of(tensor))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize(
    ("sources", "targets", "steps", "message"),
    [
        ([GATE], [FUSED], [], "an index needs one"),
        ([GATE, UP], [FUSED], [MergeModulelist()], "one operation between them"),
        ([GATE], [FUSED], [MergeModulelist(), Concatenate()], "one operation between them"),
        ([FUSED], [GATE, UP], [Chunk(1), MergeModulelist()], "joins after it has split"),
        ([GATE, GATE], [FUSED], [MergeModulelist(), Concatenate()], "differ"),
        ([GATE, "{layer}.up"], [FUSED], [MergeModulelist(), Concatenate()], "share their fields"),
        (["{a}.x"], ["{b}.y"], [MergeModulelist(), SplitModulelist()], "on both sides"),
    ],
)
def test_a_converter_whose_patterns_and_operations_do_not_fit_is_an_error(
    sources, targets, steps, message
):
    with pytest.raises(ValueError, match=message):
        WeightConverter(sources, targets, steps)


def test_operations_and_patterns_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match="counts from 0"):
        Interleave(-1)
    with pytest.raises(ValueError, match="twice"):
        WeightConverter(["{layer}.{layer}"], ["{layer}"])
    overlap = WeightConverter([FUSED], ["layers.{layer}.other"])
    with pytest.raises(ValueError, match="several converters"):
        plan.make({"layers.0.experts.gate_up": torch.ones(1)}, [overlap, overlap], Request())


# -- grouping


def test_experts_are_stacked_by_their_number_and_projections_in_the_order_of_the_patterns():
    _, made = convert_all(dict(reversed(projections(12).items())), [PACK])
    assert made.keys() == {"layers.0.experts.gate_up"}
    firsts = made["layers.0.experts.gate_up"][:, [0, 3], 0]  # [12, 2]
    assert firsts.tolist() == [[100 * j, 100 * j + 50] for j in range(12)]


def test_names_are_matched_whole_and_others_pass():
    others = {
        "layers.0.shared_experts.0.gate.weight": counted(3, 4),
        "x.layers.0.experts.0.gate.weight": counted(3, 4),
        "layers.0.experts.00.gate.weight": counted(3, 4),
        "a{layer}": counted(2),
    }
    _, made = convert_all({**projections(2), **others}, [PACK])
    assert made.keys() == {*others, "layers.0.experts.gate_up"}
    assert all(torch.equal(made[name], tensor) for name, tensor in others.items())


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_gap_in_dense_experts_is_an_error_that_names_the_first_absent_tensor(gone):
    tensors = projections(5)
    for leaf in ("gate", "up"):
        del tensors[f"layers.0.experts.{gone}.{leaf}.weight"]
    absent = [f"layers.0.experts.{gone}.{leaf}.weight" for leaf in ("gate", "up")]
    found = refused(convert_all, tensors, [PACK])
    assert found == [(Code.MISSING_EXPERT, name) for name in absent]


def test_a_huge_expert_number_is_a_gap_and_costs_nothing():
    tensors = projections(1)
    tensors["layers.0.experts.999999999.gate.weight"] = counted(3, 4)
    absent = [f"layers.0.experts.{name}.weight" for name in ("1.gate", "1.up")]
    found = refused(convert_all, tensors, [PACK])
    assert found == [(Code.MISSING_EXPERT, name) for name in absent]


def test_one_absent_part_is_one_error():
    tensors = projections(3)
    del tensors["layers.0.experts.1.up.weight"]
    found = refused(convert_all, tensors, [PACK])
    assert found == [(Code.MISSING_EXPERT, "layers.0.experts.1.up.weight")]
    joined = WeightConverter(["{layer}.q", "{layer}.k"], ["{layer}.qk"], [Concatenate()])
    assert refused(convert_all, {"0.q": counted(2)}, [joined]) == [(Code.MISSING_TENSOR, "0.k")]


def listed(*substituted: int, count: int):
    entry = config_file.LayerSubstitution(0, count, substituted, dict.fromkeys(substituted, "c"))
    return lambda layer: entry


def test_with_a_list_rows_are_the_retained_experts_and_leftovers_are_skipped():
    tensors = projections(6)
    for leaf in ("gate", "up"):
        del tensors[f"layers.0.experts.1.{leaf}.weight"]  # expert 4 is left over (LOAD-2)
    groups, made = convert_all(tensors, [PACK], substitution=listed(4, 1, count=6))
    assert made["layers.0.experts.gate_up"][:, 0, 0].tolist() == [0, 200, 300, 500]
    back = convert([group.reverse for group in groups], made)
    assert back.keys() == {name for name in tensors if ".4." not in name}
    again = plan.make(made, [PACK.reverse], Request(substitution=listed(4, 1, count=6)))
    assert convert(again, made).keys() == back.keys()


def test_with_a_list_an_absent_retained_expert_and_a_foreign_one_are_errors():
    found = refused(convert_all, projections(3), [PACK], substitution=listed(1, count=4))
    absent = [f"layers.0.experts.3.{leaf}.weight" for leaf in ("gate", "up")]
    assert found == [(Code.MISSING_EXPERT, name) for name in absent]
    found = refused(convert_all, projections(3), [PACK], substitution=listed(1, count=2))
    foreign = [f"layers.0.experts.2.{leaf}.weight" for leaf in ("gate", "up")]
    assert found == [(Code.UNKNOWN_TENSOR, name) for name in foreign]


def test_a_stack_of_another_number_of_experts_is_an_error():
    stack = {"layers.0.experts.gate_up": counted(3, 6, 4)}
    request = {"substitution": listed(1, count=3)}
    name = "layers.0.experts.gate_up"
    assert refused(convert_all, stack, [PACK.reverse], **request) == [(Code.TENSOR_SHAPE, name)]


def test_two_sources_of_one_result_are_an_error():
    tensors = {**projections(2), "layers.0.experts.gate_up": counted(2, 6, 4)}
    name = "layers.0.experts.gate_up"
    assert refused(convert_all, tensors, [PACK]) == [(Code.TWO_SOURCES, name)]


def test_parts_of_another_shape_or_dtype_are_errors_of_that_part():
    tensors, odd = projections(4), "layers.0.experts.0.up.weight"
    bad = {**tensors, odd: counted(3, 5)}
    assert refused(convert_all, bad, [PACK]) == [(Code.TENSOR_SHAPE, odd)]
    bad = {**tensors, odd: tensors[odd].half()}
    assert refused(convert_all, bad, [PACK]) == [(Code.TENSOR_DTYPE, odd)]
    wider = {n: counted(3, 5) if ".up." in n else t for n, t in tensors.items()}
    first = "layers.0.experts.0.gate.weight"
    assert refused(convert_all, wider, [PACK]) == [(Code.TENSOR_SHAPE, first)]
    flat = {n: counted(3) for n in tensors}
    assert refused(convert_all, flat, [WeightConverter([GATE], [f"{EXPERT}t"], [Transpose(0, 1)])])
    odd_rows = {"layers.0.experts.gate_up": counted(2, 5, 4)}
    (name,) = odd_rows
    assert refused(convert_all, odd_rows, [PACK.reverse]) == [(Code.TENSOR_SHAPE, name)]


def test_packed_values_are_never_cast():
    found = refused(convert_all, {"a": counted(2, dtype=torch.uint8)}, [], dtype=torch.float32)
    assert found == [(Code.TENSOR_DTYPE, "a")]


def test_results_are_held_to_what_is_expected():
    tensors = {"a": counted(2), "b": counted(3)}
    assert refused(convert_all, tensors, [], expected={"a": (2,)}) == [(Code.UNKNOWN_TENSOR, "b")]
    assert refused(convert_all, tensors, [], expected={"a": (2,), "b": (2,)}) == [
        (Code.TENSOR_SHAPE, "b")
    ]
    everything = {"a": (2,), "b": (3,), "c": (1,)}
    assert refused(convert_all, tensors, [], expected=everything) == [(Code.MISSING_TENSOR, "c")]


# -- layouts of experts


def small_config(substituted=()):
    written = handmade.config()
    written["approximate_experts"] = {"0": list(substituted)} if substituted else {}
    return written


def checkpoint_of(directory, tensors, config=None, shards=1):
    """Two-layer OLMoE experts, hidden size 4, intermediate size 3, four experts."""
    directory.mkdir()
    names = list(tensors)
    for shard in range(shards):
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config or small_config()))
    opened = Checkpoint.open(directory)
    assert not opened.errors
    return config_file.read(directory), opened


PATH = "model.layers.{}.mlp.experts"
LAYOUTS = [Fused(transposed, interleaved) for transposed in (0, 1) for interleaved in (0, 1)]


def stacks(dtype=torch.bfloat16):
    """gate [4, 3, 4], up [4, 3, 4], down [4, 4, 3], each value once (exact in bfloat16)."""
    return (
        counted(4, 3, 4, dtype=dtype),
        counted(4, 3, 4, dtype=dtype, start=64),
        counted(4, 4, 3, dtype=dtype, start=128),
    )


def one_by_one(layer, kept=range(4)):
    named = {}
    for leaf, stack in zip(("gate", "up", "down"), stacks(), strict=True):
        named |= {f"{PATH.format(layer)}.{j}.{leaf}_proj.weight": stack[j] for j in kept}
    return named


def fused(layer, layout):
    gate, up, down = stacks()
    if layout.interleaved:
        rows = torch.stack([gate, up], dim=2).reshape(4, 6, 4)  # [E, 2I, H]
    else:
        rows = torch.cat([gate, up], dim=1)  # [E, 2I, H]
    if layout.transposed:
        rows, down = rows.mT, down.mT
    path = PATH.format(layer)
    return {f"{path}.gate_up_proj": rows, f"{path}.down_proj": down}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_layout_gives_the_same_rows_and_goes_back_to_the_same_bytes(tmp_path, layout, dtype):
    tensors = {**fused(0, layout), **one_by_one(1)}
    config, checkpoint = checkpoint_of(tmp_path / "c", tensors)  # D06: a layout per layer
    groups = experts.compact(config, checkpoint, layout, dtype)
    rows = dict(stream(checkpoint, groups))
    for layer in (0, 1):
        for leaf, stack in zip(("gate", "up", "down"), stacks(dtype), strict=True):
            assert torch.equal(rows[f"{PATH.format(layer)}.{leaf}"], stack)
            assert rows[f"{PATH.format(layer)}.{leaf}"].dtype == dtype
    back = convert([group.reverse for group in groups], rows)
    saved = {name: tensor.contiguous() for name, tensor in back.items()}
    save_file(saved, tmp_path / "back.safetensors", metadata={"format": "pt"})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == file.read_bytes()


@settings(max_examples=30)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_layouts_of_any_shape_and_dtype_go_there_and_back(sizes, layout, dtype):
    count, inner, hidden = sizes
    family = config_file.parse(json.dumps(small_config()).encode()).model.family
    wide, tall = (count, inner, hidden), (count, hidden, inner)
    rows = {
        f"{PATH.format(0)}.{leaf}": torch.randn(shape).to(dtype)
        for leaf, shape in zip(("gate", "up", "down"), (wide, wide, tall), strict=True)
    }
    forms = []
    for converters in (experts.per_expert(family), experts.fused(family, layout)):
        back = [converter.reverse for converter in converters]
        stored = convert_all(rows, back)[1]
        again = convert_all(stored, converters)[1]
        assert again.keys() == rows.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in rows.items())
        forms.append(stored)
    assert forms[0].keys().isdisjoint(forms[1].keys())


@settings(max_examples=30)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([None, torch.float64]),
    piece=st.integers(1, 40),
)
def test_pieces_of_any_size_arrive_in_their_places(tmp_path_factory, sizes, layout, dtype, piece):
    count, inner, hidden = sizes
    family = config_file.parse(json.dumps(small_config()).encode()).model.family
    stored = {
        f"{PATH.format(0)}.gate_up_proj": counted(count, 2 * inner, hidden),
        f"{PATH.format(0)}.down_proj": counted(count, hidden, inner),
    }
    if layout.transposed:
        stored = {name: tensor.mT for name, tensor in stored.items()}
    directory = tmp_path_factory.mktemp("pieces")
    _, checkpoint = checkpoint_of(directory / "c", stored)
    groups = grouped(checkpoint, experts.fused(family, layout), Request(dtype=dtype))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streaming, "PIECE", piece)
        read = dict(stream(checkpoint, groups))
    shutil.rmtree(directory)
    made = convert(groups, stored)
    assert made.keys() == read.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in made.items())


def test_d07_the_other_orientation_is_refused_by_its_shape(tmp_path):
    layout, other = Fused(transposed=True), Fused()
    config, checkpoint = checkpoint_of(tmp_path / "c", {**fused(0, layout), **fused(1, layout)})
    found = refused(experts.compact, config, checkpoint, other)
    names = [
        f"{PATH.format(layer)}.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    ]
    assert sorted(found) == sorted((Code.TENSOR_SHAPE, name) for name in names)


def test_d06_a_layer_in_both_layouts_is_refused(tmp_path):
    tensors = {**fused(0, Fused()), **one_by_one(0), **one_by_one(1)}
    config, checkpoint = checkpoint_of(tmp_path / "c", tensors)
    assert {code for code, _ in refused(experts.compact, config, checkpoint, Fused())} == {
        Code.TWO_SOURCES
    }


def test_a17_fused_experts_of_a_substituted_layer_are_refused(tmp_path):
    tensors = {**fused(0, Fused()), **one_by_one(1)}
    config, checkpoint = checkpoint_of(tmp_path / "c", tensors, small_config([1, 3]))
    found = refused(experts.compact, config, checkpoint, Fused())
    assert found[0][0] == Code.FUSED_EXPERTS
    assert found[0][1].startswith(PATH.format(0))


def test_a17_unfused_under_logical_ids_the_retained_slices_are_written_and_no_others(tmp_path):
    family = config_file.parse(json.dumps(small_config()).encode()).model.family
    stored = fused(0, Fused())
    rows = convert_all(stored, experts.fused(family, Fused()))[1]
    kept = {name: stack[[0, 2]] for name, stack in rows.items()}
    back = [converter.reverse for converter in experts.per_expert(family)]
    written = convert_all(kept, back, substitution=listed(1, 3, count=4))[1]
    expected = one_by_one(0, kept=(0, 2))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_an_absent_last_expert_and_absent_experts_are_noticed(tmp_path):
    tensors = {**one_by_one(0, kept=range(3)), **one_by_one(1)}
    config, checkpoint = checkpoint_of(tmp_path / "c", tensors)
    found = refused(experts.compact, config, checkpoint, Fused())
    assert sorted(found) == sorted(
        (Code.MISSING_EXPERT, f"{PATH.format(0)}.3.{leaf}_proj.weight")
        for leaf in ("gate", "up", "down")
    )
    config, checkpoint = checkpoint_of(tmp_path / "d", one_by_one(1))
    found = refused(experts.compact, config, checkpoint, Fused())
    assert sorted(found) == sorted(
        (Code.MISSING_TENSOR, f"{PATH.format(0)}.{leaf}") for leaf in ("gate", "up", "down")
    )


@pytest.mark.parametrize(
    "fixture",
    ["olmoe-twelve", "mixtral-approx", "deepseek3-approx", "olmoe-sharded", "qwen3-approx-plain"],
)
def test_compact_rows_are_those_that_the_oracle_reads(fixtures, fixture):
    directory = fixtures / fixture / "checkpoint"
    config, checkpoint = config_file.read(directory), Checkpoint.open(directory)
    rows = dict(stream(checkpoint, experts.compact(config, checkpoint, Fused(), torch.float32)))
    oracle = mone_ref.load(directory).weights.moe_layers
    for layer, weights in oracle.items():
        for leaf in experts.STACKS:
            read = rows.pop(f"{config.model.family.experts_path(layer)}.{leaf}")
            assert torch.equal(read, getattr(weights.experts, leaf))
    assert not rows


# -- memory, order, errors of reading


@pytest.fixture
def large(tmp_path):
    """Six layers of four experts in two shards: 6 groups of 4 * 6 * 4 * 4 = 384 bytes."""
    tensors = {}
    for layer in range(6):
        for name, tensor in projections(4).items():
            tensors[name.replace("layers.0", f"layers.{layer}")] = tensor + layer
    return checkpoint_of(tmp_path / "large", tensors, shards=2)[1]


@pytest.mark.parametrize("limit", [0, 384, 800, 10_000])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_bytes_in_flight_stay_within_the_bound(large, limit, dtype, monkeypatch):
    monkeypatch.setattr(streaming, "PIECE", 16)  # rows of 4 float32 values
    groups = grouped(large, [PACK], Request(dtype=dtype))
    size = groups[0].nbytes
    flight = streaming.InFlight()
    results = stream(large, groups, limit=limit, threads=3, flight=flight)
    for number, _ in enumerate(results):
        assert flight.bytes <= max(limit, size) + 3 * 16
        assert number < 6
    assert flight.peak <= max(limit, size) + 3 * 16
    assert flight.peak >= min(limit // size, 6) * size
    assert flight.bytes == 0


def test_a_slow_taker_stops_the_reading(large, monkeypatch):
    begun = []
    read = streaming._read
    monkeypatch.setattr(streaming, "_read", lambda *args: begun.append(args[1]) or read(*args))
    results = stream(large, grouped(large, [PACK]), limit=384, threads=2)
    next(results)
    assert {name.split(".")[1] for name in begun} <= {"0", "1"}
    results.close()


def test_results_that_were_handed_out_are_not_held(large):
    results = stream(large, grouped(large, [PACK]), limit=384)
    _, tensor = next(results)
    handed = weakref.ref(tensor.untyped_storage())
    del tensor
    next(results)
    gc.collect()
    assert handed() is None


def test_parts_pass_through_no_buffer_where_they_can_be_read_into_place(large, monkeypatch):
    flight = streaming.InFlight()
    dict(stream(large, grouped(large, [PACK]), limit=0, flight=flight))
    assert flight.peak == 384
    flight, buffers = streaming.InFlight(), []
    add = streaming.InFlight.add
    monkeypatch.setattr(
        streaming.InFlight, "add", lambda self, size: buffers.append(size) or add(self, size)
    )
    wide = grouped(large, [PACK], Request(dtype=torch.float64))
    dict(stream(large, wide, limit=0, flight=flight))
    assert buffers.count(48) == buffers.count(-48) == 6 * 8  # [3, 4] in float32, each freed


@settings(max_examples=20)
@given(order=st.permutations(range(8)), shards=st.integers(1, 3))
def test_the_order_of_keys_and_shards_does_not_matter(tmp_path_factory, order, shards):
    tensors = list(projections(4).items())
    directory = tmp_path_factory.mktemp("order") / "c"
    _, checkpoint = checkpoint_of(directory, dict(tensors[i] for i in order), shards=shards)
    made = dict(stream(checkpoint, grouped(checkpoint, [PACK])))
    shutil.rmtree(directory)
    assert torch.equal(
        made["layers.0.experts.gate_up"],
        convert_all(dict(tensors), [PACK])[1]["layers.0.experts.gate_up"],
    )


def test_a_file_that_shrank_is_one_error_and_ends_every_thread(large):
    groups = grouped(large, [PACK])
    before = set(threading.enumerate())
    cut = large.files[1]
    data = (large.directory / cut).read_bytes()
    (large.directory / cut).write_bytes(data[:-1])
    with pytest.raises(Rejected) as refusal:
        dict(stream(large, groups, limit=0))
    (problem,) = refusal.value.problems
    assert (problem.code, problem.file) == (Code.TRUNCATED, cut)
    assert set(threading.enumerate()) <= before
    (large.directory / cut).unlink()
    with pytest.raises(Rejected) as refusal:
        dict(stream(large, groups))
    assert refusal.value.codes == (Code.UNREADABLE,)


def test_an_abandoned_stream_ends_every_thread(large):
    before = set(threading.enumerate())
    results = stream(large, grouped(large, [PACK]))
    next(results)
    results.close()
    assert set(threading.enumerate()) <= before


def test_a_type_that_torch_has_not_is_refused(tmp_path):
    file = handmade.safetensors({"a": ("F8_E8M0", [1], b"\x80")})
    handmade.write(tmp_path / "c", {"\x1b[31m.safetensors": file})
    with pytest.raises(Rejected) as caught:
        grouped(Checkpoint.open(tmp_path / "c"), [])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == (Code.TENSOR_DTYPE, "a")
    assert str(problem).isprintable()


def test_scalars_empty_tensors_and_nan_payloads_keep_their_bytes(tmp_path):
    nan = torch.tensor([0x7FC1, -32768], dtype=torch.int16).view(torch.bfloat16)  # NaN, -0.0
    tensors = {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "nan": nan}
    _, checkpoint = checkpoint_of(tmp_path / "c", tensors)
    made = dict(stream(checkpoint, grouped(checkpoint, [])))
    (file,) = (tmp_path / "c").glob("*.safetensors")
    stored = load_file(file)
    assert made.keys() == stored.keys()
    for name, tensor in stored.items():
        assert made[name].shape == tensor.shape
        assert torch.equal(made[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
