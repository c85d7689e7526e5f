"""A checkpoint -> what one rank of one stage holds.

Every rank sees the whole checkpoint and the whole list, checks all of it, and reads its own
layers: tensors of other stages are no error, and what one stage misses stops them all (PAR-2).
"""

from __future__ import annotations

from pathlib import Path

import torch

from mone_ref import loading
from mone_ref.config import Config
from mone_ref.errors import Rejected
from mone_ref.layer import Rank
from mone_ref.loading import Tensors
from mone_ref.parallel import plan as plans
from mone_ref.parallel import shards
from mone_ref.parallel.plan import Plan
from mone_ref.parallel.shards import Shard


def checked(path: str | Path, dtype: torch.dtype, plan: Plan) -> tuple[Config, Tensors]:
    """Config and tensors of a checkpoint; raises ``Rejected`` also for sizes that do not divide."""
    config, tensors = loading.accepted(loading.check(path, dtype), dtype)
    if uneven := plans.problems(config.model, plan):
        raise Rejected(uneven)
    return config, tensors


def read_stage(config: Config, tensors: Tensors, plan: Plan, stage: int, rank: Rank) -> Shard:
    """What one rank of one stage holds."""
    model, family = config.model, config.model.family
    first, last = stage == 0, stage == plan.pipeline - 1
    head = family.embedding_name if model.tie_word_embeddings else "lm_head.weight"
    owned = plans.stage_layers(model.num_layers, plan.pipeline)[stage]
    none = torch.empty(0, model.hidden_size, dtype=tensors.dtype)  # [0, H]
    return Shard(
        embedding=shards.vocabulary(tensors.read(family.embedding_name), rank) if first else none,
        layers=[
            shards.of_layer(loading.read_layer(config, tensors, index), model, rank)
            for index in owned
        ],
        norm=tensors.read(family.norm_name) if last else none.flatten(),
        head=shards.vocabulary(tensors.read(head), rank) if last else none,
        rank=rank,
        first=owned.start,
    )
