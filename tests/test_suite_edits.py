"""Edits: each plants what it says into a copy, and complains when there is nothing to plant."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mone_ref.suite.edits import INDEX, EditError, apply, changed_tensors, edited

CONFIG = {
    "hidden_size": 4,
    "vocab_size": 6,
    "intermediate_size": 2,
    "list": {"0": [1, 5]},
    "flag": True,
}


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        "a": torch.arange(4, dtype=torch.bfloat16),
        "b": torch.ones(4, dtype=torch.float32),
        "m": torch.ones(2, 4, dtype=torch.float16),
        "n": 2 * torch.ones(2, 4, dtype=torch.float16),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt", "by": "hand"})
    return directory


def files(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def after(checkpoint, *edits):
    """Tensors and config text after edits; the original must stay as it was."""
    before = files(checkpoint)
    with edited(checkpoint, edits) as copy:
        tensors = load_file(copy / "model.safetensors")
        with safe_open(copy / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt", "by": "hand"}
        text = (copy / "config.json").read_text()
    assert not copy.exists()
    assert files(checkpoint) == before
    return tensors, text


def test_an_engine_that_writes_into_its_checkpoint_writes_into_a_copy(checkpoint):
    before = files(checkpoint)
    with edited(checkpoint, ()) as directory:
        assert files(directory) == before
        (directory / "cache.bin").write_bytes(b"x")
        (directory / "config.json").write_text("{}")
    assert files(checkpoint) == before


def test_remove_tensor(checkpoint):
    assert set(after(checkpoint, {"remove_tensor": "a"})[0]) == {"b", "m", "n"}


def test_add_tensor_with_letters_for_sizes(checkpoint):
    shape = [2, "H", "H+1", "V-2", "2I", "3I-1"]
    spec = {"name": "new", "shape": shape, "dtype": "bfloat16", "fill": 0.5}
    new = after(checkpoint, {"add_tensor": spec})[0]["new"]
    assert new.shape == (2, 4, 5, 4, 4, 5)
    assert new.dtype is torch.bfloat16
    assert (new == 0.5).all()


def test_replace_tensor_keeps_the_dtype(checkpoint):
    spec = {"name": "a", "shape": [], "fill": 3}
    new = after(checkpoint, {"replace_tensor": spec})[0]["a"]
    assert new.shape == ()
    assert new.dtype is torch.bfloat16
    assert new == 3


def test_reshape_keeps_the_values(checkpoint):
    new = after(checkpoint, {"reshape": {"tensor": "a", "shape": [1, "H"]}})[0]["a"]
    assert new.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("value", "expected"), [("nan", "nan"), ("-inf", "-inf"), (1e5, "99840.0")]
)
def test_poison_changes_one_element(checkpoint, value, expected):
    # 1e5 is 99840 on the grid of bfloat16: 390 * 256.
    new = after(checkpoint, {"poison": {"tensor": "a", "index": 2, "value": value}})[0]["a"]
    assert str(new[2].item()) == expected
    assert new[[0, 1, 3]].tolist() == [0, 1, 3]


def test_copy_and_rename_tensor(checkpoint):
    tensors, _ = after(
        checkpoint,
        {"copy_tensor": {"from": "a", "to": "c"}},
        {"rename_tensor": {"from": "a", "to": "d"}},
    )
    assert set(tensors) == {"b", "c", "d", "m", "n"}
    assert torch.equal(tensors["c"], tensors["d"])


def test_rename_prefix_renames_all_that_begin_with_it(checkpoint):
    tensors, _ = after(
        checkpoint,
        {"rename_tensor": {"from": "a", "to": "x.1.w"}},
        {"rename_tensor": {"from": "b", "to": "x.1.v"}},
        {"rename_tensor": {"from": "m", "to": "x.10.w"}},
        {"rename_prefix": {"from": "x.1.", "to": "x.7."}},
    )
    assert set(tensors) == {"n", "x.7.w", "x.7.v", "x.10.w"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "float8_e4m3fn"])
def test_retype_keeps_the_values(checkpoint, dtype):
    new = after(checkpoint, {"retype": {"tensors": ["a"], "dtype": dtype}})[0]["a"]
    assert new.dtype is getattr(torch, dtype)
    assert new.tolist() == [0, 1, 2, 3]


def test_a_file_is_cut_or_removed_and_the_index_still_names_it(checkpoint):
    index = {"weight_map": dict.fromkeys("abmn", "model.safetensors")}
    (checkpoint / INDEX).write_text(json.dumps(index))
    whole = (checkpoint / "model.safetensors").read_bytes()
    file = "model.safetensors"
    with edited(checkpoint, [{"cut_file": {"file": file, "bytes": 3}}]) as copy:
        # Compared by size: safetensors writes the keys of its metadata in any order.
        assert (copy / file).stat().st_size == len(whole) - 3
    with edited(checkpoint, [{"remove_file": file}]) as copy:
        assert not (copy / file).exists()
        assert json.loads((copy / INDEX).read_text())["weight_map"] == index["weight_map"]
    assert (checkpoint / file).read_bytes() == whole


def test_store_twice_keeps_the_first_one(checkpoint):
    save_file({"s": torch.zeros(3)}, checkpoint / "second.safetensors")
    twice = {"tensor": "a", "file": "second.safetensors", "fill": 9}
    with edited(checkpoint, [{"store_twice": twice}]) as copy:
        assert load_file(copy / "model.safetensors")["a"].tolist() == [0, 1, 2, 3]
        second = load_file(copy / "second.safetensors")
        assert second["a"].tolist() == [9, 9, 9, 9]
        assert second.keys() == {"a", "s"}


def test_fuse_tensors_stacks_rows_of_joined_tensors(checkpoint):
    tensors, _ = after(
        checkpoint,
        {"copy_tensor": {"from": "m", "to": "m2"}},
        {"copy_tensor": {"from": "n", "to": "n2"}},
        {"fuse_tensors": {"rows": [["m", "n"], ["n2", "m2"]], "to": "f"}},
    )
    assert set(tensors) == {"a", "b", "f"}
    assert tensors["f"][:, :, 0].tolist() == [[1, 1, 2, 2], [2, 2, 1, 1]]


def test_set_and_remove_config(checkpoint):
    _, text = after(
        checkpoint,
        {"set_config": {"path": ["list", "01"], "value": [2]}},
        {"set_config": {"path": ["list", "0", 1], "value": None}},
        {"remove_config": ["flag"]},
    )
    assert json.loads(text) == {
        "hidden_size": 4,
        "vocab_size": 6,
        "intermediate_size": 2,
        "list": {"0": [1, None], "01": [2]},
    }


def test_copy_and_move_config(checkpoint):
    _, text = after(
        checkpoint,
        {"copy_config": {"from": ["list", "0"], "to": ["list", "1"]}},
        {"set_config": {"path": ["list", "1", 0], "value": 7}},
        {"move_config": {"from": ["flag"], "to": ["list", "flag"]}},
    )
    assert json.loads(text) == {
        "hidden_size": 4,
        "vocab_size": 6,
        "intermediate_size": 2,
        "list": {"0": [1, 5], "1": [7, 5], "flag": True},
    }


def test_config_text_can_become_what_no_writer_writes(checkpoint):
    spec = {"find": '"list": \\{', "replace": '"list": {"0": [7], '}
    _, text = after(checkpoint, {"replace_config_text": spec})
    assert text.count('"0":') == 2


@pytest.mark.parametrize(
    ("edit", "flaw"),
    [
        ({"remove_tensor": "x"}, "no tensor x"),
        ({"add_tensor": {"name": "a", "shape": [1], "dtype": "int8", "fill": 0}}, "already has"),
        ({"add_tensor": {"name": "x", "shape": ["Q"], "dtype": "int8", "fill": 0}}, "no size"),
        ({"add_tensor": {"name": "x", "shape": ["H*2"], "dtype": "int8", "fill": 0}}, "no size"),
        ({"replace_tensor": {"name": "b", "shape": ["H"], "fill": 1}}, "already like that"),
        ({"replace_tensor": {"name": "x", "shape": ["H"], "fill": 1}}, "no tensor x"),
        ({"reshape": {"tensor": "a", "shape": ["H"]}}, "already like that"),
        ({"reshape": {"tensor": "a", "shape": [3]}}, "a: "),
        ({"poison": {"tensor": "b", "index": 0, "value": 1}}, "already like that"),
        ({"poison": {"tensor": "b", "index": 4, "value": "nan"}}, "no element 4"),
        ({"copy_tensor": {"from": "x", "to": "y"}}, "no tensor x"),
        ({"copy_tensor": {"from": "a", "to": "b"}}, "already has"),
        ({"rename_tensor": {"from": "a", "to": "b"}}, "already has"),
        ({"add_tensor": {"name": "x", "shape": ["E"], "dtype": "int8", "fill": 0}}, "has none of"),
        ({"fuse_tensors": {"rows": [["a", "x"]], "to": "f"}}, "no tensor x"),
        ({"rename_prefix": {"from": "x.", "to": "y."}}, "no tensor begins with"),
        ({"retype": {"tensors": ["b", "a"], "dtype": "float32"}}, "already like that"),
        ({"cut_file": {"file": "x.safetensors", "bytes": 1}}, "no file"),
        ({"remove_file": "x.safetensors"}, "no file"),
        ({"store_twice": {"tensor": "a", "file": "x", "fill": 1}}, "no file x"),
        (
            {"store_twice": {"tensor": "a", "file": "model.safetensors", "fill": 1}},
            "is stored in model.safetensors already",
        ),
        ({"set_config": {"path": ["flag"], "value": True}}, "already has that value"),
        ({"set_config": {"path": ["no", "where"], "value": 1}}, "has nothing at"),
        ({"copy_config": {"from": ["list"], "to": ["flag"]}}, "already has something at"),
        ({"copy_config": {"from": ["no"], "to": ["new"]}}, "has nothing at"),
        ({"move_config": {"from": ["flag"], "to": ["no", "where"]}}, "has nothing at"),
        ({"remove_config": ["no"]}, "has nothing at"),
        ({"remove_config": ["list", "0", 2]}, "has nothing at"),
        ({"replace_config_text": {"find": "absent", "replace": ""}}, "0 times, expected once"),
        ({"replace_config_text": {"find": "size", "replace": ""}}, "3 times, expected once"),
        ({"replace_config_text": {"find": "flag", "replace": "flag"}}, "already reads"),
    ],
)
def test_an_edit_with_nothing_to_change_is_an_error(edit, flaw, checkpoint):
    (name,) = edit
    with (
        pytest.raises(EditError, match=rf"^edits\[0\]\.{name}: .*{flaw}"),
        edited(checkpoint, [edit]),
    ):
        pass


def test_a_boolean_in_place_of_a_number_is_a_change(checkpoint):
    # JSON tells true from 1, Python's == does not.
    _, text = after(checkpoint, {"set_config": {"path": ["list", "0", 0], "value": True}})
    assert json.loads(text)["list"]["0"][0] is True


def test_shards_and_their_index_stay_in_line(checkpoint):
    save_file({"s": torch.zeros(3)}, checkpoint / "second.safetensors", metadata={"format": "pt"})
    names = {"a": 1, "b": 1, "m": 1, "n": 1}
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    index["weight_map"]["s"] = "second.safetensors"
    (checkpoint / INDEX).write_text(json.dumps(index))
    apply(checkpoint, [{"remove_tensor": "s"}, {"copy_tensor": {"from": "a", "to": "c"}}])
    written = json.loads((checkpoint / INDEX).read_text())
    assert written["weight_map"] == dict.fromkeys("abcmn", "model.safetensors")
    # a and c: 4 x 2 bytes each; b: 4 x 4; m and n: 8 x 2 each.
    assert written["metadata"]["total_size"] == 8 + 8 + 16 + 16 + 16


def test_an_update_holds_what_differs_and_the_edited_tensor_last(checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["b"] = tensors["b"] + 1
    tensors["a"] = tensors["a"] + 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert set(changed_tensors(checkpoint, other)) == {"a", "b"}
    edit = {"poison": {"tensor": "a", "index": 0, "value": "nan"}}
    assert list(changed_tensors(checkpoint, other, [edit])) == ["b", "a"]
    with pytest.raises(EditError, match="nothing differs"):
        changed_tensors(checkpoint, checkpoint)
