"""Router logits -> the routes of each token: ``(weights, ids)``, both ``[T, K]``.

Routing knows nothing of substitution: it scores and selects among ALL logical
experts, and what it returns is what every route is paid with (SEM-2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mone_ref.families import RouterRule


def route(
    router_logits: Tensor, rule: RouterRule, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Route each token by its family's rule (SEM-1, SEM-2).

    ``router_logits`` ``[T, E]`` over all logical experts, ``dtype`` in which scores are
    formed. Returns weights ``[T, K]`` in ``dtype`` and logical ids ``[T, K]`` int64, best
    score first. A row with a NaN logit keeps distinct ids and NaN weights; no other row
    sees it.
    """
    probabilities = score(router_logits, rule, dtype)  # [T, E]
    weights, ids = select(probabilities, top_k)  # [T, K]
    if rule.normalise:
        weights = normalise(weights)  # [T, K]
    return weights, ids


def score(router_logits: Tensor, rule: RouterRule, dtype: torch.dtype) -> Tensor:
    """Scores over all logical experts, ``[T, E]``. Raises ``ValueError`` on an unknown rule."""
    if rule.scoring != "softmax":
        raise ValueError(f"unknown scoring {rule.scoring!r}")
    return torch.softmax(router_logits.to(dtype), dim=-1)  # [T, E]


def select(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best scores and their ids, ties to the lower id (a stable sort)."""
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)  # [T, E]
    return ordered[:, :top_k], ids[:, :top_k]


def normalise(weights: Tensor) -> Tensor:
    """Selected scores divided by their sum over all K routes, substituted ones included."""
    return weights / weights.sum(dim=-1, keepdim=True)  # [T, K]
