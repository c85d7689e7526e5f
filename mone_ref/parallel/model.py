"""A model over ranks in one process: the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import loading as whole
from mone_ref.config import Config
from mone_ref.model import decoder
from mone_ref.moe import Record
from mone_ref.parallel import changes, loading, stage
from mone_ref.parallel.group import Group, InProcess
from mone_ref.parallel.plan import Plan
from mone_ref.parallel.shards import Shard
from mone_ref.precision import Precision, exact_products, plain


class ParallelModel:
    """A checkpoint over the ranks of a plan; answers like ``loading.Model``.

    ``stages`` holds the ranks of each stage, in order.
    """

    def __init__(
        self, config: Config, plan: Plan, stages: list[list[Shard]], precision: Precision
    ) -> None:
        self.config = config
        self.plan = plan
        self.stages = stages
        self.precision = precision

    @property
    def ranks(self) -> list[Shard]:
        """Every rank of every stage."""
        return [shard for held in self.stages for shard in held]

    @property
    def group(self) -> Group:
        """The ranks of any one stage."""
        return InProcess(self.plan.tensor)

    def logits(self, prompt: Sequence[int], record: Record = decoder.ignore) -> Tensor:
        """Logits ``[T, V]`` of one prompt. Raises ``ValueError`` on an empty or foreign prompt."""
        model, at, group = self.config.model, self.precision, self.group
        ids = whole.token_ids(prompt, model.vocab_size)  # [T]
        with torch.inference_mode(), exact_products():
            residual = stage.embed(ids, self.stages[0], at, group)  # [T, H]
            for held in self.stages:
                residual = stage.run_layers(residual, held, model, at, group, record)
            return stage.logits(residual, self.stages[-1], model, at, group)

    def score(
        self, prompts: Sequence[Sequence[int]], record: Record = decoder.ignore
    ) -> list[Tensor]:
        """Log-probabilities ``[T, V]`` in nats of the next token, for every prompt."""
        return [
            decoder.log_probabilities(self.logits(prompt, record), self.precision)
            for prompt in prompts
        ]

    def expert_rows(self) -> dict[int, int]:
        """Index of each MoE layer -> physical rows allocated for it on every rank (EXEC-1)."""
        return {
            held[0].first + position: layer.experts.rows
            for held in self.stages
            for position, layer in held[0].moe_layers.items()
        }

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants on every rank, as ``loading.Model.update``; all ranks or none."""
        changes.update(self.config, self.precision.params, self.ranks, tensors)

    def reload(self, path: str | Path) -> None:
        """Refuse a layerwise reload, whatever a rank holds (UPD-4, PAR-3)."""
        changes.reload(self.ranks, path)


def load(path: str | Path, dtype: torch.dtype, plan: Plan) -> ParallelModel:
    """Load a checkpoint over the ranks of a plan, with its parameters in ``dtype``.

    Raises ``Rejected`` as ``loading.load``, and for sizes that do not divide (``RANKS``).
    """
    config, tensors = loading.checked(path, dtype, plan)
    stages = [
        [
            loading.read_stage(config, tensors, plan, number, (index, plan.tensor))
            for index in range(plan.tensor)
        ]
        for number in range(plan.pipeline)
    ]
    return ParallelModel(config, plan, stages, plain(dtype))
