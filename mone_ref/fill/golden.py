"""The numbers an engine is held to: float64 log-probabilities and the budget beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mone_ref.fill.variants import UNIT_ROUNDOFF, Variant
from mone_ref.loading import Model


def golden(
    oracle: Model, runs: Iterable[Variant], prompts: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """All tensors of ``golden.safetensors``.

    Per prompt ``i``: ``prompt.i.ids`` ``[T]`` int64, ``prompt.i.logprobs`` ``[T, V]`` float64
    in nats, and per compute type ``c``: ``prompt.i.c.token`` ``[T]`` and ``prompt.i.c.max`` ``[]``.
    """
    runs = list(runs)
    compute_types = list(dict.fromkeys(run.compute_type for run in runs))
    found: dict[str, Tensor] = {}
    for index, prompt in enumerate(prompts):
        logits = oracle.logits(prompt)  # [T, V]
        truth = oracle.score([prompt])[0]  # [T, V]
        found[f"prompt.{index}.ids"] = torch.tensor(prompt, dtype=torch.int64)
        found[f"prompt.{index}.logprobs"] = truth.clone()
        for name in compute_types:
            seen = [run.model.score([prompt])[0] for run in runs if run.compute_type == name]
            token, top = budget(logits, truth, torch.stack(seen), UNIT_ROUNDOFF[name])
            found[f"prompt.{index}.{name}.token"] = token
            found[f"prompt.{index}.{name}.max"] = top
    return found


def budget(logits: Tensor, truth: Tensor, runs: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Budgets of one prompt: ``b`` ``[T]`` per token and ``M`` ``[]`` for the tensor, in nats.

    ``logits`` and ``truth`` ``[T, V]`` float64, ``runs`` ``[R, T, V]``, ``unit`` the unit
    roundoff of the compute type. A token's budget is the largest root-mean-square error
    among the runs, no less than the median over the tokens and the rounding of its logits.
    """
    errors = runs.to(torch.float64) - truth  # [R, T, V]
    per_token = errors.square().mean(dim=-1).sqrt().max(dim=0).values  # [T]
    rounding = unit * logits.square().mean(dim=-1).sqrt()  # [T]
    token = torch.maximum(torch.maximum(per_token, per_token.median()), rounding)
    top = torch.maximum(errors.abs().max(), unit * logits.abs().max())
    return token, top
