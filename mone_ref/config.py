"""config.json -> what to build (``ModelConfig``) and what to substitute (``Substitution``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mone_ref import declaration, families, strict_json
from mone_ref.declaration import LayerSubstitution as LayerSubstitution
from mone_ref.declaration import Substitution as Substitution
from mone_ref.errors import Code, Phase, Problem, Rejected, show
from mone_ref.families import Family, RouterRule
from mone_ref.fields import ROOT, Fields, Found, same
from mone_ref.strict_json import StrictJsonError, child

FILE = "config.json"
MAX_BYTES = 16 * 2**20
"""Largest file that is read. The config of a model with 10^5 substituted experts is under 1 MiB."""

MAX_EXPERTS = 2**18
"""Most experts over all layers, ten times any model: bounds what a config can make us build."""

STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")

# What the model must not ask for: key -> values that change nothing. OLMoE itself has only
# the first few; an engine that knows the others from other families may honour them.
FEATURES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "sliding_window": (),
    "partial_rotary_factor": (1.0,),
    "mlp_bias": (False,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1.0,),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "num_nextn_predict_layers": (0,),
}

ROPE_PLAIN = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
"""Members of ``rope_parameters`` and ``rope_scaling``, with the values that change nothing."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and readings of a decoder, resolved against its family's row."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    router: RouterRule
    rms_norm_eps: float
    rope_theta: float
    clip_qkv: float | None
    tie_word_embeddings: bool
    stored_dtype: str


@dataclass(frozen=True)
class Config:
    """A config that was read without an error. ``findings`` holds warnings and notes."""

    model: ModelConfig
    substitution: Substitution
    findings: tuple[Problem, ...]


def read(directory: Path) -> Config:
    """Read ``directory/config.json``.

    Raises ``Rejected`` with every error in the file: ``CHECKPOINT`` when there is no
    file to read, then the codes of ``parse``.
    """
    path = directory / FILE
    try:
        if not directory.is_dir():
            raise _unread(Code.NOT_A_CHECKPOINT, show(str(directory)), "a directory")
        if not path.exists():
            raise _unread(Code.NO_CONFIG, "no such file", f"a file {FILE}")
        if not path.is_file():
            raise _unread(Code.UNREADABLE, "a directory or a device", "a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unread(Code.UNREADABLE, show(error.strerror), "a readable file") from None
    if len(data) > MAX_BYTES:
        raise _unread(Code.UNREADABLE, "more bytes", f"at most {MAX_BYTES} bytes")
    return parse(data)


def _unread(code: Code, found: str, expected: str) -> Rejected:
    return Rejected([Problem(code, Phase.PARSE, ROOT, found, expected)])


def parse(text: bytes, file: str = FILE) -> Config:
    """Read a config from its bytes; ``file`` is its name in messages.

    Raises ``Rejected`` with every error: ``CONFIG_JSON`` (FMT-22), ``CONFIG_MODEL``
    (FMT-1), ``SUBSTITUTION`` (FMT-2 to FMT-26). All are noticed at ``parse``.
    """
    fields = _open(text, file)
    family = _find_family(fields)
    sizes = _read_sizes(fields, family) if family else {}
    model = _read_model(fields, family, sizes) if family else None
    listed = declaration.read(
        fields, sizes.get("num_hidden_layers"), sizes.get(family.count_keys[0]) if family else None
    )
    if fields.errors or model is None:
        raise Rejected(fields.errors)
    substitution = declaration.bind(listed, model.family, model.num_experts)
    return Config(model, substitution, tuple(fields.problems))


def _open(text: bytes, file: str) -> Fields:
    """The top-level object; a repeated key is an error, and reading goes on with its last value."""
    try:
        parsed = strict_json.parse(text)
    except StrictJsonError as error:
        problem = Problem(Code.JSON_SYNTAX, Phase.PARSE, ROOT, str(error), "a JSON document", file)
        raise Rejected([problem]) from None
    if not isinstance(parsed.value, dict):
        code, found = Code.JSON_NOT_OBJECT, show(parsed.value)
        raise Rejected([Problem(code, Phase.PARSE, ROOT, found, "a JSON object", file)])
    fields = Fields(parsed.value, file)
    for path in parsed.duplicates:
        fields.report(Code.JSON_DUPLICATE_KEY, path, "the key again", "each key once", "FMT-22")
    return fields


def _find_family(fields: Fields) -> Family | None:
    """The family's row, by ``architectures`` (top level first), else by ``model_type``."""
    named: list[str] = []
    for found in fields.find("architectures"):
        if isinstance(found.value, list) and all(isinstance(name, str) for name in found.value):
            named = found.value
        else:
            fields.wrong(found, "an array of strings")
    types = [found.value for found in fields.find("model_type") if isinstance(found.value, str)]
    family = families.find(named, types[0] if types else None)
    if family is None:
        known = ", ".join(name for row in families.FAMILIES for name in row.architectures)
        seen = f"architectures {show(named)}, model_type {show(types)}"
        fields.report(Code.UNKNOWN_FAMILY, f"{ROOT}.architectures", seen, f"one of {known}")
    elif types and not set(types) & set(family.model_types):
        seen = f"{show(types[0])} with architectures {show(named)}"
        expected = " or ".join(family.model_types)
        fields.report(Code.MODEL_FIELD_CONFLICT, f"{ROOT}.model_type", seen, expected)
    return family


# -- sizes


def _read_sizes(fields: Fields, family: Family) -> dict[str, int]:
    """Sizes by config key (the family's own key where there are several); wrong ones are absent."""
    experts, top_k = family.count_keys[0], family.top_k_keys[0]
    heads = fields.size("num_attention_heads")
    read = {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        family.intermediate_key: fields.size(family.intermediate_key),
        "num_hidden_layers": fields.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("num_key_value_heads", default=heads or 1),
        experts: fields.size(*family.count_keys, clause="FMT-1"),
        top_k: fields.size(*family.top_k_keys),
    }
    sizes = {key: size for key, size in read.items() if size is not None}
    _check_multiples(fields, sizes)
    _check_bounds(fields, sizes, experts, top_k)
    return sizes


def _check_multiples(fields: Fields, sizes: dict[str, int]) -> None:
    """Heads divide the hidden size, key-value heads divide the heads, rope needs even heads."""
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    kv_heads = sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        _disagree(fields, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if not hidden or not heads:
        return
    if hidden % heads:
        _disagree(fields, "hidden_size", hidden, f"a multiple of {heads} heads")
    elif hidden // heads % 2:
        _disagree(fields, "hidden_size", hidden, f"an even size for each of {heads} heads")
    for found in fields.find("head_dim"):
        if type(found.value) is not int or found.value * heads != hidden:
            expected = f"hidden_size / num_attention_heads = {hidden} / {heads}"
            fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected)


def _check_bounds(fields: Fields, sizes: dict[str, int], experts: str, top_k: str) -> None:
    """No more routes than experts; no more experts than any model could have."""
    if experts not in sizes:
        return
    count = sizes[experts]
    if sizes.get(top_k, 1) > count:
        _disagree(fields, top_k, sizes[top_k], f"at most {count} experts")
    if count * sizes.get("num_hidden_layers", 1) > MAX_EXPERTS:
        _disagree(fields, experts, count, f"at most {MAX_EXPERTS} experts over all layers")


def _disagree(fields: Fields, key: str, size: int, expected: str) -> None:
    where = next((found.path for found in fields.find(key)), child(ROOT, key))
    fields.report(Code.MODEL_FIELD, where, str(size), expected)


# -- everything else about the model


def _read_model(fields: Fields, family: Family, sizes: dict[str, int]) -> ModelConfig | None:
    """The model, or None when a size is unknown; other problems are on record in ``fields``."""
    _check_features(fields)
    normalise = fields.flag("norm_topk_prob", family.normalise_default)
    eps = fields.positive(fields.agree(fields.find("rms_norm_eps")))
    theta = _read_rope_theta(fields)
    clip_qkv = fields.positive(fields.agree(fields.find("clip_qkv")))
    tied = fields.flag("tie_word_embeddings", False)
    dtype = _read_dtype(fields)
    try:
        return ModelConfig(
            family=family,
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes[family.intermediate_key],
            num_layers=sizes["num_hidden_layers"],
            num_heads=sizes["num_attention_heads"],
            num_kv_heads=sizes["num_key_value_heads"],
            head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
            num_experts=sizes[family.count_keys[0]],
            top_k=sizes[family.top_k_keys[0]],
            router=RouterRule(family.scoring, normalise),
            rms_norm_eps=family.rms_norm_eps_default if eps is None else eps,
            rope_theta=family.rope_theta_default if theta is None else theta,
            clip_qkv=clip_qkv,
            tie_word_embeddings=tied,
            stored_dtype=dtype,
        )
    except KeyError:
        return None


def _check_features(fields: Fields) -> None:
    """Refuse what this model does not compute, quantisation included (CAP-8)."""
    for key, accepted in FEATURES.items():
        for found in fields.find(key):
            if not any(same(found.value, value) for value in accepted):
                expected = " or ".join(["null", *map(show, accepted)])
                fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected)
    quantised = fields.find("quantization_config")
    for found in fields.find("compression_config"):
        if isinstance(found.value, dict):
            quantised += [
                Found(child(found.path, key), found.value[key])
                for key in ("quant_method", "config_groups")
                if found.value.get(key)
            ]
    for found in quantised:
        expected = "null: quantised weights are not supported"
        fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected, "CAP-8")


def _read_rope_theta(fields: Fields) -> float | None:
    """Base of the rotary embedding: a plain field, or one of ``rope_parameters``."""
    thetas = fields.find("rope_theta")
    for block in fields.find("rope_parameters", "rope_scaling"):
        if not isinstance(block.value, dict):
            fields.wrong(block, "a JSON object")
            continue
        members = {
            key: Found(child(block.path, key), value)
            for key, value in block.value.items()
            if value is not None
        }
        for key, plain in ROPE_PLAIN.items():
            if key in members and not same(members[key].value, plain):
                expected = f"{plain}: only plain rotary embeddings are computed"
                where, found = members[key].path, show(members[key].value)
                fields.report(Code.MODEL_FEATURE, where, found, expected)
        if "rope_theta" in members:
            thetas.append(members["rope_theta"])
    return fields.positive(fields.agree(thetas))


def _read_dtype(fields: Fields) -> str:
    """Dtype that the config declares for its weights: ``dtype``, or ``torch_dtype`` before it."""
    found = fields.agree(fields.find("dtype", "torch_dtype"))
    if found is None:
        return STORED_DTYPES[0]
    if isinstance(found.value, str) and found.value in STORED_DTYPES:
        return found.value
    fields.wrong(found, f"one of {', '.join(STORED_DTYPES)}")
    return STORED_DTYPES[0]
