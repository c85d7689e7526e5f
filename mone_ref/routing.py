"""Router logits -> the routes of each token: ``(weights, ids)``, both ``[T, K]``.

Routing knows nothing of substitution: it scores and selects among ALL logical
experts, and what it returns is what every route is paid with (SEM-2). Every family's
rule is made of the same steps: score, prefer, select, weigh, normalise, scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mone_ref.families import Groups, RouterRule


def route(
    router_logits: Tensor,
    rule: RouterRule,
    top_k: int,
    dtype: torch.dtype,
    correction: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route each token by its family's rule (SEM-1, SEM-2).

    ``router_logits`` ``[T, E]`` over all logical experts, ``dtype`` in which scores are
    formed, ``correction`` ``[E]`` what chooses beside the scores and does not pay. Returns
    weights ``[T, K]`` in ``dtype`` and logical ids ``[T, K]`` int64, the preferred one first. A row
    with a NaN logit keeps distinct ids and NaN weights; no other row sees it.
    """
    scores = score(router_logits, rule, dtype)  # [T, E]
    ids = select(preference(scores, rule, correction), top_k)  # [T, K]
    weights = weigh(scores, ids)  # [T, K]
    if rule.normalise:
        weights = normalise(weights)  # [T, K]
    return scale(weights, rule), ids


def score(router_logits: Tensor, rule: RouterRule, dtype: torch.dtype) -> Tensor:
    """Scores over all logical experts, ``[T, E]``. Raises ``ValueError`` on an unknown rule."""
    logits = router_logits.to(dtype)  # [T, E]
    if rule.scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if rule.scoring == "sigmoid":
        return torch.sigmoid(logits)
    raise ValueError(f"unknown scoring {rule.scoring!r}")


def preference(scores: Tensor, rule: RouterRule, correction: Tensor | None) -> Tensor:
    """What experts are chosen by, ``[T, E]``: scores, corrected, and limited to groups."""
    preferred = corrected(scores, correction)  # [T, E]
    return preferred if rule.groups is None else within_groups(preferred, rule.groups)


def corrected(scores: Tensor, correction: Tensor | None) -> Tensor:
    """Scores plus the correction ``[E]`` that balances the load: ``[T, E]``."""
    return scores if correction is None else scores + correction.to(scores.dtype)


def within_groups(preferred: Tensor, groups: Groups) -> Tensor:
    """Preferences ``[T, E]`` with every expert outside the best groups at minus infinity.

    Minus infinity, not zero: a corrected score may be negative, and would lose to an
    excluded expert at zero.
    """
    ranks = standing(preferred, groups)  # [T, G]
    chosen = select(ranks, groups.chosen)  # [T, groups chosen]
    inside = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, chosen, True)  # [T, G]
    by_expert = inside.repeat_interleave(preferred.shape[-1] // groups.count, dim=-1)  # [T, E]
    return preferred.masked_fill(~by_expert, -torch.inf)


def standing(preferred: Tensor, groups: Groups) -> Tensor:
    """The sum of the ``best`` highest preferences in each group: ``[T, E]`` -> ``[T, G]``."""
    by_group = preferred.reshape(len(preferred), groups.count, -1)  # [T, G, E/G]
    return by_group.topk(groups.best, dim=-1).values.sum(dim=-1)


def select(preferred: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` highest, ``[T, count]``, ties to the lower id (a stable sort)."""
    return torch.sort(preferred, dim=-1, descending=True, stable=True).indices[:, :count]


def weigh(scores: Tensor, ids: Tensor) -> Tensor:
    """What the chosen routes are paid with: their scores, uncorrected, ``[T, K]``."""
    return scores.gather(-1, ids)


def normalise(weights: Tensor) -> Tensor:
    """Selected scores divided by their sum over all K routes, substituted ones included."""
    return weights / weights.sum(dim=-1, keepdim=True)  # [T, K]


def scale(weights: Tensor, rule: RouterRule) -> Tensor:
    """Weights times ``routed_scaling_factor``, once, so that it reaches constants too (SEM-6)."""
    return weights * rule.scaling_factor  # [T, K]
