"""One MoE layer: routing, substitution, experts. This is SEM-1, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mone_ref import experts, routing, substitution
from mone_ref.config import LayerSubstitution
from mone_ref.experts import ExpertWeights
from mone_ref.families import RouterRule
from mone_ref.precision import Precision, product

Record = Callable[[str, Tensor], None]
"""Receives every named intermediate of a layer; the oracle's window for tests and traces."""


@dataclass
class SharedExperts:
    """Experts that every token takes, as one MLP (``ExpertWeights`` of one row).

    ``gate`` ``[1, H]`` weighs their output token by token (Qwen2-MoE); None: not weighed.
    """

    weights: ExpertWeights
    gate: Tensor | None


@dataclass
class MoeLayer:
    """Weights and declarations of one MoE layer.

    ``router`` ``[E, H]`` over all logical experts, ``constants`` ``[S, H]`` ascending;
    ``correction`` ``[E]`` is what the router chooses by beside its scores.
    """

    router: Tensor
    experts: ExpertWeights
    constants: Tensor
    substitution: LayerSubstitution
    rule: RouterRule
    top_k: int
    correction: Tensor | None = None
    shared: SharedExperts | None = None


def forward(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """``y = sum of retained w * expert(x) + sum of substituted w * v`` (SEM-1): ``[T, H]``."""
    logits = product(x, layer.router, precision)  # [T, E]
    weights, ids = routes(logits, layer, precision)  # [T, K]
    y = retained(x, weights, ids, layer, precision) + constants(weights, ids, layer, precision)
    if layer.shared is not None:
        y = y + shared(x, layer.shared, precision)

    record("moe_in", x)
    record("router_logits", logits)
    record("router_weights", weights)
    record("router_ids", ids)
    record("moe_out", y)
    return y


def routes(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Weights and ids ``[T, K]`` over ALL logical experts; substitution has no say (SEM-2)."""
    return routing.route(logits, layer.rule, layer.top_k, precision.router, layer.correction)


def retained(
    x: Tensor, weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision
) -> Tensor:
    """The first sum of SEM-1, ``[T, H]``, from routes over logical experts ``[T, K]``."""
    kept, rows = substitution.rewrite_routes(weights, ids, layer.substitution)  # [T, K]
    total = experts.weighted_sum(x, kept, rows, layer.experts, precision)  # [T, H]
    return total.to(precision.between)


def constants(weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision) -> Tensor:
    """The second sum of SEM-1, ``[T, H]``, rounded once to the dtype of activations (SEM-3)."""
    total = substitution.constant_sum(
        weights, ids, layer.constants, layer.substitution.substituted
    )  # [T, H]
    return total.to(precision.between)


def shared(x: Tensor, layer: SharedExperts, precision: Precision) -> Tensor:
    """What shared experts add to every token, whatever it was routed to (SEM-7): ``[T, H]``."""
    y = experts.mlp(x, layer.weights, 0, precision)  # [T, H]
    if layer.gate is None:
        return y
    return y * torch.sigmoid(product(x, layer.gate, precision))  # [T, H] * [T, 1]
