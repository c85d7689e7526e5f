"""Where an engine that can trace first leaves the right computation, and in which step.

What is recorded inside has no pinned budget. It is made here as for answers: from the
eight low-precision runs of the reference, around its run in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import loading
from mone_ref.fill.exact import exact
from mone_ref.fill.variants import STORAGE, UNIT_ROUNDOFF, variants
from mone_ref.loading import Model
from mone_ref.suite.compare import MULTIPLIER

Trace = Mapping[str, Tensor]

STEPS = {
    "moe_in": "The input of the MoE layer differs already",
    "router_ids": "The router chooses other experts",
    "router_weights": "The router chooses the same experts and pays them differently",
    "moe_out": "Routes agree, and the output of the MoE layer differs",
}
"""What is recorded of each MoE layer, in the order of computation, and what it means that it
is the first to differ."""

SHARE_TOLERANCE = 0.05
"""How evenly an error must follow the constants' part to be told as a multiple of it."""


@dataclass(frozen=True)
class Parting:
    """The first layer that is wrong for a prompt, its first wrong token, and the step."""

    prompt: int
    layer: int
    token: int
    sentence: str


def first(
    directory: Path, compute: str, prompts: Sequence[Sequence[int]], traces: Sequence[Trace]
) -> Parting | None:
    """The first wrong step of the first prompt that has one; None when all is right."""
    model = loading.load(directory, STORAGE[compute])
    oracle, runs = exact(model), list(variants(directory, compute))
    for index, (prompt, found) in enumerate(zip(prompts, traces, strict=True)):
        right = traced(oracle, prompt)
        honest = [in_order(traced(run.model, prompt), run.hidden) for run in runs]
        for layer in model.config.model.moe_layers:
            for name, step in recorded(layer, found, right).items():
                wrong = wrong_tokens(name, found, right, honest, UNIT_ROUNDOFF[compute])  # [N]
                if len(wrong):
                    sentence = described(step, layer, wrong, found, right, model)
                    return Parting(index, layer, int(wrong[0]), sentence)
    return None


def traced(model: Model, prompt: Sequence[int]) -> dict[str, Tensor]:
    """Everything that the reference records of one prompt."""
    trace: dict[str, Tensor] = {}
    model.logits(prompt, trace.__setitem__)
    return {name: comparable(name, value, trace) for name, value in trace.items()}


def in_order(trace: Trace, hidden: Tensor | None) -> Trace:
    """A trace whose hidden columns stand as they are stored; ``hidden`` is their order."""
    if hidden is None:
        return trace
    stored = hidden.argsort()
    wide = ("moe_in", "moe_out")
    return {k: v[:, stored] if k.endswith(wide) else v for k, v in trace.items()}


def comparable(name: str, value: Tensor, trace: Trace) -> Tensor:
    """Routes in ascending order of experts, which is free; everything in float64."""
    layer = name.rpartition(".")[0]
    if name.endswith(("router_ids", "router_weights")) and f"{layer}.router_ids" in trace:
        order = trace[f"{layer}.router_ids"].cpu().sort(dim=1).indices  # [T, K]
        value = value.gather(1, order)
    return value.double()


def recorded(layer: int, found: Trace, right: Trace) -> dict[str, str]:
    """The steps of one layer that an engine recorded in the form of the reference, by name."""
    names = {f"layers.{layer}.{step}": step for step in STEPS}
    return {
        name: step
        for name, step in names.items()
        if isinstance(found.get(name), Tensor) and found[name].shape == right[name].shape
    }


def wrong_tokens(
    name: str, found: Trace, right: Trace, honest: Sequence[Trace], unit: float
) -> Tensor:
    """Tokens at which a recorded value is beyond what rounding explains, ``[N]``."""
    value, expected = comparable(name, found[name].cpu(), found), right[name]
    if name.endswith("router_ids"):
        return torch.nonzero((value != expected).any(dim=1)).flatten()

    def rms(difference: Tensor) -> Tensor:
        return difference.square().mean(dim=1).sqrt()  # [T]

    errors = torch.stack([rms(run[name] - expected) for run in honest]).amax(dim=0)  # [T]
    budget = torch.maximum(torch.maximum(errors, errors.median()), unit * rms(expected))
    return torch.nonzero(~(rms(value - expected) <= MULTIPLIER * budget)).flatten()


def described(
    step: str, layer: int, wrong: Tensor, found: Trace, right: Trace, model: Model
) -> str:
    """One sentence about the first wrong step."""
    parts = [f"{STEPS[step]} in layer {layer} from token {int(wrong[0])} on"]
    entry = model.substitution.layers.get(layer)
    if entry is not None:
        ids = right[f"layers.{layer}.router_ids"]  # [T, K]
        hit = torch.isin(ids, torch.tensor(entry.substituted).double()).any(dim=1)  # [T]
        if bool(hit[wrong].all()) and not bool(hit.all()):
            parts.append("only at tokens with a substituted route")
    if step == "moe_out":
        parts += multiple(layer, wrong, found, right, model)
    return f"{', '.join(parts)}."


def multiple(layer: int, wrong: Tensor, found: Trace, right: Trace, model: Model) -> Iterator[str]:
    """The error as a multiple of the constants' part, where it is one at every wrong token."""
    moe, name = model.weights.moe_layers[layer], f"layers.{layer}"
    ids, weights = right[f"{name}.router_ids"], right[f"{name}.router_weights"]  # [T, K]
    part = torch.zeros_like(right[f"{name}.moe_out"])  # [T, H]
    for row, expert in enumerate(moe.substitution.substituted):
        paid = torch.where(ids == expert, weights, 0.0).sum(dim=1, keepdim=True)  # [T, 1]
        part += paid * moe.constants[row].double()
    error = found[f"{name}.moe_out"].cpu().double() - right[f"{name}.moe_out"]  # [T, H]
    part, error = part[wrong], error[wrong]  # [N, H]
    size = part.square().sum()
    if not size > 0:
        return
    share = float((error * part).sum() / size)
    left = float((error - share * part).norm() / error.norm())
    if left < SHARE_TOLERANCE:
        yield f"by {share:.2f} times the constants' part"
