"""The model part of config.json: sizes and readings of the decoder (FMT-1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mone_ref import families, rope_config, router_config
from mone_ref.errors import Code, show
from mone_ref.families import DenseRule, Family, QkNorm, RouterRule
from mone_ref.fields import ROOT, Fields, same
from mone_ref.rope_config import Rope

MAX_EXPERTS = 2**18
"""Most experts over all layers, ten times any model: bounds what a config can make us build."""

STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")

# What the model must not ask for: key -> values that change nothing. A family that reads a
# key is free of its line. No family here has all of them; an engine that knows one from
# another family may honour it.
FEATURES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "clip_qkv": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "dual_chunk_attention_config": (),
    "partial_rotary_factor": (1.0,),
    "mlp_bias": (False,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1.0,),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "qkv_bias": (False,),
    "rotary_dim": (),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "num_nextn_predict_layers": (0,),
}

SAME_TENSORS = frozenset(
    {
        "hidden_act",
        "clip_qkv",
        "sliding_window",
        "use_sliding_window",
        "dual_chunk_attention_config",
        "partial_rotary_factor",
        "routed_scaling_factor",
        "norm_topk_prob",
    }
)
"""Features that change what is computed and not what is stored: the tensors can be checked."""


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention.

    ``rank`` is the latent's of keys and values, ``query_rank`` that of queries, 0 where they
    have none. A head is ``plain + rotated`` wide in queries and keys, ``value`` in values.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and readings of a decoder, resolved against its family's row.

    ``intermediate_size`` is an expert's; ``dense_intermediate_size`` that of the layers
    without experts, ``dense_layers``, and 0 where there are none;
    ``shared_intermediate_size`` that of all shared experts together, 0 without any.
    ``head_dim`` is the width of queries and keys; ``latent`` is None with plain attention.
    ``max_positions`` is the longest sequence that the model is made for, None where it is not said.
    """

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
    dense_layers: frozenset[int]
    dense_intermediate_size: int
    router: RouterRule
    rms_norm_eps: float
    rope: Rope
    qk_norm: QkNorm
    attention_bias: bool
    latent: Latent | None
    shared_intermediate_size: int
    clip_qkv: float | None
    tie_word_embeddings: bool
    stored_dtype: str
    max_positions: int | None

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers that have experts, ascending."""
        return [layer for layer in range(self.num_layers) if layer not in self.dense_layers]


def find_family(fields: Fields) -> Family | None:
    """The family's row, by ``architectures`` (top level first), else by ``model_type``."""
    named: list[str] = []
    for found in fields.find("architectures"):
        if isinstance(found.value, list) and all(isinstance(name, str) for name in found.value):
            named = found.value
        else:
            fields.wrong(found, "an array of strings")
    types: list[str] = []
    for found in fields.find("model_type"):
        if isinstance(found.value, str):
            types.append(found.value)
        else:
            fields.wrong(found, "a string")
    family = families.find(named, types[0] if types else None)
    if reason := next((families.REFUSED[name] for name in named if name in families.REFUSED), ""):
        fields.report(Code.UNKNOWN_FAMILY, f"{ROOT}.architectures", reason, "another architecture")
    elif family is None:
        known = ", ".join(name for row in families.FAMILIES for name in row.architectures)
        seen = f"architectures {show(named)}, model_type {show(types)}"
        fields.report(Code.UNKNOWN_FAMILY, f"{ROOT}.architectures", seen, f"one of {known}")
    elif types and not set(types) & set(family.model_types):
        seen = f"{show(types[0])} with architectures {show(named)}"
        expected = " or ".join(family.model_types)
        fields.report(Code.MODEL_FIELD_CONFLICT, f"{ROOT}.model_type", seen, expected)
    return family


# -- sizes


def read_sizes(fields: Fields, family: Family) -> dict[str, int]:
    """Sizes under their names in ``ModelConfig``; those with a problem are absent."""
    heads = fields.size("num_attention_heads")
    # Where the key is not optional, libraries fill in a count of their own (Qwen3: 4).
    one_each = (heads or 1) if "num_key_value_heads" in family.reads else None
    read = {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "intermediate_size": fields.size(family.intermediate_key),
        "num_layers": fields.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.size("num_key_value_heads", default=one_each),
        "num_experts": fields.size(*family.count_keys, clause="FMT-1"),
        "top_k": fields.size(*family.top_k_keys),
    }
    sizes = {name: size for name, size in read.items() if size is not None}
    head_dim = _read_head_dim(fields, family, sizes)
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    _check_kv_heads(fields, sizes)
    _check_experts(fields, family, sizes)
    return sizes


def _read_head_dim(fields: Fields, family: Family, sizes: dict[str, int]) -> int | None:
    """Size of one head: the config's own in families that have the key, else hidden / heads.

    Rope needs an even size.
    """
    if family.latent:
        return None  # its sizes are keys of their own
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_heads")
    if "head_dim" in family.reads and fields.find("head_dim"):
        head_dim = fields.size("head_dim")
        if head_dim is not None and head_dim % 2:
            _inconsistent(fields, ("head_dim",), head_dim, "an even size")
        return head_dim
    if not hidden or not heads:
        return None
    if hidden % heads:
        _inconsistent(fields, ("hidden_size",), hidden, f"a multiple of {heads} heads")
    elif hidden // heads % 2:
        expected = f"{heads} heads of an even size each"
        _inconsistent(fields, ("hidden_size",), hidden, expected)
    for found in fields.find("head_dim"):
        if type(found.value) is not int or found.value * heads != hidden:
            expected = f"hidden_size / num_attention_heads = {hidden} / {heads}"
            fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected)
    return hidden // heads


def read_dense_layers(fields: Fields, family: Family, sizes: dict[str, int]) -> frozenset[int]:
    """The layers without experts, by the rule of the family.

    An index outside the model may stand in ``mlp_only_layers``, and changes nothing.
    """
    layers = range(min(sizes.get("num_layers", 0), MAX_EXPERTS))  # more were refused already
    if family.dense_rule is DenseRule.NONE:
        return frozenset()
    if family.dense_rule is DenseRule.FIRST:
        return frozenset(layers[: _count(fields, family, "first_k_dense_replace")])
    step = fields.size("decoder_sparse_step", default=1)
    named = fields.agree(fields.find("mlp_only_layers"))
    if named is not None and not (
        isinstance(named.value, list) and all(type(layer) is int for layer in named.value)
    ):
        fields.wrong(named, "an array of layer indices")
        return frozenset()
    dense = set(named.value) if named else set()
    return frozenset(i for i in layers if i in dense or (step and (i + 1) % step))


def count_stored_layers(fields: Fields, family: Family, sizes: dict[str, int]) -> int | None:
    """Layers in the decoder's stack, with the MTP layers that are stored behind its own."""
    mtp = "num_nextn_predict_layers"
    extra = _count(fields, family, mtp) if mtp in family.reads else 0
    return sizes["num_layers"] + extra if "num_layers" in sizes else None


def _count(fields: Fields, family: Family, key: str) -> int:
    """A number of things, of which there may be none; the family's own where it is absent."""
    found = fields.agree(fields.find(key))
    if found is None:
        return int(family.defaults.get(key, 0))
    if type(found.value) is int and 0 <= found.value <= MAX_EXPERTS:
        return found.value
    fields.wrong(found, f"an integer from 0 to {MAX_EXPERTS}")
    return 0


def _check_kv_heads(fields: Fields, sizes: dict[str, int]) -> None:
    """Every key-value head serves as many heads as any other."""
    heads, kv_heads = sizes.get("num_heads"), sizes.get("num_kv_heads")
    if heads and kv_heads and heads % kv_heads:
        _inconsistent(fields, ("num_key_value_heads",), kv_heads, f"a divisor of {heads} heads")


def _check_experts(fields: Fields, family: Family, sizes: dict[str, int]) -> None:
    """No more routes than experts, and no more experts than any model has."""
    experts = sizes.get("num_experts")
    if not experts:
        return
    top_k, layers = sizes.get("top_k", 1), sizes.get("num_layers", 1)
    if top_k > experts:
        _inconsistent(fields, family.top_k_keys, top_k, f"at most {experts} experts")
    if experts * layers > MAX_EXPERTS:
        expected = f"at most {MAX_EXPERTS} experts over all layers"
        _inconsistent(fields, family.count_keys, experts, expected)


def _inconsistent(fields: Fields, keys: tuple[str, ...], size: int, expected: str) -> None:
    """A size that is sound alone and does not fit another one."""
    fields.report(Code.MODEL_FIELD, fields.find(*keys)[0].path, str(size), expected)


# -- everything else about the model


def read(
    fields: Fields, family: Family, sizes: dict[str, int], dense_layers: frozenset[int]
) -> ModelConfig | None:
    """The model, or None with the problems in ``fields``.

    ``sizes`` and ``dense_layers`` as ``read_sizes`` and ``read_dense_layers`` gave them.
    """
    _check_features(fields, family)
    router = router_config.read(fields, family, sizes.get("num_experts"), sizes.get("top_k"))
    latent = _read_latent(fields) if family.latent else None
    rotated = latent.rotated if latent else sizes.get("head_dim", 2)
    rope = rope_config.read(fields, family, rotated)
    dense_size = fields.size("intermediate_size") if dense_layers else None
    shared_size = _read_shared_size(fields, family, sizes)
    eps = fields.positive(fields.agree(fields.find("rms_norm_eps")))
    clip_qkv = None
    if "clip_qkv" in family.reads:
        clip_qkv = fields.positive(fields.agree(fields.find("clip_qkv")))
    normed = _flag(fields, family, "use_qk_norm", True)
    biased = bool(family.attention_bias) and _flag(fields, family, family.attention_bias, False)
    tied = _read_tied(fields)
    dtype = _read_dtype(fields)
    if fields.errors:
        return None
    if latent:
        sizes = sizes | {"head_dim": latent.plain + latent.rotated}
    return ModelConfig(
        family=family,
        **sizes,
        dense_layers=dense_layers,
        dense_intermediate_size=dense_size or 0,
        router=router,
        rms_norm_eps=family.rms_norm_eps_default if eps is None else eps,
        rope=rope,
        qk_norm=family.qk_norm if normed else QkNorm.NONE,
        attention_bias=biased,
        latent=latent,
        shared_intermediate_size=shared_size,
        clip_qkv=clip_qkv,
        tie_word_embeddings=tied,
        stored_dtype=dtype,
        max_positions=_read_max_positions(fields),
    )


def _flag(fields: Fields, family: Family, key: str, otherwise: bool) -> bool:
    """A flag of a family that reads it; ``otherwise`` in every other family."""
    if key not in family.reads:
        return otherwise
    return fields.flag(key, bool(family.defaults[key]))


def _read_tied(fields: Fields) -> bool:
    """Whether the head is the embedding. The outermost word counts: libraries write their default
    into the text config of a multimodal model, and tie by what the model says."""
    for found in reversed(fields.find("tie_word_embeddings")):
        if isinstance(found.value, bool):
            return found.value
        fields.wrong(found, "true or false")
    return False


def _read_max_positions(fields: Fields) -> int | None:
    """The longest sequence, where a config says one. Nothing that is computed depends on it, so
    that a value that cannot be one makes no checkpoint wrong."""
    said = (found.value for found in fields.find("max_position_embeddings"))
    return next((value for value in said if type(value) is int and value > 0), None)


def _read_latent(fields: Fields) -> Latent:
    """Sizes of latent attention; a size with a problem is 0."""
    rotated = fields.size("qk_rope_head_dim") or 0
    if rotated % 2:
        _inconsistent(fields, ("qk_rope_head_dim",), rotated, "an even size")
    has_query_rank = bool(fields.find("q_lora_rank"))
    return Latent(
        query_rank=(fields.size("q_lora_rank") or 0) if has_query_rank else 0,
        rank=fields.size("kv_lora_rank") or 0,
        plain=fields.size("qk_nope_head_dim") or 0,
        rotated=rotated,
        value=fields.size("v_head_dim") or 0,
    )


def _read_shared_size(fields: Fields, family: Family, sizes: dict[str, int]) -> int:
    """Intermediate size of all shared experts together: their own, or a count of experts'."""
    if "shared_expert_intermediate_size" in family.reads:
        return fields.size("shared_expert_intermediate_size") or 0
    if "n_shared_experts" in family.reads:
        count = _count(fields, family, "n_shared_experts")
        return count * sizes.get("intermediate_size", 0)
    return 0


def _check_features(fields: Fields, family: Family) -> None:
    """Refuse what this model does not compute."""
    features = FEATURES | {"norm_topk_prob": (family.normalise_default,)}
    for key, accepted in features.items():
        for found in [] if key in family.reads else fields.find(key):
            if not any(same(found.value, value) for value in accepted):
                expected = " or ".join(["null", *map(show, accepted)])
                if key in SAME_TENSORS:
                    fields.limit(found, expected)
                else:
                    fields.report(Code.MODEL_FEATURE, found.path, show(found.value), expected)


def _read_dtype(fields: Fields) -> str:
    """Dtype that the config declares for its weights: ``dtype``, or ``torch_dtype`` before it."""
    found = fields.agree(fields.find("dtype", "torch_dtype"))
    if found is None:
        return STORED_DTYPES[0]
    if isinstance(found.value, str) and found.value in STORED_DTYPES:
        return found.value
    fields.wrong(found, f"one of {', '.join(STORED_DTYPES)}")
    return STORED_DTYPES[0]
