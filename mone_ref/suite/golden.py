"""A fixture's golden file: the right answer to every prompt, and how far off is still right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mone_ref.checkpoint.opening import require_regular
from mone_ref.fill.ranks import FILE


class GoldenError(ValueError):
    """A golden file that cannot be judged against; names the file and the key."""


@dataclass(frozen=True)
class Budget:
    """Rounding that an honest engine may show at one compute type, before the multiplier.

    ``token`` ``[T]`` is the rms error per token, ``maximum`` the largest single error, in nats.
    """

    token: Tensor
    maximum: float


@dataclass(frozen=True)
class GoldenPrompt:
    """Token ids ``[T]``, log-probabilities ``[T, V]`` in float64, and a budget per compute type."""

    ids: list[int]
    logprobs: Tensor
    budgets: Mapping[str, Budget]


@dataclass(frozen=True)
class Golden:
    """All prompts of one fixture, and the compute types it is certified for, ranks included."""

    prompts: tuple[GoldenPrompt, ...]
    compute_types: tuple[str, ...]

    @property
    def ids(self) -> list[list[int]]:
        """The prompts as an engine sees them."""
        return [prompt.ids for prompt in self.prompts]


def read(path: Path) -> Golden:
    """Read ``golden.safetensors``, and the budgets of ranks beside it where there are any.

    Raises ``GoldenError`` with the first thing that is wrong.
    """
    types, tensors = _read_file(path)
    ranks = path.with_name(FILE)
    if ranks.exists():
        more, budgets = _read_file(ranks)
        types, tensors = types + more, tensors | budgets
    try:
        return Golden(tuple(_prompts(tensors, types)), types)
    except GoldenError as error:
        raise GoldenError(f"{path}: {error}") from None


def _read_file(path: Path) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Names of budgets and all tensors of one file."""
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise GoldenError(f"{path}: {error}") from error
    types = tuple(filter(None, metadata.get("compute_types", "").split(",")))
    if not types:
        raise GoldenError(f"{path}: the metadata name no compute_types")
    return types, tensors


def _prompts(tensors: dict[str, Tensor], types: tuple[str, ...]) -> list[GoldenPrompt]:
    count = sum(name.endswith(".ids") for name in tensors)
    if count == 0:
        raise GoldenError("no prompt.0.ids: the file holds no prompt")
    return [_prompt(tensors, f"prompt.{index}", types) for index in range(count)]


def _prompt(tensors: dict[str, Tensor], prefix: str, types: tuple[str, ...]) -> GoldenPrompt:
    ids = _take(tensors, f"{prefix}.ids", (None,))
    logprobs = _take(tensors, f"{prefix}.logprobs", (len(ids), None))
    budgets = {
        compute: Budget(
            token=_positive(tensors, f"{prefix}.{compute}.token", (len(ids),)),
            maximum=float(_positive(tensors, f"{prefix}.{compute}.max", ())),
        )
        for compute in types
    }
    return GoldenPrompt(ids.tolist(), logprobs, budgets)


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """One tensor with a known rank, finite and not empty; None stands for any size."""
    if name not in tensors:
        raise GoldenError(f"{name} is missing")
    tensor = tensors[name]
    fits = len(tensor.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.numel() == 0:
        raise GoldenError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if not torch.isfinite(tensor).all():
        raise GoldenError(f"{name} holds NaN or infinity")
    return tensor


def _positive(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A budget: with zero no engine but the oracle could pass."""
    tensor = _take(tensors, name, shape)
    if not (tensor > 0).all():
        raise GoldenError(f"{name} holds a budget that is not positive")
    return tensor
