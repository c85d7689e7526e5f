"""The oracle over several ranks as an engine: the simulation of ``mone_ref.parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mone_ref.backend import Scores, Session
from mone_ref.fill.exact import exact_ranks
from mone_ref.parallel.model import ParallelModel


class RanksSession(Session):
    """One loaded ``ParallelModel``."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Full log-probabilities ``[T, V]``, each prompt alone."""
        return [Scores(logprobs) for logprobs in self.model.score(prompts)]

    def close(self) -> None:
        """Nothing is held outside the model."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants on every rank; all or nothing."""
        self.model.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        """Always refused."""
        self.model.reload(checkpoint)

    def expert_rows(self) -> dict[int, int]:
        """Rows of the compact weights, of every stage."""
        return self.model.expert_rows()

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Every recorded intermediate of every MoE layer."""
        traces: list[dict[str, Tensor]] = []
        for prompt in prompts:
            trace: dict[str, Tensor] = {}
            self.model.score([prompt], trace.__setitem__)
            traces.append(trace)
        return traces


class ExactRanksSession(RanksSession):
    """The same, widened for every call: an update may come between two."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities ``[T, V]`` in float64."""
        return [Scores(logprobs) for logprobs in exact_ranks(self.model).score(prompts)]
