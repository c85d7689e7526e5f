"""Files of a checkpoint: each fault gives its code and no other; odd but legal files pass."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from handmade import ONE, bf16, index, safetensors, with_header, write
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rewriting import WITHOUT_POWER
from safetensors import SafetensorError, deserialize

from mone_ref.checkpoint import Checkpoint
from mone_ref.errors import Code, Phase, Rejected, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PT = {"format": "pt"}
META = "__metadata__"
FOUR = b"\0" * 4
GOOD = safetensors({"a": bf16([2, 2]), "b": bf16([3])})
A = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
B = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
ROOT = Path(__file__).parent.parent


def header(data: bytes = b"\0" * 8, /, **entries: Any) -> bytes:
    return with_header({"__metadata__": PT, **entries}, data)


def found(checkpoint: Checkpoint) -> list[tuple[Code, Severity, str, str]]:
    return [(p.code, p.severity, p.file, p.where) for p in checkpoint.problems]


# -- one file


LAWFUL = {
    "two tensors": GOOD,
    "no tensor": safetensors({}),
    "unpadded header": with_header(
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "entries out of order": header(b=B, a=A),
    "scalar": header(b"\0" * 4, a={**A, "shape": []}),
    "zero-size tensor alone": header(
        b"", z={"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    ),
    "zero-size tensor between": header(
        a=A, b=B, z={"dtype": "BF16", "shape": [3, 0], "data_offsets": [4, 4]}
    ),
    "zero-size tensor with a huge other dimension": header(
        b"", z={"dtype": "BF16", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}
    ),
    "F4, two per byte": header(
        b"\0" * 8, y={"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}
    ),
    "F6, four in three bytes": header(
        b"\0" * 3, y={"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    ),
    "F8 scales": header(b"\0" * 4, s={"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}),
    "unknown type, any length": header(
        b"\0" * 3, z={"dtype": "Q7", "shape": [4], "data_offsets": [0, 3]}
    ),
    "empty name": header(b"\0" * 4, **{"": A}),
    "more metadata": with_header({"__metadata__": {**PT, "x": "y"}, "a": A}, b"\0" * 4),
}


@pytest.mark.parametrize("data", LAWFUL.values(), ids=LAWFUL)
def test_a_lawful_file_gives_no_finding(tmp_path: Path, data: bytes) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: data}))
    assert found(checkpoint) == []


def test_entries_hold_absolute_offsets_and_read_returns_the_bytes(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": PT, "a": A, "b": B}).encode()
    data = with_header(text, b"abcdefgh")
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: data}))
    entry = checkpoint.tensors["b"]
    begin = 8 + len(text) + 4
    assert (entry.file, entry.dtype, entry.shape) == (FILE, "F32", (1,))
    assert (entry.begin, entry.end, entry.size) == (begin, begin + 4, 4)
    assert (checkpoint.read("a"), checkpoint.read("b")) == (b"abcd", b"efgh")
    assert list(checkpoint.chunks("b", 3)) == [b"efg", b"h"]


def test_a_zero_size_tensor_reads_as_nothing(tmp_path: Path) -> None:
    data = header(b"", z={"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]})
    assert Checkpoint.open(write(tmp_path, {FILE: data})).read("z") == b""


# what stands in the file, and the one (code, severity, where) it gives
BROKEN: dict[str, tuple[bytes, Code, Severity, str]] = {
    "empty file": (b"", Code.TRUNCATED, E, "file"),
    "seven bytes": (b"\0" * 7, Code.TRUNCATED, E, "file"),
    "header cut": (GOOD[:40], Code.TRUNCATED, E, "file"),
    "header as long as the file": (
        len(GOOD).to_bytes(8, "little") + GOOD[8:], Code.TRUNCATED, E, "file",
    ),
    "header over the limit": (
        (100_000_001).to_bytes(8, "little") + b"{}", Code.HEADER, E, "header",
    ),
    "header of 2^63-1 bytes": (
        (2**63 - 1).to_bytes(8, "little") + b"\0" * 92, Code.HEADER, E, "header",
    ),
    "header of no bytes": (b"\0" * 8, Code.HEADER, E, "header"),
    "pickle in disguise": (b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl", Code.HEADER, E, "header"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        Code.LFS_POINTER, E, "file",
    ),
    "not UTF-8": (with_header(b'{"\xff": 1}'), Code.HEADER, E, "header"),
    "byte order mark": (with_header(b"\xef\xbb\xbf{}"), Code.HEADER, E, "header"),
    "not JSON": (with_header(b"{oops}"), Code.HEADER, E, "header"),
    "not an object": (with_header(b"[]"), Code.HEADER, E, "header"),
    "space before the object": (
        with_header(b' {"__metadata__": {"format": "pt"}}'), Code.HEADER, E, "header",
    ),
    "NUL padding": (with_header(b"{}\0\0"), Code.HEADER, E, "header"),
    "deep nesting": (with_header(b'{"a":' * 90_000), Code.HEADER, E, "header"),
    "tensor twice": (
        with_header(
            b'{"__metadata__":{"format":"pt"},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"xy",
        ),
        Code.HEADER, E, "$.a",
    ),
    "entry key twice": (
        with_header(
            b'{"__metadata__":{"format":"pt"},'
            b'"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        Code.HEADER, E, "$.a.shape",
    ),
    "no metadata": (with_header({"a": A}, FOUR), Code.METADATA, W, META),
    "metadata null": (with_header({"__metadata__": None, "a": A}, FOUR), Code.METADATA, W, META),
    "metadata empty": (with_header({"__metadata__": {}, "a": A}, FOUR), Code.METADATA, W, META),
    "format of another framework": (safetensors({}, {"format": "mlx"}), Code.METADATA, W, META),
    "format lost": (safetensors({}, {"tool": "x"}), Code.METADATA, W, META),
    "format a number": (safetensors({}, {"format": 1}), Code.METADATA, E, META),
    "metadata nested": (safetensors({}, {**PT, "x": {"y": "z"}}), Code.METADATA, E, META),
    "metadata a list": (with_header({"__metadata__": []}), Code.METADATA, E, META),
    "entry no object": (header(b"", a=3), Code.HEADER, E, "a"),
    "entry null": (header(b"", a=None), Code.HEADER, E, "a"),
    "entry without dtype": (
        header(FOUR, a={"shape": [1], "data_offsets": [0, 4]}), Code.HEADER, E, "a",
    ),
    "entry without offsets": (header(FOUR, a={"shape": [1], "dtype": "F32"}), Code.HEADER, E, "a"),
    "entry with one more key": (header(FOUR, a={**A, "note": 1}), Code.HEADER, W, "a"),
    "dtype a number": (header(FOUR, a={**A, "dtype": 32}), Code.HEADER, E, "a"),
    "shape a number": (header(FOUR, a={**A, "shape": 1}), Code.HEADER, E, "a"),
    "shape with a float": (header(FOUR, a={**A, "shape": [1.0]}), Code.HEADER, E, "a"),
    "shape with true": (header(FOUR, a={**A, "shape": [True]}), Code.HEADER, E, "a"),
    "shape negative": (header(FOUR, a={**A, "shape": [-1, -1]}), Code.HEADER, E, "a"),
    "shape with text": (header(FOUR, a={**A, "shape": ["1"]}), Code.HEADER, E, "a"),
    "shape beyond 2^63": (header(FOUR, a={**A, "shape": [2**64]}), Code.HEADER, E, "a"),
    "offsets reversed": (header(FOUR, a={**A, "data_offsets": [4, 0]}), Code.OFFSETS, E, "a"),
    "offsets negative": (header(FOUR, a={**A, "data_offsets": [-4, 0]}), Code.HEADER, E, "a"),
    "three offsets": (header(FOUR, a={**A, "data_offsets": [0, 4, 4]}), Code.HEADER, E, "a"),
    "offset a float": (header(FOUR, a={**A, "data_offsets": [0, 4.0]}), Code.HEADER, E, "a"),
    "range too short": (header(b"\0" * 3, a={**A, "data_offsets": [0, 3]}), Code.OFFSETS, E, "a"),
    "shape [1] without bytes": (header(b"", a={**A, "data_offsets": [0, 0]}), Code.OFFSETS, E, "a"),
    "zero-size tensor with bytes": (header(FOUR, a={**A, "shape": [0]}), Code.OFFSETS, E, "a"),
    "product beyond 2^63": (
        header(FOUR, a={**A, "shape": [2**32, 2**32, 2**32]}), Code.OFFSETS, E, "a",
    ),
    "F4 with half a byte": (
        header(b"\0" * 2, a={"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}),
        Code.OFFSETS, E, "a",
    ),
    "hole before the first": (header(a={**A, "data_offsets": [4, 8]}), Code.OFFSETS, E, "a"),
    "hole between": (
        header(b"\0" * 12, a=A, b={**A, "data_offsets": [8, 12]}), Code.OFFSETS, E, "b",
    ),
    "overlap": (header(b"\0" * 6, a=A, b={**A, "data_offsets": [2, 6]}), Code.OFFSETS, E, "b"),
    "same range twice": (header(FOUR, a=A, b=A), Code.OFFSETS, E, "b"),
    "zero-size tensor inside another": (
        header(FOUR, a=A, z={"dtype": "F32", "shape": [0], "data_offsets": [2, 2]}),
        Code.OFFSETS, E, "z",
    ),
    "data cut": (GOOD[:-1], Code.TRUNCATED, E, "file"),
    "data padded": (GOOD + b"\0", Code.TRUNCATED, E, "file"),
    "unknown type past the end": (
        header(b"\0" * 3, z={"dtype": "Q7", "shape": [4], "data_offsets": [0, 4]}),
        Code.TRUNCATED, E, "file",
    ),
    "misaligned": (
        with_header(
            b'{"__metadata__":{"format":"pt"},'
            b'"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},'
            b'"y":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}} ',
            b"\0" * 6,
        ),
        Code.ALIGNMENT, N, "header",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code", "severity", "where"), BROKEN.values(), ids=BROKEN)
def test_a_fault_in_a_file_gives_one_finding(
    tmp_path: Path, data: bytes, code: Code, severity: Severity, where: str
) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: data}))
    assert found(checkpoint) == [(code, severity, FILE, where)]
    assert checkpoint.problems[0].phase is Phase.LOAD
    assert (tmp_path / FILE).read_bytes() == data


def test_a_cut_file_names_both_lengths(tmp_path: Path) -> None:
    (problem,) = Checkpoint.open(write(tmp_path, {FILE: GOOD[:-5]})).problems
    assert problem.found == f"a file of {len(GOOD) - 5} bytes"
    assert problem.expected == f"{len(GOOD)} bytes, as its header says"


def test_reading_past_the_end_of_a_cut_file_is_refused(tmp_path: Path) -> None:
    huge = {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: header(b"xy", a=huge)}))
    with pytest.raises(Rejected) as rejection:
        checkpoint.read("a")
    assert rejection.value.codes == (Code.TRUNCATED,)


def test_a_file_that_vanishes_is_refused_on_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: GOOD}))
    (tmp_path / FILE).unlink()
    with pytest.raises(Rejected) as rejection:
        checkpoint.read("a")
    assert rejection.value.codes == (Code.UNREADABLE,)


def test_every_fault_of_a_header_is_reported_at_once(tmp_path: Path) -> None:
    bad = header(b"", a=3, b={**A, "shape": [-1]}, c={**A, "data_offsets": [4, 0]})
    checkpoint = Checkpoint.open(write(tmp_path, {FILE: bad}))
    assert [problem.where for problem in checkpoint.problems] == ["a", "b", "c"]


def test_a_range_past_the_end_is_reported_beside_the_hole_before_it(tmp_path: Path) -> None:
    data = header(FOUR, a={**A, "data_offsets": [100, 104]})
    hole, past = Checkpoint.open(write(tmp_path, {FILE: data})).problems
    assert (hole.code, past.code) == (Code.OFFSETS, Code.OFFSETS)
    assert hole.found == "a hole of 100 bytes after the header"
    assert past.expected == f"at most {len(data)}, the file's length"


def test_hostile_names_stay_on_one_printable_line(tmp_path: Path) -> None:
    for name in ("x\ny", "\x1b[31m", "\ud800", "\u202e", "x" * 100_000):
        text = json.dumps({"__metadata__": PT, name: 3}).encode()
        (problem,) = Checkpoint.open(write(tmp_path, {FILE: with_header(text)})).problems
        assert str(problem).isascii()
        assert str(problem).isprintable()
        assert len(str(problem)) < 500


# -- the directory


def test_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (tmp_path / "absent", file, file / "below", "a\0b", tmp_path / ("n" * 300)):
        checkpoint = Checkpoint.open(path)
        assert found(checkpoint) == [(Code.NOT_A_CHECKPOINT, E, ".", "path")]
        assert checkpoint.tensors == {}


def one(name: str) -> bytes:
    return safetensors({name: bf16([2])})


MAP = {"a": "x.safetensors", "b": "y.safetensors"}
INDEXED: dict[str, bytes | dict[str, Any]] = {
    "x.safetensors": one("a"),
    "y.safetensors": one("b"),
    INDEX: index(MAP, 8),
}
NUMBERED: dict[str, bytes | dict[str, Any]] = {
    "model-00001-of-00002.safetensors": one("a"),
    "model-00002-of-00002.safetensors": one("b"),
}

DIRECTORIES: dict[str, dict[str, bytes | dict[str, Any]]] = {
    "one file of any name": {"weights.safetensors": GOOD},
    "one file and companions": {
        FILE: GOOD, "tokenizer.json": b"{}", "README.md": b"", "tokenizer.model": b"", "a.py": b"",
    },
    "shards with an index": INDEXED,
    "shards without an index": NUMBERED,
    "hidden files and unfinished downloads": {
        FILE: GOOD, "._model.safetensors": b"\0\5\x16\7", ".nfs0001.safetensors": b"",
        "x.safetensors.incomplete": b"", "model.safetensors.aria2": b"",
    },
    "one shard of one": {"model-00001-of-00001.safetensors": GOOD},
    "unequal digits": {
        "m-00001-of-000002.safetensors": one("a"), "m-00002-of-000002.safetensors": one("b"),
    },
}  # fmt: skip


@pytest.mark.parametrize("files", DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_lawful_directory_gives_no_finding(
    tmp_path: Path, files: dict[str, bytes | dict[str, Any]]
) -> None:
    (tmp_path / "x.safetensors.d").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    checkpoint = Checkpoint.open(write(tmp_path, files))
    assert found(checkpoint) == []
    assert set(checkpoint.tensors) == {"a", "b"}


# files, and every (code, severity, file, where) they give
ASTRAY: dict[str, tuple[dict[str, Any], list[tuple[Code, Severity, str, str]]]] = {
    "empty": ({}, [(Code.NO_WEIGHTS, E, ".", "path")]),
    "no weights": ({"README.md": b""}, [(Code.NO_WEIGHTS, E, ".", "path")]),
    "pickle only": ({"model.bin": b"\x80"}, [(Code.PICKLE, E, "model.bin", "file")]),
    "pickle of every kind": (
        {"a.pt": b"", "b.pth": b"", "c.bin": b""}, [(Code.PICKLE, E, "a.pt", "file")],
    ),
    "pickle beside safetensors": (
        {FILE: GOOD, "training_args.bin": b""}, [(Code.PICKLE, N, "training_args.bin", "file")],
    ),
    "file beside a numbered set": (
        {FILE: one("c"), **NUMBERED}, [(Code.AMBIGUOUS_FILES, E, ".", "path")],
    ),
    "two files": (
        {"a.safetensors": one("a"), "b.safetensors": one("b")},
        [(Code.AMBIGUOUS_FILES, E, ".", "path")],
    ),
    "two numbered sets": (
        {**NUMBERED, "model-00001-of-00003.safetensors": one("c")},
        [(Code.AMBIGUOUS_FILES, E, ".", "path")],
    ),
    "one number in two spellings": (
        {"m-1-of-2.safetensors": one("a"), "m-01-of-2.safetensors": one("b")},
        [(Code.AMBIGUOUS_FILES, E, ".", "path")],
    ),
    "shard of a set missing": (
        {"model-00002-of-00002.safetensors": one("b")}, [(Code.MISSING_SHARD, E, ".", "path")],
    ),
    "shard number zero": (
        {"m-00000-of-00002.safetensors": one("b"), "m-00001-of-00002.safetensors": one("a")},
        [(Code.MISSING_SHARD, E, ".", "path")],
    ),
    "set of very many": (
        {"m-1-of-99999999999999999999.safetensors": one("b")},
        [(Code.MISSING_SHARD, E, ".", "path")],
    ),
    "tensor in two shards": (
        {**NUMBERED, "model-00002-of-00002.safetensors": one("a")},
        [(Code.DUPLICATE_TENSOR, E, "model-00002-of-00002.safetensors", "a")],
    ),
    "stray file beside an index": (
        {**INDEXED, FILE: one("z")}, [(Code.STRAY_FILE, W, FILE, "file")],
    ),
    "stray file that is broken": (
        {**INDEXED, FILE: b""}, [(Code.STRAY_FILE, W, FILE, "file")],
    ),
    "index without total_size": (
        {**INDEXED, INDEX: index(MAP)},
        [(Code.INDEX, N, INDEX, "$.metadata.total_size")],
    ),
    "index without metadata": (
        {**INDEXED, INDEX: {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}},
        [(Code.INDEX, N, INDEX, "$.metadata.total_size")],
    ),
    "total_size wrong": (
        {**INDEXED, INDEX: index(MAP, 9)},
        [(Code.INDEX, W, INDEX, "$.metadata.total_size")],
    ),
    "total_size text": (
        {**INDEXED, INDEX: index(MAP, "8")},
        [(Code.INDEX, W, INDEX, "$.metadata.total_size")],
    ),
    "total_size a float": (
        {**INDEXED, INDEX: index(MAP, 8.0)},
        [(Code.INDEX, W, INDEX, "$.metadata.total_size")],
    ),
    "one shard missing": (
        {INDEX: INDEXED[INDEX], "x.safetensors": one("a")},
        [(Code.MISSING_SHARD, E, "y.safetensors", "file")],
    ),
    "all shards missing": (
        {INDEX: INDEXED[INDEX]},
        [
            (Code.MISSING_SHARD, E, "x.safetensors", "file"),
            (Code.MISSING_SHARD, E, "y.safetensors", "file"),
        ],
    ),
    "tensor in no shard": (
        {**INDEXED, INDEX: index({**MAP, "c": "y.safetensors"}, 8)},
        [(Code.INDEX, E, INDEX, "c")],
    ),
    "two tensors exchanged": (
        {**INDEXED, INDEX: index({"a": "y.safetensors", "b": "x.safetensors"}, 8)},
        [(Code.INDEX, E, INDEX, "a"), (Code.INDEX, E, INDEX, "b")],
    ),
    "tensor that the index does not name": (
        {**INDEXED, "y.safetensors": safetensors({"b": bf16([1]), "c": bf16([1])})},
        [(Code.INDEX, E, "y.safetensors", "c")],
    ),
    "tensor in two shards of the index": (
        {**INDEXED, "y.safetensors": safetensors({"b": bf16([1]), "a": bf16([0])}),
         INDEX: index(MAP, 6)},
        [(Code.DUPLICATE_TENSOR, E, "y.safetensors", "a")],
    ),
    "broken shard": (
        {**INDEXED, "y.safetensors": b""}, [(Code.TRUNCATED, E, "y.safetensors", "file")],
    ),
    "index is an LFS pointer": (
        {**INDEXED, INDEX: b"version https://git-lfs.github.com/spec/v1\n"},
        [(Code.LFS_POINTER, E, INDEX, "file")],
    ),
    "index not JSON": ({**INDEXED, INDEX: b"{"}, [(Code.INDEX, E, INDEX, "$")]),
    "index not UTF-8": ({**INDEXED, INDEX: b"\xff"}, [(Code.INDEX, E, INDEX, "$")]),
    "index not an object": ({**INDEXED, INDEX: b"[]"}, [(Code.INDEX, E, INDEX, "$")]),
    "index without map": ({**INDEXED, INDEX: b"{}"}, [(Code.INDEX, E, INDEX, "$.weight_map")]),
    "map a list": (
        {**INDEXED, INDEX: {"weight_map": []}}, [(Code.INDEX, E, INDEX, "$.weight_map")],
    ),
    "map empty": ({**INDEXED, INDEX: index({})}, [(Code.INDEX, E, INDEX, "$.weight_map")]),
    "map to a number": (
        {**INDEXED, INDEX: {"weight_map": {"a": 1}}}, [(Code.INDEX, E, INDEX, "$.weight_map.a")],
    ),
    "map to a pickle": (
        {**INDEXED, INDEX: index({"a": "pytorch_model.bin"})},
        [(Code.INDEX, E, INDEX, "$.weight_map.a")],
    ),
    "map key twice": (
        {**INDEXED, INDEX: b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}'},
        [(Code.INDEX, E, INDEX, "$.weight_map.a")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), ASTRAY.values(), ids=ASTRAY)
def test_a_fault_among_files(
    tmp_path: Path, files: dict[str, Any], expected: list[tuple[Code, Severity, str, str]]
) -> None:
    write(tmp_path, files)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found(Checkpoint.open(tmp_path)) == expected
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_messages_of_the_index_name_numbers_and_files(tmp_path: Path) -> None:
    size = len(one("a")) + len(one("b"))
    cases = {
        "total": (
            index(MAP, size),
            "the size of the files",
        ),
        "other": (
            index({"a": "y.safetensors", "b": "x.safetensors"}, 8),
            "the tensor in x.safetensors",
        ),
        "nowhere": (
            index({"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}, 8),
            "the tensor in no file",
        ),
        "missing": (
            index(
                {
                    "a": "x.safetensors",
                    "b": "y.safetensors",
                    "c": "z.safetensors",
                    "d": "z.safetensors",
                }
            ),
            "for 2 tensors",
        ),
    }
    for name, (document, text) in cases.items():
        directory = write(tmp_path / name, {**INDEXED, INDEX: document})
        assert any(text in problem.found for problem in Checkpoint.open(directory).problems), name


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "",
     ".", "..", "C:x.safetensors", "x\0.safetensors", "./x.safetensors"],
)  # fmt: skip
def test_a_name_that_leaves_the_directory_is_refused_before_anything_is_opened(
    tmp_path: Path, name: str
) -> None:
    # The other shard is broken: had it been opened, it would have been reported.
    files = {"x.safetensors": b"", INDEX: index({"a": "x.safetensors", "b": name, "c": name})}
    checkpoint = Checkpoint.open(write(tmp_path, files))
    assert found(checkpoint) == [(Code.UNSAFE_PATH, E, INDEX, "$.weight_map.b")]
    assert checkpoint.files == ()


def test_unprintable_shard_names_are_missing_shards(tmp_path: Path) -> None:
    for name in ("\ud800.safetensors", "n" * 5000 + ".safetensors"):
        files = {INDEX: index({"a": name})}
        checkpoint = Checkpoint.open(write(tmp_path, files))
        assert [problem.code for problem in checkpoint.errors] == [Code.MISSING_SHARD]


# -- links, devices, permissions


def link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_a_link_inside_the_directory_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "sub", {"real": GOOD})
    link(tmp_path / FILE, "sub/real")
    assert found(Checkpoint.open(tmp_path)) == []


def test_a_link_to_the_directory_itself_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", {FILE: GOOD})
    link(tmp_path / "alias", "real")
    assert found(Checkpoint.open(tmp_path / "alias")) == []


@pytest.mark.parametrize("files", [{}, {INDEX: index({"a": FILE, "b": FILE}, 14)}])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    outside = write(tmp_path / "outside", {FILE: GOOD})
    directory = write(tmp_path / "checkpoint", files)
    link(directory / FILE, outside / FILE)
    checkpoint = Checkpoint.open(directory)
    assert found(checkpoint) == [(Code.UNSAFE_PATH, E, FILE, "file")]
    assert checkpoint.tensors == {}


def test_an_index_that_is_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {INDEX: INDEXED[INDEX]})
    directory = write(tmp_path / "checkpoint", {FILE: GOOD})
    link(directory / INDEX, outside / INDEX)
    assert found(Checkpoint.open(directory)) == [(Code.UNSAFE_PATH, E, INDEX, "file")]


def test_the_cache_of_the_hugging_face_hub_is_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--o--m"
    write(repository / "blobs", {"0f": GOOD, "1a": index({"a": FILE, "b": FILE}, 14)})
    snapshot = repository / "snapshots" / "main"
    link(snapshot / FILE, "../../blobs/0f")
    link(snapshot / INDEX, "../../blobs/1a")
    checkpoint = Checkpoint.open(snapshot)
    assert found(checkpoint) == []
    assert checkpoint.read("b") == ONE * 3


@pytest.mark.parametrize(
    "target", ["../../../models--o--other/blobs/0f", "../../blobs/deep/0f", "../other/0f"]
)
def test_other_links_out_of_a_snapshot_are_refused(tmp_path: Path, target: str) -> None:
    snapshot = tmp_path / "models--o--m" / "snapshots" / "main"
    link(snapshot / FILE, target)
    write((snapshot / target).resolve().parent, {"0f": GOOD})
    assert found(Checkpoint.open(snapshot)) == [(Code.UNSAFE_PATH, E, FILE, "file")]


def test_a_dangling_link_is_unreadable(tmp_path: Path) -> None:
    link(tmp_path / FILE, "absent")
    assert found(Checkpoint.open(tmp_path)) == [(Code.UNREADABLE, E, FILE, "file")]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    assert found(Checkpoint.open(tmp_path)) == [(Code.UNREADABLE, E, FILE, "file")]


OPENED = """
import sys
from mone_ref.checkpoint import Checkpoint
for path in sys.argv[1:]:
    print(*(f"{p.code} {p.file}" for p in Checkpoint.open(path).problems))
"""


def test_without_permission_every_place_gives_its_code(tmp_path: Path) -> None:
    file = write(tmp_path / "file", {FILE: GOOD})
    listing = write(tmp_path / "listing", {FILE: GOOD})
    shards = write(tmp_path / "shards", INDEXED)
    cases = [
        (file, file / FILE, f"CHECKPOINT/unreadable {FILE}"),
        (listing, listing, "CHECKPOINT/not-a-directory ."),
        (shards, shards / INDEX, f"CHECKPOINT/unreadable {INDEX}"),
    ]
    for _, closed, _ in cases:
        closed.chmod(0)
    command = [*WITHOUT_POWER, sys.executable, "-c", OPENED]
    run = subprocess.run(
        [*command, *(str(path) for path, _, _ in cases)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    for _, closed, _ in cases:
        closed.chmod(0o755)
    assert run.stdout.splitlines() == [text for _, _, text in cases], run.stderr


# -- anything at all


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_random_bytes_never_raise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for make in (lambda x: x, with_header):
        opened(tmp_path_factory.getbasetemp() / "bytes", FILE, make(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F4", "BF16"]) | JSON,
     "shape": st.lists(st.integers(0, 3), max_size=3) | JSON,
     "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | JSON}
)  # fmt: skip


@settings(max_examples=300)
@given(entries=st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=4), metadata=JSON)
def test_a_header_is_accepted_exactly_when_the_safetensors_library_accepts_it(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Any], metadata: Any
) -> None:
    # Stricter only on repeated keys and leading space, which json.dumps never writes.
    data = with_header({**entries, "__metadata__": metadata}, b"\0" * 24)
    checkpoint = opened(tmp_path_factory.getbasetemp() / "headers", FILE, data)
    assert bool(checkpoint.errors) is not accepted_by_the_library(data)


def ranges(sizes: list[int]) -> dict[str, Any]:
    """Entries of bytes, back to back, with the given sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return {
        f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [ends[i], ends[i + 1]]}
        for i, size in enumerate(sizes)
    }


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    data_size=st.integers(0, 12),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), max_size=2),
    order=st.randoms(),
)
def test_ranges_are_accepted_exactly_when_the_safetensors_library_accepts_them(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    data_size: int,
    moves: list[tuple[int, int]],
    order: random.Random,
) -> None:
    entries = ranges(sizes)
    for number, shift in moves:
        entry = entries[f"t{number % len(sizes)}"]
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    shuffled = list(entries.items())
    order.shuffle(shuffled)
    length = sum(sizes) if data_size > 8 else data_size  # right in a third of all cases
    data = with_header({"__metadata__": PT, **dict(shuffled)}, b"\0" * length)
    checkpoint = opened(tmp_path_factory.getbasetemp() / "ranges", FILE, data)
    assert bool(checkpoint.errors) is not accepted_by_the_library(data)


def accepted_by_the_library(data: bytes) -> bool:
    """Whether safetensors reads a file; types that it does not know are not judged."""
    try:
        deserialize(data)
    except SafetensorError as error:
        assume("unknown variant" not in str(error))
        return False
    return True


@settings(max_examples=200)
@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_one_changed_byte_never_raises(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    data = GOOD[:position] + bytes([value]) + GOOD[position + 1 :]
    opened(tmp_path_factory.getbasetemp() / "flips", FILE, data)


@settings(max_examples=200)
@given(document=JSON | st.fixed_dictionaries({"weight_map": JSON, "metadata": JSON}))
def test_any_index_never_raises(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    directory = write(tmp_path_factory.getbasetemp() / "indices", {"x.safetensors": one("a")})
    opened(directory, INDEX, json.dumps(document).encode())


def opened(directory: Path, name: str, data: bytes) -> Checkpoint:
    """Open a directory; whatever is wrong must be printable, and what is right readable."""
    checkpoint = Checkpoint.open(write(directory, {name: data}))
    assert all(str(problem).isprintable() for problem in checkpoint.problems)
    if not checkpoint.errors:
        for tensor, entry in checkpoint.tensors.items():
            assert len(checkpoint.read(tensor)) == entry.size
    return checkpoint


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """A sparse file of 1 TiB opens, so nothing is allocated or read beyond its header."""
    size = 2**40
    head = with_header(
        {"__metadata__": PT, "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    )
    write(tmp_path, {FILE: head})
    os.truncate(tmp_path / FILE, len(head) + size)
    checkpoint = Checkpoint.open(tmp_path)
    assert found(checkpoint) == []
    assert next(checkpoint.chunks("a", 16)) == b"\0" * 16
