"""The architectures, as data: one row says how a family names and routes its experts.

A row holds names and defaults only. Which tensors a checkpoint must hold follows
from a row and the sizes in its config (``layout.py``); what the router does is in
``routing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class QkNorm(StrEnum):
    """What one norm of queries or keys spans."""

    PROJECTION = "projection"  # all heads at once, before they are split
    HEAD = "head"  # every head by itself, all with one weight
    NONE = "none"


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
    ``dense`` is the module path of the MLP of a layer without experts, None where every
    layer has experts; its projections are named like an expert's. Names are module
    paths below one decoder layer.
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
    dense: str | None
    qk_norm: QkNorm
    count_keys: tuple[str, ...]
    top_k_keys: tuple[str, ...]
    intermediate_key: str
    reads: frozenset[str]
    scoring: str
    normalise_default: bool
    rms_norm_eps_default: float
    rope_theta_default: float

    @property
    def projections(self) -> tuple[str, str, str]:
        """The three matrices of an expert: gate and up ``[I, H]``, down ``[H, I]``."""
        return (self.gate, self.up, self.down)

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
    dense=None,
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
    dense="mlp",
    qk_norm=QkNorm.HEAD,
    count_keys=("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="moe_intermediate_size",
    reads=frozenset({"head_dim", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}),
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-6,
    rope_theta_default=10000.0,
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
    dense=None,
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

FAMILIES = (OLMOE, QWEN3_MOE, MIXTRAL)


def find(architectures: list[str], model_type: str | None) -> Family | None:
    """The row that serves a config, by architecture first, then by model type."""
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    for family in FAMILIES:
        if not architectures and model_type in family.model_types:
            return family
    return None
