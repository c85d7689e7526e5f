"""One MoE layer of transformers without a model: OLMoE's router and substituted experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mone_ref import layer as layers
from mone_ref.backend import LayerSession, LayerSpec
from mone_ref.config import LayerSubstitution
from mone_ref.families import OLMOE
from mone_ref.integrations import substituted_experts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersLayer(LayerSession):
    """The router and the experts of ``OlmoeSparseMoeBlock``."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, Tensor]) -> None:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

        config = OlmoeConfig(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_experts=spec.num_logical_experts,
            num_experts_per_tok=spec.top_k,
            norm_topk_prob=spec.normalise,
        )
        config._experts_implementation = "eager"
        with torch.device("meta"):
            block = OlmoeSparseMoeBlock(config)
        self.router, self.experts = block.gate, block.experts
        entry = layers.own_entry(spec)
        if entry.substituted:
            substituted_experts.substitute(self.experts, entry)
        self.experts.load_state_dict(_layer_parameters(spec, tensors, entry), assign=True)
        # logits in, logits out: the router's product with an identity is exact
        self.router.hidden_dim = spec.num_logical_experts
        self.router.weight = nn.Parameter(torch.eye(spec.num_logical_experts))

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Route the given logits, then as ``forward_routed``."""
        with torch.inference_mode():
            _, weights, ids = self.router.to(router_logits.dtype)(router_logits)  # [T, K]
        return self.forward_routed(hidden_states, weights, ids)

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """``[T, H]`` and routes ``[T, K]`` -> ``[T, H]``."""
        with torch.inference_mode():
            y: Tensor = self.experts(hidden_states, topk_ids.long(), topk_weights)
        return y

    def expert_rows(self) -> int:
        """Rows of the stacked weights."""
        return len(self.experts.down_proj)


def _layer_parameters(
    spec: LayerSpec, tensors: Mapping[str, Tensor], entry: LayerSubstitution
) -> dict[str, Tensor]:
    """Parameters of one experts module, from tensors named as in an OLMoE checkpoint."""
    dtype = DTYPES[spec.dtype]

    def read(expert: int, part: str) -> Tensor:
        return tensors[f"{spec.path}.{expert}.{part}"].to(dtype)

    def matrices(*projections: str) -> Tensor:
        return torch.stack(
            [
                torch.cat([read(expert, f"{part}.weight") for part in projections])
                for expert in entry.retained
            ]
        )

    gate_up, down = substituted_experts.STACKS
    parameters = {gate_up: matrices(OLMOE.gate, OLMOE.up), down: matrices(OLMOE.down)}
    if entry.substituted:
        values = [read(expert, OLMOE.constant) for expert in entry.substituted]
        parameters |= {"constants": torch.stack(values)} | substituted_experts.tables(entry)
    return parameters
