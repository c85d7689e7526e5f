"""Sessions of the models of this package: a decoder, one over ranks, one on the fast path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from mone_ref.backend import Scores, Session
from mone_ref.moe import Record


class Loaded(Protocol):
    """What a session asks of a model; see ``mone_ref.loading.Model``."""

    def score(self, prompts: Sequence[Sequence[int]], record: Record = ...) -> list[Tensor]:
        """Log-probabilities ``[T, V]`` in nats of the next token, for every prompt."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants; all or nothing."""

    def reload(self, path: str | Path) -> None:
        """Refuse a layerwise reload."""

    def expert_rows(self) -> dict[int, int]:
        """Index of each MoE layer -> physical rows allocated for it."""


AnyModel = TypeVar("AnyModel", bound=Loaded)


class ModelSession(Session, Generic[AnyModel]):
    """One loaded model."""

    def __init__(self, model: AnyModel) -> None:
        self.model = model

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Full log-probabilities ``[T, V]``."""
        return [Scores(logprobs) for logprobs in self.model.score(prompts)]

    def close(self) -> None:
        """Nothing is held outside the model."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants; all or nothing, on every rank."""
        self.model.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        """Always refused."""
        self.model.reload(checkpoint)

    def expert_rows(self) -> dict[int, int]:
        """Rows of the compact weights, of every stage."""
        return self.model.expert_rows()

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Every recorded intermediate of every MoE layer, on the CPU; each prompt alone."""
        traces: list[dict[str, Tensor]] = []
        for prompt in prompts:
            trace: dict[str, Tensor] = {}
            self.model.score([prompt], trace.__setitem__)
            traces.append({name: value.cpu() for name, value in trace.items()})
        return traces
