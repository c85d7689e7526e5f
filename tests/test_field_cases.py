"""Faults met in the field: each gives its findings and no other, its twin gives none.

Ids are stable names of kinds of faults, grouped: A the declaration, D names and layouts,
E fields of the config, F files. A case stands on a small sound checkpoint; where a lawful
neighbour exists it is a case of its own, with nothing expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import handmade
import pytest
from handmade import ONE, Tensors, bf16, index, safetensors, with_header, write

from mone_ref import validate
from mone_ref.errors import Code, Severity

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("a-00001-of-00003.safetensors", "a-00002-of-00003.safetensors")
SHARDS += ("a-00003-of-00003.safetensors",)
NAN = b"\xc0\x7f"  # in bfloat16
LIST = {"0": [1, 3]}

Found = tuple[Code, str]  # code, and where


@dataclass
class Draft:
    """A sound checkpoint in memory, to be edited; three shards with an index on demand."""

    config: dict[str, Any] = field(default_factory=handmade.config)
    tensors: Tensors = field(default_factory=handmade.tensors)
    files: dict[str, bytes | dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=lambda: {"format": "pt"})
    config_text: bytes | None = None
    shards: dict[str, Tensors] | None = None
    index: dict[str, Any] | None = None

    def shard(self) -> None:
        """Every third tensor to one shard, so that experts lie across files."""
        names = list(self.tensors)
        self.shards = {
            shard: {name: self.tensors[name] for name in names[number::3]}
            for number, shard in enumerate(SHARDS)
        }
        weight_map = {name: shard for shard, held in self.shards.items() for name in held}
        self.index = index(weight_map, sum(len(data) for _, _, data in self.tensors.values()))

    def write(self, directory: Path) -> Path:
        config = json.dumps(self.config).encode() if self.config_text is None else self.config_text
        files: dict[str, bytes | dict[str, Any]] = {"config.json": config}
        if self.shards is None:
            files[FILE] = safetensors(self.tensors, self.metadata)
        else:
            files |= {shard: safetensors(held) for shard, held in self.shards.items()}
        if self.index is not None:
            files[INDEX] = self.index
        return write(directory, files | self.files)

    def rename(self, old: str, new: str) -> None:
        """Replace a part of every name."""
        self.tensors = {name.replace(old, new): value for name, value in self.tensors.items()}

    def put(self, name: str, shape: list[int], value: bytes = ONE) -> None:
        self.tensors[name] = bf16(shape, value)

    def fuse(self, layer: int) -> None:
        path = f"model.layers.{layer}.mlp.experts"
        self.put(f"{path}.gate_up_proj", [4, 6, 4])
        self.put(f"{path}.down_proj", [4, 4, 3])

    def drop_experts(self, layer: int) -> None:
        for expert in range(4):
            for name in projections(layer, expert):
                self.tensors.pop(name, None)


def path(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


def projections(layer: int, expert: int) -> list[str]:
    return [path(layer, expert, f"{part}.weight") for part in handmade.EXPERT]


C1, C3 = path(0, 1, "approx_value"), path(0, 3, "approx_value")
UP = path(1, 2, "up_proj.weight")
ROUTER = "model.layers.0.mlp.gate.weight"
ROUTERS = "model.layers.{}.mlp.gate.weight"
EXPERTS = "model.layers.0.mlp.experts"
HEAD = "lm_head.weight"
ROOT = "$.approximate_experts"


def listed(value: Any, **more: Any) -> Callable[[Draft], None]:
    """Another declaration, on the same tensors."""
    return lambda draft: draft.config.update(more, approximate_experts=value)


def configured(**changes: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.config.update(changes)


def raw_config(old: str, new: str) -> Callable[[Draft], None]:
    """Edit the text of config.json, for what a JSON writer never writes."""

    def edit(draft: Draft) -> None:
        text = json.dumps(draft.config)
        assert old in text
        draft.config_text = text.replace(old, new).encode()

    return edit


def text_config(**changes: Any) -> Callable[[Draft], None]:
    """Everything under ``text_config``, then keys at the top level."""

    def edit(draft: Draft) -> None:
        text = draft.config
        draft.config = {"architectures": text.pop("architectures"), "text_config": text, **changes}

    return edit


def then(*edits: Callable[[Draft], object]) -> Callable[[Draft], None]:
    def edit(draft: Draft) -> None:
        for step in edits:
            step(draft)

    return edit


def another_architecture(draft: Draft) -> None:
    """A plain model of a family outside the table."""
    del draft.config["approximate_experts"]
    draft.config |= {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    del draft.tensors[C1], draft.tensors[C3]
    for expert in (1, 3):
        for part, shape in handmade.EXPERT.items():
            draft.put(path(0, expert, f"{part}.weight"), shape)


def qwen3(draft: Draft) -> None:
    """The same sizes as Qwen3-MoE, whose norms span one head of two values."""
    draft.config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 3,
        "intermediate_size": 6,
    }
    for layer in (0, 1):
        for norm in ("q_norm", "k_norm"):
            draft.put(f"model.layers.{layer}.self_attn.{norm}.weight", [2])


def dense(layer: int) -> Callable[[Draft], None]:
    """One MLP of ``intermediate_size`` in place of a layer's router, experts and constants."""

    def edit(draft: Draft) -> None:
        for name in [name for name in draft.tensors if f"layers.{layer}.mlp." in name]:
            del draft.tensors[name]
        for part, shape in (("gate", [6, 4]), ("up", [6, 4]), ("down", [4, 6])):
            draft.put(f"model.layers.{layer}.mlp.{part}_proj.weight", shape)

    return edit


def quantised(draft: Draft) -> None:
    """FP8 experts with one scale each, of a family outside the table."""
    another_architecture(draft)
    scales: Tensors = {}
    for name, (_, shape, _) in draft.tensors.items():
        if ".experts." in name:
            draft.tensors[name] = ("F8_E4M3", shape, b"\0" * 12)
            scales[f"{name}_scale_inv"] = ("F32", [1, 1], b"\0\0\x80\x3f")
    draft.config["quantization_config"] = {"quant_method": "fp8"}
    by_width = sorted(draft.tensors.items(), key=lambda item: item[1][0])  # BF16 before F8
    draft.tensors = scales | dict(by_width)


def packed(*parts: str) -> Callable[[Draft], None]:
    """Two layers of another family, each with these parts as bytes."""

    def edit(draft: Draft) -> None:
        another_architecture(draft)
        for layer in (0, 1):
            for part in parts:
                draft.tensors[f"layer.{layer}.{part}"] = ("U8", [2], b"\0\0")

    return edit


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
                EXPERTS: {
                    "num_logical_experts": 4,
                    "weight_layout": "compact_retained_experts",
                    "replacements": {
                        "1": {"format": "constant-v1", "tensors": {"value": C1}},
                        "3": {"format": "constant-v1", "tensors": {"value": C3}},
                    },
                }
            },
        }
    }
}

Recipe = tuple[str, Callable[[Draft], object], list[Found]]

DECLARATION: list[tuple[str, Recipe]] = [
    ("A01", ("mone block", then(lambda d: d.config.pop("approximate_experts"), configured(
        mone={"version": 1, "replacement_type": "constant", "experts_by_layer": LIST})),
        [(Code.DIALECT, "$.mone")])),
    ("A01", ("counts beside the list", configured(approximate_expert_init_tokens={"0": [0, 0]}),
        [(Code.DIALECT, "$.approximate_expert_init_tokens")])),
    ("A01", ("constants of another family, and no list", then(
        another_architecture, lambda d: d.put(C3, [4])), [(Code.UNLISTED_LAYER, C3)])),
    ("A02", ("both forms", configured(compression_config=EXPLICIT), [
        (Code.BOTH_FORMS, "$.compression_config.transform_config.expert_substitution")])),
    ("A02", ("the explicit form alone", then(lambda d: d.config.pop("approximate_experts"),
        configured(compression_config=EXPLICIT)), [])),
    ("A03", ("key a module path", listed({"model.layers.0.mlp": [1, 3]}),
        [(Code.LAYER_KEY, f'{ROOT}["model.layers.0.mlp"]')])),
    ("A03", ("key a word", listed({"layer": [1]}), [(Code.LAYER_KEY, f"{ROOT}.layer")])),
    ("A04", ("a list of lists", listed([[1, 3], []]), [(Code.NOT_A_MAPPING, ROOT)])),
    ("A04", ("a list of ids", listed([1, 3]), [(Code.NOT_A_MAPPING, ROOT)])),
    ("A06", ("id twice", listed({"0": [1, 1]}), [(Code.ID_DUPLICATE, f'{ROOT}["0"][1]')])),
    ("A06", ("id negative", listed({"0": [-1]}), [(Code.ID_RANGE, f'{ROOT}["0"][0]')])),
    ("A06", ("id past the last", listed({"0": [4]}), [(Code.ID_RANGE, f'{ROOT}["0"][0]')])),
    ("A06", ("all replaced", listed({"0": [0, 1, 2, 3]}),
        [(Code.ALL_SUBSTITUTED, f'{ROOT}["0"]')])),
    ("A07", ("id true", listed({"0": [True]}), [(Code.ID_TYPE, f'{ROOT}["0"][0]')])),
    ("A07", ("id 1.9", listed({"0": [1.9]}), [(Code.ID_TYPE, f'{ROOT}["0"][0]')])),
    ("A07", ("id text", listed({"0": ["3"]}), [(Code.ID_TYPE, f'{ROOT}["0"][0]')])),
    ("A07", ("ids text", listed({"0": "13"}), [(Code.NOT_A_LIST, f'{ROOT}["0"]')])),
    ("A07", ("two spellings of a key", listed({"0": [1], "00": [3]}),
        [(Code.LAYER_KEY, f'{ROOT}["00"]')])),
    ("A07", ("key twice", raw_config('{"0": [1, 3]}', '{"0": [1], "0": [1, 3]}'),
        [(Code.JSON_DUPLICATE_KEY, f'{ROOT}["0"]')])),
    ("A08", ("two holders differ", text_config(approximate_experts={"0": [1]}),
        [(Code.PLACEMENT_CONFLICT, "$.text_config.approximate_experts")])),
    ("A08", ("two holders agree", text_config(approximate_experts=LIST),
        [(Code.PLACEMENT_COPY, "$.text_config.approximate_experts")])),
    ("A08", ("text config only", text_config(), [])),
    ("A13", ("constant missing", lambda d: d.tensors.pop(C1), [(Code.MISSING_CONSTANT, C1)])),
    ("A13", ("constant of a retained expert", lambda d: d.put(path(0, 0, "approx_value"), [4]),
        [(Code.UNLISTED_CONSTANT, path(0, 0, "approx_value"))])),
    *(("A13", (f"constant of shape {shape}", lambda d, shape=shape: d.put(C1, shape),  # type: ignore[misc]
        [(Code.CONSTANT_SHAPE, C1)])) for shape in ([1, 4], [5], [], [4, 1], [0])),
    ("A15", ("one projection left", lambda d: d.put(path(0, 3, "up_proj.weight"), [3, 4]),
        [(Code.LEFTOVER_EXPERT, path(0, 3, "up_proj.weight"))])),
    ("A15", ("all projections left", lambda d: [
        d.put(path(0, 3, f"{part}.weight"), shape) for part, shape in handmade.EXPERT.items()],
        [(Code.LEFTOVER_EXPERT, path(0, 3, "gate_proj.weight"))])),
    ("A16", ("one projection missing", lambda d: d.tensors.pop(path(0, 2, "down_proj.weight")),
        [(Code.MISSING_EXPERT, path(0, 2, "down_proj.weight"))])),
    ("A17", ("fused experts on a substituted layer", then(
        lambda d: d.drop_experts(0), lambda d: d.fuse(0)),
        [(Code.FUSED_EXPERTS, f"{EXPERTS}.gate_up_proj")])),
    ("A21", ("counts that evolve", configured(approximate_expert_init_tokens={"0": [128, 0]}),
        [(Code.EVOLVING, '$.approximate_expert_init_tokens["0"]')])),
    ("A21", ("fewer counts than experts", configured(approximate_expert_init_tokens={"0": [0]}),
        [(Code.DIALECT, '$.approximate_expert_init_tokens["0"]')])),
    ("A24", ("quantised experts", configured(quantization_config={"quant_method": "fp8"}),
        [(Code.MODEL_FEATURE, "$.quantization_config")])),
    ("B19", ("a router row as a mask", lambda d: d.tensors.update({ROUTER: (
        "BF16", [4, 4], ONE * 4 + b"\x6e\xce" * 4 + ONE * 8)}), [(Code.ROUTER_MASK, ROUTER)])),
    ("B19", ("a router row of zeros", lambda d: d.tensors.update({ROUTER: (
        "BF16", [4, 4], ONE * 4 + b"\0\0" * 4 + ONE * 8)}), [])),
    ("B19", ("a loud router row", lambda d: d.tensors.update({ROUTER: (
        "BF16", [4, 4], ONE * 4 + b"\x6e\xce" * 3 + ONE * 9)}), [])),
    ("B16", ("a list on an architecture outside the table", configured(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text"),
        [(Code.UNKNOWN_FAMILY, "$.architectures")])),
]  # fmt: skip

NAMES: list[tuple[str, Recipe]] = [
    ("D01", ("routers under another name", lambda d: d.rename("mlp.gate.", "mlp.router."),
        [(Code.MISSING_TENSOR, ROUTER),
         (Code.UNKNOWN_TENSOR, "model.layers.0.mlp.router.weight")])),
    ("D01", ("one router under another name", lambda d: d.rename("1.mlp.gate.", "1.mlp.gate.wg."),
        [(Code.MISSING_TENSOR, ROUTERS.format(1)),
         (Code.UNKNOWN_TENSOR, "model.layers.1.mlp.gate.wg.weight")])),
    ("D01", ("another family's router", another_architecture, [])),
    ("D02", ("shared experts", lambda d: d.put(
        "model.layers.0.mlp.shared_experts.up_proj.weight", [3, 4]),
        [(Code.UNKNOWN_TENSOR, "model.layers.0.mlp.shared_experts.up_proj.weight")])),
    ("D02", ("shared experts of another family", then(another_architecture, lambda d: d.put(
        "model.layers.0.mlp.shared_experts.1.up_proj.weight", [3, 4])), [])),
    ("D03", ("other gates", then(
        lambda d: d.put("model.layers.0.mlp.shared_expert_gate.weight", [1, 4]),
        lambda d: d.put("model.layers.0.self_attn.gate.weight", [4, 4])),
        [(Code.UNKNOWN_TENSOR, "model.layers.0.mlp.shared_expert_gate.weight")])),
    ("D06", ("one layer fused", then(lambda d: d.drop_experts(1), lambda d: d.fuse(1)),
        [(Code.FUSED_EXPERTS, "model.layers.1.mlp.experts.gate_up_proj")])),
    ("D06", ("a layer in both layouts", lambda d: d.fuse(1),
        [(Code.FUSED_EXPERTS, "model.layers.1.mlp.experts.gate_up_proj")])),
    ("D06", ("layers in different layouts, another family", then(
        another_architecture, lambda d: d.drop_experts(1), lambda d: d.fuse(1)), [])),
    ("D06", ("a layer in both layouts, another family", then(
        another_architecture, lambda d: d.fuse(1)),
        [(Code.FUSED_EXPERTS, "model.layers.1.mlp.experts.gate_up_proj"),
         (Code.FUSED_EXPERTS, "model.layers.1.mlp.experts.down_proj")])),
    ("D10", ("experts under another name", lambda d: d.rename(".experts.", ".expertz."),
        [(Code.MISSING_CONSTANT, C1), (Code.MISSING_CONSTANT, C3), (Code.MISSING_EXPERT, EXPERTS),
         (Code.UNKNOWN_TENSOR, C1.replace("experts", "expertz")),
         (Code.UNKNOWN_TENSOR, path(0, 0, "gate_proj.weight").replace("experts", "expertz"))])),
    ("D10", ("no experts at all", lambda d: (d.drop_experts(0), d.drop_experts(1)),
        [(Code.MISSING_EXPERT, EXPERTS)])),
    ("D10", ("experts pruned from another family", then(
        another_architecture, lambda d: [d.tensors.pop(name) for name in projections(0, 1)]),
        [(Code.MISSING_EXPERT, EXPERTS)])),
    *(("D11", (f"decoder under {other}", lambda d, other=other: d.rename("model.layers", other),  # type: ignore[misc]
        [(Code.DECODER_PATH, f"{other}.0.mlp.gate.weight")]))
      for other in ("model.language_model.layers", "language_model.model.layers", "layers")),
    ("D11", ("vision tower and MTP stack beside the decoder", then(
        lambda d: d.put("model.visual.layers.0.mlp.experts.0.up_proj.weight", [2]),
        lambda d: d.put("mtp.layers.0.mlp.gate.weight", [2])),
        [(Code.UNKNOWN_TENSOR, "model.visual.layers.0.mlp.experts.0.up_proj.weight"),
         (Code.UNKNOWN_TENSOR, "mtp.layers.0.mlp.gate.weight")])),
    ("D13", ("experts nested once more", lambda d: d.rename(
        "1.mlp.experts", "1.mlp.experts.experts"),
        [(Code.MISSING_EXPERT, "model.layers.1.mlp.experts"),
         (Code.UNKNOWN_TENSOR, "model.layers.1.mlp.experts.experts.0.gate_proj.weight")])),
]  # fmt: skip

FIELDS: list[tuple[str, Recipe]] = [
    ("E01", ("two counts", configured(num_local_experts=8),
        [(Code.MODEL_FIELD_CONFLICT, "$.num_experts")])),
    ("E01", ("count in a place of its own", then(lambda d: d.config.pop("num_experts"),
        configured(ffn_config={"moe_num_experts": 4})),
        [(Code.MODEL_FIELD, "$.num_experts")])),
    ("E01", ("count under another known name", then(lambda d: d.config.pop("num_experts"),
        configured(num_local_experts=4)), [])),
    ("E01", ("count above the rows of the routers", configured(
        num_experts=5, approximate_experts={"0": [1, 3, 4], "1": [4]}),
        [(Code.MISSING_CONSTANT, path(0, 4, "approx_value")),
         (Code.MISSING_CONSTANT, path(1, 4, "approx_value")),
         (Code.TENSOR_SHAPE, ROUTERS.format(0)), (Code.TENSOR_SHAPE, ROUTERS.format(1))])),
    ("E02", ("top-k under an unknown name", then(lambda d: d.config.pop("num_experts_per_tok"),
        configured(top_k_experts=2)), [(Code.MODEL_FIELD, "$.num_experts_per_tok")])),
    ("E02", ("top-k of each layer", configured(num_experts_per_tok=[2, 2]),
        [(Code.MODEL_FIELD, "$.num_experts_per_tok")])),
    ("E02", ("top-k above the count", configured(num_experts_per_tok=5),
        [(Code.MODEL_FIELD, "$.num_experts_per_tok")])),
    ("E03", ("one holder updated", text_config(num_experts=2),
        [(Code.MODEL_FIELD_CONFLICT, "$.text_config.num_experts")])),
    ("E03", ("both holders updated", text_config(num_experts=4), [])),
    ("E06", ("a list for a layer past the last", listed(LIST | {"2": [1]}),
        [(Code.LAYER_NOT_MOE, f'{ROOT}["2"]')])),
    ("E06", ("dense layers by their step", then(qwen3, dense(0), configured(
        decoder_sparse_step=2, approximate_experts={})), [])),
    ("E06", ("a list for a dense layer", then(qwen3, dense(0), configured(decoder_sparse_step=2)),
        [(Code.LAYER_NOT_MOE, f'{ROOT}["0"]')])),
    ("E06", ("a dense layer that the config takes for one with experts", then(qwen3, dense(1)),
        [(Code.LAYER_KINDS, "model.layers.1.mlp")])),
    ("E06", ("a layer with experts that the config takes for dense", then(
        qwen3, configured(mlp_only_layers=[1])), [(Code.LAYER_KINDS, "model.layers.1.mlp")])),
    ("E06", ("the same checkpoint with the right config", qwen3, [])),
    ("E08", ("fewer experts left than top-k", then(listed({"0": [0, 1, 3]}), lambda d: [
        *(d.tensors.pop(name) for name in projections(0, 0)),
        d.put(path(0, 0, "approx_value"), [4])]), [])),
    ("E10", ("router cut, correction bias not", then(
        lambda d: d.put(ROUTER, [2, 4]),
        lambda d: d.put("model.layers.0.mlp.gate.e_score_correction_bias", [4])),
        [(Code.TENSOR_SHAPE, ROUTER),
         (Code.UNKNOWN_TENSOR, "model.layers.0.mlp.gate.e_score_correction_bias")])),
    ("E12", ("tied, another head", then(configured(tie_word_embeddings=True),
        lambda d: d.put(HEAD, [5, 4], b"\0\x40")), [(Code.TIED_HEAD, HEAD)])),
    ("E12", ("tied, a copy", configured(tie_word_embeddings=True), [(Code.TIED_HEAD, HEAD)])),
    ("E12", ("not tied, no head", lambda d: d.tensors.pop(HEAD), [(Code.MISSING_TENSOR, HEAD)])),
    ("E12", ("tied, no head", then(configured(tie_word_embeddings=True),
        lambda d: d.tensors.pop(HEAD)), [])),
]  # fmt: skip


def swap_entries(draft: Draft) -> None:
    """Two tensors exchange shards in the index."""
    draft.shard()
    assert draft.index is not None
    weight_map = draft.index["weight_map"]
    assert weight_map[ROUTER] != weight_map[UP]
    weight_map[ROUTER], weight_map[UP] = weight_map[UP], weight_map[ROUTER]


def lose(draft: Draft, name: str) -> None:
    """A shard without a tensor that the index still names."""
    draft.shard()
    assert draft.shards is not None
    assert draft.index is not None
    for held in draft.shards.values():
        held.pop(name, None)
    draft.index["metadata"]["total_size"] -= len(draft.tensors[name][2])


def total(value: Any) -> Callable[[Draft], None]:
    def edit(draft: Draft) -> None:
        draft.shard()
        assert draft.index is not None
        draft.index["metadata"] = {} if value is None else {"total_size": value}

    return edit


def shard_name(draft: Draft, name: str) -> None:
    """The index sends all tensors of the first shard to ``name``."""
    draft.shard()
    assert draft.index is not None
    weight_map = draft.index["weight_map"]
    draft.index["weight_map"] = {k: name if v == SHARDS[0] else v for k, v in weight_map.items()}


def header_twice(draft: Draft) -> None:
    data = safetensors(draft.tensors)
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    again = f'"{HEAD}": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'.encode()
    draft.files[FILE] = with_header(text[:-1] + b", " + again + b"}", data[8 + length :])


def unaligned(draft: Draft) -> None:
    """A bfloat16 tensor of odd length before the constants in float32."""
    stored = draft.tensors
    odd: Tensors = {"odd": bf16([1])}
    wide: Tensors = {name: ("F32", [4], b"\0\0\x80\x3f" * 4) for name in (C1, C3)}
    draft.tensors = odd | wide | {n: t for n, t in stored.items() if n not in wide}


def drop_tensors(draft: Draft, ending: str, count: int) -> None:
    names = [name for name in draft.tensors if name.endswith(ending)][:count]
    for name in names:
        del draft.tensors[name]


FILES: list[tuple[str, Recipe]] = [
    ("F01", ("no metadata entry", lambda d: d.metadata.clear(), [(Code.METADATA, "__metadata__")])),
    ("F01", ("format lost", lambda d: (d.metadata.clear(), d.metadata.update(moe_pruner="true")),
        [(Code.METADATA, "__metadata__")])),
    ("F01", ("another format", lambda d: d.metadata.update(format="mlx"),
        [(Code.METADATA, "__metadata__")])),
    ("F01", ("more metadata", lambda d: d.metadata.update(moe_pruner="true"), [])),
    ("F02", ("format a number", lambda d: d.metadata.update(format=1),
        [(Code.METADATA, "__metadata__")])),
    ("F02", ("metadata nested", lambda d: d.metadata.update(x={"y": "z"}),
        [(Code.METADATA, "__metadata__")])),
    ("F03", ("a shard missing", then(Draft.shard, lambda d: d.shards.pop(SHARDS[1])),  # type: ignore[union-attr]
        [(Code.MISSING_SHARD, "file")])),
    ("F03", ("all shards missing", then(Draft.shard, lambda d: d.shards.clear()),  # type: ignore[union-attr]
        [(Code.MISSING_SHARD, "file")] * 3)),
    ("F03", ("a shard missing, no index", then(
        Draft.shard, lambda d: setattr(d, "index", None), lambda d: d.shards.pop(SHARDS[1])),  # type: ignore[union-attr]
        [(Code.MISSING_SHARD, "path")])),
    ("F03", ("all shards, no index", then(Draft.shard, lambda d: setattr(d, "index", None)), [])),
    ("F04", ("two entries exchanged", swap_entries, [(Code.INDEX, UP), (Code.INDEX, ROUTER)])),
    ("F04", ("a tensor in no shard", lambda d: lose(d, UP), [(Code.INDEX, UP)])),
    ("F04", ("shards and index", Draft.shard, [])),
    ("F07", ("a stray file beside an index", then(
        Draft.shard, lambda d: d.files.update({FILE: safetensors({"a": bf16([1])})})),
        [(Code.STRAY_FILE, "file")])),
    ("F07", ("consolidated file beside an index", then(
        Draft.shard, lambda d: d.files.update({"consolidated.safetensors": b""})),
        [(Code.STRAY_FILE, "file")])),
    ("F07", ("a single file and shards, no index", then(
        Draft.shard, lambda d: setattr(d, "index", None),
        lambda d: d.files.update({FILE: safetensors({"a": bf16([1])})})),
        [(Code.AMBIGUOUS_FILES, "path")])),
    ("F07", ("companions of a repository", lambda d: d.files.update({
        "README.md": b"#", "tokenizer.json": b"{}", "tokenizer.model": b"\0", "LICENSE": b"",
        "modeling_x.py": b"", ".gitattributes": b"", "generation_config.json": b"{}",
        "._model.safetensors": b"", "imatrix.gguf": b"", "chat_template.jinja": b""}), [])),
    ("F10", ("total of the file sizes", lambda d: (
        d.shard(), total(sum(len(safetensors(held)) for held in d.shards.values()))(d)),  # type: ignore[union-attr]
        [(Code.INDEX, "$.metadata.total_size")])),
    *(("F10", (f"total {value!r}", total(value), [(Code.INDEX, "$.metadata.total_size")]))
      for value in ("1234", 1.2e3, None, 10**9)),
    *(("F11", (f"shard {name!r}", lambda d, name=name: shard_name(d, name),  # type: ignore[misc]
        [(Code.UNSAFE_PATH, '$.weight_map["model.embed_tokens.weight"]')]))
      for name in ("../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "")),
    ("F13", ("header beyond the limit", lambda d: d.files.update({
        FILE: (2**63 - 1).to_bytes(8, "little") + b" " * 92}), [(Code.HEADER, "header")])),
    ("F13", ("header as long as the file", lambda d: d.files.update({
        FILE: (100).to_bytes(8, "little") + b" " * 92}), [(Code.TRUNCATED, "file")])),
    ("F14", ("a name twice in a header", header_twice, [(Code.HEADER, '$["lm_head.weight"]')])),
    ("F14", ("a name twice in the index", then(
        Draft.shard, lambda d: d.files.update({INDEX: json.dumps(d.index).replace(
            '"weight_map": {', f'"weight_map": {{"{HEAD}": "{SHARDS[0]}", ').encode()})),
        [(Code.INDEX, '$.weight_map["lm_head.weight"]')])),
    ("F14", ("a key twice in the config", raw_config(
        '"num_experts": 4', '"num_experts": 4, "num_experts": 4'),
        [(Code.JSON_DUPLICATE_KEY, "$.num_experts")])),
    ("F16", ("unaligned constants", unaligned,
        [(Code.ALIGNMENT, "header"), (Code.UNKNOWN_TENSOR, "odd")])),
    ("F17", ("a zero-size tensor", lambda d: d.put("scaled_fp8", [0]),
        [(Code.UNKNOWN_TENSOR, "scaled_fp8")])),
    ("F17", ("shape [1] without bytes", lambda d: d.tensors.update(scaled_fp8=("BF16", [1], b"")),
        [(Code.OFFSETS, "scaled_fp8")])),
    ("F19", ("types without values", lambda d: d.tensors.update({
        "x.weight_scale": ("F8_E8M0", [4], b"\0" * 4), "y": ("F4", [2, 8], b"\0" * 8),
        "z": ("Q7", [3], b"\0" * 5)}), [(Code.UNKNOWN_TENSOR, "x.weight_scale")])),
    ("F19", ("an unknown type past the end", lambda d: d.files.update({FILE: with_header(
        {"__metadata__": {"format": "pt"},
         "z": {"dtype": "Q7", "shape": [3], "data_offsets": [0, 9]}}, b"\0" * 8)}),
        [(Code.TRUNCATED, "file")])),
    ("F25", ("quantised experts of another family", quantised, [])),
    ("F25", ("packed values without zero points", packed("qweight", "scales"), [])),
    ("F25", ("packed values with zero points", packed("qweight", "scales", "qzeros"), [])),
    ("F25", ("a zero point without packed values", then(
        packed("qweight", "scales", "qzeros"), lambda d: d.tensors.pop("layer.0.qweight")),
        [(Code.ORPHAN, "layer.0.qzeros"), (Code.ORPHAN, "layer.0.scales")])),
    ("F25", ("packed values without scales", then(
        packed("qweight", "scales"), lambda d: d.tensors.pop("layer.1.scales")),
        [(Code.ORPHAN, "layer.1.qweight")])),
    ("F25", ("a model's own scales", packed("scales", "input_scale"), [])),
    ("F25", ("a model that stores bytes", packed("weight"), [])),
    ("F25", ("a weight without its scale", then(
        quantised, lambda d: drop_tensors(d, "_scale_inv", 1)),
        [(Code.ORPHAN, path(0, 0, "gate_proj.weight"))])),
    ("F25", ("a scale without its weight", then(
        quantised, lambda d: drop_tensors(d, "down_proj.weight", 1)),
        [(Code.ORPHAN, path(0, 0, "down_proj.weight_scale_inv"))])),
]  # fmt: skip

CASES = [*DECLARATION, *NAMES, *FIELDS, *FILES]


def found(directory: Path, **options: Any) -> list[Found]:
    return [(p.code, p.where) for p in validate.check(directory, **options).problems]


def test_the_checkpoint_of_all_cases_is_sound(tmp_path: Path) -> None:
    assert found(Draft().write(tmp_path), dtype="float16", scan=True) == []


@pytest.mark.parametrize(
    ("edit", "expected"),
    [(edit, expected) for _, (_, edit, expected) in CASES],
    ids=[f"{case}: {name}" for case, (name, _, _) in CASES],
)
def test_a_case_gives_its_findings(
    tmp_path: Path, edit: Callable[[Draft], object], expected: list[Found]
) -> None:
    draft = Draft()
    edit(draft)
    directory = draft.write(tmp_path)
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert found(directory) == expected
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


def test_the_messages_of_misnamed_models_show_what_was_found(tmp_path: Path) -> None:
    """D01, D10, D11: one finding that names candidates, not one for each missing tensor."""
    renames = {
        ("mlp.gate.", "mlp.router."): "2 unread tensors: model.layers.0.mlp.router.weight, "
        "model.layers.1.mlp.router.weight with 4 rows",
        (".experts.", ".expertz."): "20 unread tensors: model.layers.0.mlp.expertz.0.gate_proj",
        ("model.layers", "x.layers"): "22 tensors of experts and routers under x.layers",
    }
    for number, ((old, new), text) in enumerate(renames.items()):
        draft = Draft()
        draft.rename(old, new)
        problems = validate.check(draft.write(tmp_path / str(number))).errors
        assert any(text in problem.found for problem in problems), (new, problems)


def test_f23_folders_are_no_weight_files(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    assert found(tmp_path) == [(Code.NO_CONFIG, "$"), (Code.NO_WEIGHTS, "path")]
    Draft().write(tmp_path)
    assert found(tmp_path) == []


NAN_IN = {
    "BF16": NAN,
    "F16": b"\x01\x7c",
    "F32": b"\0\0\x80\xff",
    "F64": b"\0\0\0\0\0\0\xf8\x7f",
    "F8_E4M3": b"\xff",
    "F8_E5M2": b"\x7c",
    "F8_E4M3FNUZ": b"\x80",
    "F8_E8M0": b"\xff",
}
LARGEST_OF = {
    "BF16": b"\x7f\x7f",
    "F16": b"\xff\xfb",
    "F32": b"\xff\xff\x7f\x7f",
    "F64": b"\xff\xff\xff\xff\xff\xff\xef\xff",
    "F8_E4M3": b"\x7e",
    "F8_E5M2": b"\x7b",
    "F8_E4M3FNUZ": b"\xff",
    "F8_E8M0": b"\xfe",
}


@pytest.mark.parametrize("dtype", NAN_IN)
def test_f24_a_scan_finds_every_value_that_is_no_number(tmp_path: Path, dtype: str) -> None:
    """In pieces: the tensor is larger than what is read at once."""
    bad, good = NAN_IN[dtype], LARGEST_OF[dtype]
    size = 3 * 2**20 // len(good) + 8
    values = bad + good * (size - 2) + bad
    draft = Draft()
    another_architecture(draft)
    draft.tensors = {"wide": (dtype, [size], values), **draft.tensors}
    directory = draft.write(tmp_path)
    assert validate.check(directory).problems == ()
    (problem,) = validate.check(directory, scan=True).problems
    assert (problem.code, problem.where) == (Code.NON_FINITE_WEIGHT, "wide")
    assert (problem.severity, problem.found) == (
        Severity.WARNING,
        f"2 values of NaN or infinity in [{size}]",
    )


def test_f24_constants_and_routers_are_always_read_and_reported_once(tmp_path: Path) -> None:
    draft = Draft()
    draft.put(UP, [3, 4], NAN)
    draft.put(C1, [4], NAN)
    draft.put(ROUTER, [4, 4], NAN)
    directory = draft.write(tmp_path)
    small = [(Code.NON_FINITE_CONSTANT, C1), (Code.NON_FINITE_ROUTER, ROUTER)]
    assert found(directory) == small
    assert found(directory, scan=True) == [*small, (Code.NON_FINITE_WEIGHT, UP)]


def test_of_many_findings_of_a_kind_a_thousand_are_listed(tmp_path: Path) -> None:
    """Not one per expert of a hostile list; and an error behind a thousand warnings shows."""
    draft = Draft()
    draft.config |= {"num_experts": 2000, "approximate_experts": {"0": [*range(1, 2000)]}}
    problems = validate.check(draft.write(tmp_path / "list")).problems
    missing = [problem for problem in problems if problem.code is Code.MISSING_CONSTANT]
    assert len(missing) == 1001
    assert (missing[-1].where, missing[-1].found) == (
        "more",
        "more than 1000 findings of this kind",
    )
    entries = {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "n": 1}
               for n in range(1500)}  # fmt: skip
    entries["z"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 0]}
    data = with_header({"__metadata__": {"format": "pt"}, **entries})
    report = validate.check(write(tmp_path / "header", {FILE: data, "config.json": {}}))
    assert (len(report.warnings), [p.where for p in report.errors][-1:]) == (1001, ["z"])
