"""Whole checkpoints, changed at random: nothing but findings, and what is accepted loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import handmade
import pytest
from handmade import Tensors, bf16, index, safetensors, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mone_ref
from mone_ref import validate

INDEX = "model.safetensors.index.json"
SHARDS = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
NAMES = list(handmade.tensors())
PATH = "model.layers.0.mlp.experts"
EXPLICIT = {
    "transform_config": {
        "expert_substitution": {
            "version": 1,
            "router_semantics": {
                "preserve_logical_expert_ids": True,
                "preserve_router_weights": True,
                "renormalize_after_substitution": False,
            },
            "targets": {
                PATH: {
                    "num_logical_experts": 4,
                    "weight_layout": "compact_retained_experts",
                    "replacements": {
                        str(expert): {
                            "format": "constant-v1",
                            "tensors": {"value": f"{PATH}.{expert}.approx_value"},
                        }
                        for expert in (1, 3)
                    },
                }
            },
        }
    }
}

WORDS = [
    *handmade.config(), "text_config", "compression_config", "mone", "num_local_experts",
    "quantization_config", "rope_scaling", "0", "1", "01", "experts", *NAMES[:3],
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 5) | st.integers() | st.sampled_from(WORDS)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON value, its own first."""
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """A JSON document with one to three places removed or replaced."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                document = draw(JSON)
            elif isinstance(document, dict):
                document[draw(st.sampled_from(WORDS))] = draw(JSON)
            continue
        *parents, last = path
        node = document
        for key in parents:
            node = node[key]
        if draw(st.booleans()):
            node[last] = draw(JSON)
        else:
            del node[last]
    return document


def explicit_config() -> dict[str, Any]:
    config = handmade.config()
    del config["approximate_experts"]
    return config | {"compression_config": EXPLICIT}


def weights(tensors: Tensors, shards: int) -> dict[str, bytes | dict[str, Any]]:
    """One file, or two and an index."""
    if shards == 1:
        return {"model.safetensors": safetensors(tensors)}
    names = list(tensors)
    held = {shard: {n: tensors[n] for n in names[k::2]} for k, shard in enumerate(SHARDS)}
    weight_map = {name: shard for shard, stored in held.items() for name in stored}
    total = sum(len(data) for _, _, data in tensors.values())
    files: dict[str, bytes | dict[str, Any]] = {s: safetensors(t) for s, t in held.items()}
    return files | {INDEX: index(weight_map, total)}


def judge(directory: Path) -> validate.Report:
    """Check twice, with and without a scan; whatever has no error must load and answer."""
    report = validate.check(directory, "float16")
    assert all(str(problem).isprintable() for problem in report.problems)
    assert all(str(problem).isascii() for problem in report.problems)
    scanned = validate.check(directory, "float16", scan=True)
    assert set(report.problems) <= set(scanned.problems)
    if not report.errors and not report.not_modelled:
        (scores,) = mone_ref.load(directory).score([[0]])
        assert report.config is not None
        assert scores.shape == (1, report.config.model.vocab_size)
    return report


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


def fresh(directory: Path, files: dict[str, bytes | dict[str, Any]]) -> Path:
    for old in directory.iterdir():
        old.unlink()
    return write(directory, files)


FUZZ = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(config=st.one_of(changed(handmade.config()), changed(explicit_config())))
def test_any_config_beside_sound_weights(directory: Path, config: Any) -> None:
    files = weights(handmade.tensors(), 1)
    judge(fresh(directory, {**files, "config.json": json.dumps(config).encode()}))


@FUZZ
@given(document=changed(weights(handmade.tensors(), 2)[INDEX]))
def test_any_index_beside_sound_shards(directory: Path, document: Any) -> None:
    files = weights(handmade.tensors(), 2) | {"config.json": handmade.config()}
    judge(fresh(directory, {**files, INDEX: json.dumps(document).encode()}))


@st.composite
def changed_tensors(draw: st.DrawFn) -> Tensors:
    """Tensors removed, renamed, or stored with another type, shape or value."""
    tensors = handmade.tensors()
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
        stored = tensors.pop(name)
        kind = draw(st.sampled_from(["drop", "rename", "shape", "dtype", "value"]))
        if kind == "rename":
            part, other = draw(st.sampled_from(name.split("."))), draw(st.sampled_from(WORDS))
            tensors[name.replace(part, other)] = stored
        elif kind == "shape":
            tensors[name] = bf16(draw(st.lists(st.integers(0, 5), max_size=3)))
        elif kind == "dtype":
            size = len(stored[2]) // 2
            tensors[name] = (
                draw(st.sampled_from(["U8", "F8_E4M3", "F8_E8M0"])),
                [size],
                b"\x7f" * size,
            )
        elif kind == "value":
            value = draw(st.sampled_from([b"\xc0\x7f", b"\x80\xff", b"\x00\x48", b"\x01\x00"]))
            tensors[name] = bf16(stored[1], value)
    return tensors


@FUZZ
@given(tensors=changed_tensors(), shards=st.integers(1, 2), form=st.booleans())
def test_any_tensors_beside_a_sound_config(
    directory: Path, tensors: Tensors, shards: int, form: bool
) -> None:
    config = explicit_config() if form else handmade.config()
    judge(fresh(directory, weights(tensors, shards) | {"config.json": config}))


@FUZZ
@given(data=st.data(), shards=st.integers(1, 2))
def test_any_bytes_in_any_file(directory: Path, data: st.DataObject, shards: int) -> None:
    files = weights(handmade.tensors(), shards) | {"config.json": handmade.config()}
    fresh(directory, files)
    path = directory / data.draw(st.sampled_from(sorted(files)))
    stored = path.read_bytes()
    # Most files are header: changes there matter more than in a value.
    begin = data.draw(st.integers(0, min(len(stored), 6000)))
    end = data.draw(st.integers(begin, begin + 20))
    path.write_bytes(stored[:begin] + data.draw(st.binary(max_size=20)) + stored[end:])
    judge(directory)


def test_the_unchanged_checkpoints_load(directory: Path) -> None:
    """Else the property above says nothing."""
    for config in (handmade.config(), explicit_config()):
        for shards in (1, 2):
            files = weights(handmade.tensors(), shards) | {"config.json": config}
            report = judge(fresh(directory, files))
            assert report.problems == ()
            assert report.config is not None
            assert report.config.substitution.form != "none"
