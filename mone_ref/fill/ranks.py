"""Budgets of tensor parallelism, in ``ranks.safetensors`` beside the golden.

With n ranks one more low-precision run counts: n partial sums, each rounded before the
reduction (SPEC, Numbers). The golden itself is that of one device, whatever the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mone_ref import loading
from mone_ref.fill import certificate, golden
from mone_ref.fill.variants import STORAGE, UNIT_ROUNDOFF, Variant
from mone_ref.loading import Model
from mone_ref.parallel import model as parallel
from mone_ref.parallel import plan as plans
from mone_ref.parallel.model import ParallelModel
from mone_ref.parallel.plan import Plan
from mone_ref.precision import plain

FILE = "ranks.safetensors"
SIZES = (2, 3, 4)
"""Numbers of ranks for which fixtures have budgets, where their sizes divide."""


def budget_name(compute_type: str, size: int) -> str:
    """The name of a budget: the compute type, and the ranks where there are several."""
    return compute_type if size == 1 else f"{compute_type}-tp{size}"


def write(
    checkpoint: Path,
    runs: Sequence[Variant],
    prompts: Sequence[Sequence[int]],
    truth: Sequence[Tensor],
    path: Path,
) -> list[str]:
    """Write the budgets of every number of ranks that divides; nothing where none does.

    ``runs`` are the eight of every compute type, ``truth`` the pinned log-probabilities
    ``[T, V]``. Returns the names of the budgets.
    """
    oracle = loading.load(checkpoint, torch.float64)
    found: dict[str, Tensor] = {}
    names = []
    for size in SIZES:
        if plans.problems(oracle.config.model, Plan(tensor=size)):
            continue
        for compute_type in dict.fromkeys(run.compute_type for run in runs):
            summed = over_ranks(checkpoint, compute_type, size)
            if not certified(oracle, summed, prompts):
                continue
            eight: list[Model | ParallelModel] = [
                run.model for run in runs if run.compute_type == compute_type
            ]
            name = budget_name(compute_type, size)
            names.append(name)
            nine = [*eight, summed]
            found |= budgets(name, oracle, nine, prompts, truth, compute_type)
    if names:
        save_file(found, path, metadata={"format": "pt", "compute_types": ",".join(names)})
    return names


def over_ranks(checkpoint: Path, compute_type: str, size: int) -> ParallelModel:
    """The run of ``size`` partial sums at one compute type."""
    model = parallel.load(checkpoint, STORAGE[compute_type], Plan(tensor=size))
    model.precision = plain(STORAGE[compute_type], tf32=compute_type == "tf32")
    return model


def certified(oracle: Model, run: ParallelModel, prompts: Iterable[Sequence[int]]) -> bool:
    """Whether routing is beyond doubt in this run too, as in those that grew the prompts."""
    return all(
        certificate.first_uncertified(
            certificate.contests(oracle, prompt), [contests(oracle, run, prompt)]
        )
        == len(prompt)
        for prompt in prompts
    )


def contests(oracle: Model, run: ParallelModel, prompt: Sequence[int]) -> list[certificate.Contest]:
    """What routing decides in a run over ranks: routers are whole on every rank."""
    trace: dict[str, Tensor] = {}
    run.logits(prompt, trace.__setitem__)
    return list(certificate.of_trace(trace, oracle.weights.moe_layers))


def budgets(
    name: str,
    oracle: Model,
    runs: Sequence[Model | ParallelModel],
    prompts: Sequence[Sequence[int]],
    truth: Sequence[Tensor],
    compute_type: str,
) -> Iterator[tuple[str, Tensor]]:
    """``prompt.i.<name>.token`` ``[T]`` and ``.max`` ``[]`` of every prompt, in nats."""
    for index, (prompt, right) in enumerate(zip(prompts, truth, strict=True)):
        seen = torch.stack([run.score([prompt])[0] for run in runs])  # [R, T, V]
        token, top = golden.budget(oracle.logits(prompt), right, seen, UNIT_ROUNDOFF[compute_type])
        yield f"prompt.{index}.{name}.token", token
        yield f"prompt.{index}.{name}.max", top
