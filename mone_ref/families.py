"""The architectures, as data: one row says how a family names and routes its experts.

A row holds names and defaults only. Which tensors a checkpoint must hold follows
from a row and the sizes in its config (``layout.py``); what the router does is in
``routing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterRule:
    """How router logits become weights and ids (SEM-1, SEM-2).

    ``scoring`` turns logits into scores over ALL logical experts; ``normalise``
    divides the selected scores by their sum, substituted experts included.
    """

    scoring: str
    normalise: bool


@dataclass(frozen=True)
class Family:
    """One row of the table.

    ``count_keys`` and ``top_k_keys`` are the config keys that may hold the number
    of logical experts and of routes per token; the first is the family's own.
    ``normalise_default`` is what an absent ``norm_topk_prob`` means; None where the
    family has no such key. Names are module paths below one decoder layer.
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
    count_keys: tuple[str, ...]
    top_k_keys: tuple[str, ...]
    intermediate_key: str
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
    count_keys=("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    top_k_keys=("num_experts_per_tok",),
    intermediate_key="intermediate_size",
    scoring="softmax",
    normalise_default=False,
    rms_norm_eps_default=1e-5,
    rope_theta_default=10000.0,
)

FAMILIES = (OLMOE,)


def find(architectures: list[str], model_type: str | None) -> Family | None:
    """The row that serves a config, by architecture first, then by model type."""
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    for family in FAMILIES:
        if not architectures and model_type in family.model_types:
            return family
    return None
