"""config.json of any model: the few fields that pruning has to know, in every holder.

A family's row is not needed. Counts and top-k have several names and may stand in several
objects of one config, and engines differ in which they read: all must agree (E01 to E03).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mone_ref.errors import Code, Phase, Problem, show
from mone_ref.fields import ROOT, TEXT_CONFIG, Found
from mone_ref.strict_json import child

COUNT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_num_experts_per_tok",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
MTP_KEYS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
)
GROUP_KEYS = ("n_group", "num_expert_group")
CHOSEN_KEYS = ("topk_group",)

NOT_MODELS = frozenset(
    {
        "quantization_config",
        "compression_config",
        "rope_scaling",
        "rope_parameters",
        "vision_config",
        "audio_config",
        "approximate_experts",
        "approximate_expert_init_tokens",
        "auto_map",
    }
)
"""Objects of a config that describe no expert layers."""


@dataclass(frozen=True)
class Settings:
    """A config's object, and every object in it that may describe the decoder."""

    document: Mapping[str, Any]

    def holders(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The config and its objects, with their JSON paths."""
        yield from _holders(ROOT, self.document)

    def find(self, keys: tuple[str, ...]) -> list[Found]:
        """Every value that is not null under one of ``keys``, in any holder."""
        return [
            Found(child(path, key), holder[key])
            for path, holder in self.holders()
            for key in keys
            if holder.get(key) is not None
        ]

    def find_in_lists(self, keys: tuple[str, ...]) -> list[Found]:
        """Likewise, in objects that stand in a list, such as one per layer: no holder is one."""
        return [
            Found(child(child(child(path, name), at), key), item[key])
            for path, holder in self.holders()
            for name, value in holder.items()
            if isinstance(value, list) and name not in NOT_MODELS
            for at, item in enumerate(value)
            if isinstance(item, dict)
            for key in keys
            if item.get(key) is not None
        ]

    def integer(self, *keys: str) -> int | None:
        """The first integer under one of ``keys``: the text config first, then holders that count
        experts, since an encoder of another name has layers of its own."""
        text = self.document.get(TEXT_CONFIG)
        holders = [holder for _, holder in self.holders()]
        preferred = [text] if isinstance(text, dict) else []
        counting = [holder for holder in holders if any(map(holder.get, COUNT_KEYS))]
        for holder in (*preferred, *counting, *holders):
            for key in keys:
                if type(holder.get(key)) is int:
                    return int(holder[key])
        return None

    @cached_property
    def num_experts(self) -> int | None:
        """Logical experts of a layer, as the config says."""
        return _first_positive(self.find(COUNT_KEYS))

    @cached_property
    def top_k(self) -> int | None:
        """Routes per token; the largest, where layers differ."""
        values = [value for found in self.find(TOP_K_KEYS) for value in integers(found.value)]
        return max(values, default=None)

    @cached_property
    def num_layers(self) -> int | None:
        """Layers of the decoder, without MTP layers."""
        return self.integer("num_hidden_layers", "num_layers", "n_layers", "n_layer")

    @cached_property
    def hidden_size(self) -> int | None:
        """Length of a hidden state."""
        return self.integer("hidden_size", "d_model", "n_embd")

    @cached_property
    def model_type(self) -> str:
        """The config's own word, the text config's where only that has one; empty if none."""
        text = self.document.get(TEXT_CONFIG)
        for holder in (self.document, text if isinstance(text, dict) else {}):
            if isinstance(holder.get("model_type"), str):
                return str(holder["model_type"])
        return ""

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return any(found.value is True for found in self.find(("tie_word_embeddings",)))

    def groups(self) -> tuple[int, int | None]:
        """Expert groups, 1 where routing knows none, and how many of them are chosen."""
        return self.integer(*GROUP_KEYS) or 1, self.integer(*CHOSEN_KEYS)


def conflicts(settings: Settings, keys: tuple[str, ...]) -> Iterator[Problem]:
    """Two holders or two names of one number with two values (E01)."""
    found = settings.find(keys)
    for other in found[1:]:
        if set(integers(other.value)) != set(integers(found[0].value)):
            both = f"{show(found[0].value)} here and {show(other.value)} at {other.path}"
            code = Code.MODEL_FIELD_CONFLICT
            yield Problem(code, Phase.PARSE, found[0].path, both, "one value")


def integers(value: object) -> tuple[int, ...]:
    """The integers of a value that is one, or a list with one per layer."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if type(item) is int)


def _first_positive(found: list[Found]) -> int | None:
    return next((value for one in found for value in integers(one.value) if value), None)


def _holders(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, node
    for key, value in node.items():
        if isinstance(value, dict) and key not in NOT_MODELS:
            yield from _holders(child(path, key), value)
