"""The architectures, as data: one row says how a family names and routes its experts.

A row holds names and defaults only. Which tensors a checkpoint must hold follows
from a row and the sizes in its config (``layout.py``); what the router does is in
``routing.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class QkNorm(StrEnum):
    """What one norm of queries or keys spans."""

    PROJECTION = "projection"  # all heads at once, before they are split
    HEAD = "head"  # every head by itself, all with one weight
    NONE = "none"


class DenseRule(StrEnum):
    """Which layers have one dense MLP in place of experts."""

    NONE = "none"  # no layer
    STEP = "step"  # all but every decoder_sparse_step-th, and those in mlp_only_layers
    FIRST = "first"  # the first first_k_dense_replace layers


@dataclass(frozen=True)
class Groups:
    """Experts in ``count`` equal groups, of which ``chosen`` may be routed to.

    A group stands by the sum of its ``best`` highest scores.
    """

    count: int
    chosen: int
    best: int


@dataclass(frozen=True)
class RouterRule:
    """How router logits become weights and ids (SEM-1, SEM-2).

    ``scoring`` turns logits into scores over ALL logical experts; ``groups`` limits the
    choice; ``normalise`` divides the selected scores by their sum, substituted experts
    included; ``scaling_factor`` multiplies the weights after that.
    """

    scoring: str
    normalise: bool
    scaling_factor: float = 1.0
    groups: Groups | None = None


@dataclass(frozen=True)
class Family:
    """One row of the table.

    ``count_keys`` and ``top_k_keys`` are the config keys that may hold the number
    of logical experts and of routes per token; the first is the family's own.
    ``reads`` are the optional keys that the family knows: any other key that would
    change the model is refused. ``normalise_default`` is what an absent
    ``norm_topk_prob`` means, or always holds where the family does not read that key.
    ``dense`` is the module path of the MLP of a layer without experts; its projections,
    and those of the ``shared`` experts, are named like an expert's. Names are module
    paths below one decoder layer.

    Fields with a default are what not every family has: see ``ModelConfig`` for what the
    config may say about them. ``group_best`` is how many of a group's highest scores it
    stands by, ``attention_bias`` the config key that gives queries, keys and values their
    biases, ``latent`` whether attention is multi-head latent attention. ``defaults`` are
    what absent keys mean.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    stack: str
    router: str
    experts: str
    gate: str
    up: str
    down: str
    constant: str
    qk_norm: QkNorm
    count_keys: tuple[str, ...]
    top_k_keys: tuple[str, ...]
    intermediate_key: str
    reads: frozenset[str]
    scoring: str
    normalise_default: bool
    rms_norm_eps_default: float
    rope_theta_default: float
    dense_rule: DenseRule = DenseRule.NONE
    dense: str = "mlp"
    shared: str = ""
    shared_gate: str = ""
    correction_bias: str = ""
    group_best: int = 0
    attention_bias: str = ""
    latent: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def projections(self) -> tuple[str, str, str]:
        """The three matrices of an expert: gate and up ``[I, H]``, down ``[H, I]``."""
        return (self.gate, self.up, self.down)

    @property
    def root(self) -> str:
        """Module path of the decoder: ``model``."""
        return self.stack.rpartition(".")[0]

    @property
    def embedding_name(self) -> str:
        """Tensor name of the embedding ``[V, H]``."""
        return f"{self.root}.embed_tokens.weight"

    @property
    def norm_name(self) -> str:
        """Tensor name of the last norm ``[H]``."""
        return f"{self.root}.norm.weight"

    def layer_prefix(self, layer: int) -> str:
        """``model.layers.3``"""
        return f"{self.stack}.{layer}"

    def router_name(self, layer: int) -> str:
        """Tensor name of the router weight ``[E, H]``."""
        return f"{self.layer_prefix(layer)}.{self.router}.weight"

    def experts_path(self, layer: int) -> str:
        """Module path of a layer's experts: ``model.layers.3.mlp.experts``."""
        return f"{self.layer_prefix(layer)}.{self.experts}"

    def projection_name(self, layer: int, expert: int, projection: str) -> str:
        """Tensor name of one expert matrix, by logical id (FMT-4)."""
        return f"{self.experts_path(layer)}.{expert}.{projection}.weight"

    def dense_name(self, layer: int, projection: str) -> str:
        """Tensor name of one matrix of a layer without experts."""
        return f"{self.layer_prefix(layer)}.{self.dense}.{projection}.weight"

    def mlp_names(self, path: str) -> tuple[str, str, str]:
        """Tensor names of gate, up and down below a module path, of an expert or any other MLP."""
        gate, up, down = (f"{path}.{name}.weight" for name in self.projections)
        return gate, up, down

    def constant_name(self, layer: int, expert: int) -> str:
        """Tensor name of a constant in the approx form (FMT-5)."""
        return f"{self.experts_path(layer)}.{expert}.{self.constant}"


# norm_topk_prob: the config decides, as in transformers. vLLM 0.33 never normalises
# OLMoE (its layer hard-codes it), so fixtures keep the default, false.
OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_types=("olmoe",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.PROJECTION,
    count_keys=("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="intermediate_size",
    reads=frozenset({"num_key_value_heads", "norm_topk_prob", "clip_qkv"}),
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-5,
    rope_theta_default=10000.0,
)

# Layer i has experts when (i + 1) % decoder_sparse_step == 0 and i is not in
# mlp_only_layers; the other layers are dense, with an MLP of intermediate_size.
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.HEAD,
    count_keys=("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset({"head_dim", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}),
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-6,
    rope_theta_default=10000.0,
    dense_rule=DenseRule.STEP,
)

# Mixtral has no norm_topk_prob and always normalises. The authors take the top-k logits
# and the softmax of those; softmax over all, top-k, normalise is the same function, since
# the common denominator cancels: exp(z_i) / sum of the selected exp(z_j).
MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    stack="model.layers",
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    constant="approx_value",
    qk_norm=QkNorm.NONE,
    count_keys=("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="intermediate_size",
    reads=frozenset({"head_dim"}),
    scoring="softmax",
    normalise_default=True,
    rms_norm_eps_default=1e-5,
    rope_theta_default=1e6,
)

# As Qwen3-MoE, with a shared expert behind a sigmoid gate, and biases on queries, keys and values.
# Published configs name a sliding_window beside use_sliding_window: false, which switches it off.
QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_types=("qwen2_moe",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.NONE,
    count_keys=("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset(
        {
            "num_key_value_heads",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
            "shared_expert_intermediate_size",
            "qkv_bias",
            "sliding_window",
        }
    ),
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-6,
    rope_theta_default=10000.0,
    dense_rule=DenseRule.STEP,
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    attention_bias="qkv_bias",
    defaults={"qkv_bias": True},
)

# Half of every head is rotated; the correction bias is always there, groups only if asked for.
GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.HEAD,
    count_keys=("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset(
        {
            "head_dim",
            "norm_topk_prob",
            "first_k_dense_replace",
            "n_shared_experts",
            "n_group",
            "routed_scaling_factor",
            "attention_bias",
            "use_qk_norm",
            "partial_rotary_factor",
            "num_nextn_predict_layers",
        }
    ),
    scoring="sigmoid",
    normalise_default=True,
    rms_norm_eps_default=1e-5,
    rope_theta_default=10000.0,
    dense_rule=DenseRule.FIRST,
    shared="mlp.shared_experts",
    correction_bias="mlp.gate.e_score_correction_bias",
    group_best=2,
    attention_bias="attention_bias",
    defaults={
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
)

# norm_topk_prob with a scaling factor is read in three ways: transformers ignores the
# normalisation, the authors' code does either, vLLM both. Ours is the common order of the
# other families, normalise then scale; fixtures ask for one of the two only.
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.NONE,
    count_keys=("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset(
        {
            "num_key_value_heads",
            "norm_topk_prob",
            "first_k_dense_replace",
            "n_shared_experts",
            "n_group",
            "topk_method",
            "routed_scaling_factor",
            "rope_scaling",
        }
    ),
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-6,
    rope_theta_default=10000.0,
    dense_rule=DenseRule.FIRST,
    shared="mlp.shared_experts",
    group_best=1,
    latent=True,
    defaults={"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
)

# Published configs say topk_method "noaux_tc" and scoring_func "sigmoid"; both are read, and no
# other value is known.
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    stack="model.layers",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    constant="approx_value",
    qk_norm=QkNorm.NONE,
    count_keys=("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset(
        {
            "num_key_value_heads",
            "norm_topk_prob",
            "first_k_dense_replace",
            "n_shared_experts",
            "n_group",
            "topk_method",
            "scoring_func",
            "routed_scaling_factor",
            "rope_scaling",
            "rope_interleave",
            "num_nextn_predict_layers",
        }
    ),
    scoring="sigmoid",
    normalise_default=True,
    rms_norm_eps_default=1e-6,
    rope_theta_default=10000.0,
    dense_rule=DenseRule.FIRST,
    shared="mlp.shared_experts",
    correction_bias="mlp.gate.e_score_correction_bias",
    group_best=2,
    latent=True,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)

# The bias lies beside the router, not below it; rotary_dim may stand for partial_rotary_factor.
MINIMAX_M2 = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    stack="model.layers",
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    constant="approx_value",
    qk_norm=QkNorm.PROJECTION,
    count_keys=("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="intermediate_size",
    reads=frozenset({"head_dim", "scoring_func", "partial_rotary_factor", "rotary_dim"}),
    scoring="sigmoid",
    normalise_default=True,
    rms_norm_eps_default=1e-6,
    rope_theta_default=5e6,
    correction_bias="block_sparse_moe.e_score_correction_bias",
    defaults={"partial_rotary_factor": 1.0},
)

# The text decoder of a multimodal model is Qwen3-MoE below an outer prefix, its sizes in
# text_config. Text tokens have one position on all three of its rotary axes, which is plain rope.
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    stack="model.language_model.layers",
    rope_theta_default=5e5,
)

FAMILIES = (
    OLMOE,
    QWEN3_MOE,
    MIXTRAL,
    QWEN2_MOE,
    GLM4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MINIMAX_M2,
    QWEN3_VL_MOE,
)

MULTIMODAL = QWEN3_VL_MOE.architectures
"""Architectures of which the decoder is a part."""

LLAMA4 = "weighs the input of an expert, so that a constant would have no router weight"
GPT_OSS = "stores experts in a layout of its own, with biases"
REFUSED = {
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "GptOssForCausalLM": GPT_OSS,
}
"""Architectures whose experts cannot be substituted by this format, and why."""


def find(architectures: list[str], model_type: str | None) -> Family | None:
    """The row that serves a config, by architecture first, then by model type."""
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    for family in FAMILIES:
        if not architectures and model_type in family.model_types:
            return family
    return None
