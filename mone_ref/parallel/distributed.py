"""The same model under ``torch.distributed``: one rank a process, over gloo.

Process ``r`` is rank ``r % tensor`` of stage ``r // tensor``. All of them end with the same
log-probabilities, bit for bit. What one rank refuses all refuse (PAR-3); a rank that is gone ends
the others with ``RankLost``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mone_ref import loading as whole
from mone_ref.config import Config
from mone_ref.errors import Problem, Rejected
from mone_ref.layer import Rank
from mone_ref.model import decoder
from mone_ref.parallel import changes, loading, stage
from mone_ref.parallel.group import Group
from mone_ref.parallel.plan import Plan
from mone_ref.parallel.shards import Shard
from mone_ref.precision import Precision, exact_products, plain

Result = TypeVar("Result")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for one that never comes, as reading its part may take minutes. One that is
gone is told at once, by its closed connection."""


class RankLost(Exception):
    """Another rank is gone, or did not come within ``TIMEOUT``."""


@contextmanager
def meeting() -> Iterator[None]:
    """A call that all ranks have to make. Raises ``RankLost`` where one does not."""
    try:
        yield
    except RuntimeError as error:  # all that gloo says of it
        first = str(error).partition("\n")[0]
        raise RankLost(f"another rank is gone, or never came: {first}") from error


@contextmanager
def joined() -> Iterator[None]:
    """Meet the processes that ``torchrun`` or the environment names, and part from them.

    Raises ``ValueError`` where the environment names none, ``RankLost`` where one does not come.
    """
    with meeting():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Processes(Group):
    """The ranks of one stage, of which this process is one."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None) -> None:
        self.held = [rank]
        self.group = group

    def reduce(self, partials: Sequence[Tensor]) -> Tensor:
        """All-reduce: the sum of all ranks, formed in the partials' dtype."""
        total = partials[0].clone()
        with meeting():
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """All-gather."""
        every = [torch.empty_like(parts[0]) for _ in range(self.held[0][1])]
        with meeting():
            dist.all_gather(every, parts[0].contiguous(), group=self.group)
        return torch.cat(every, dim=-1)


class DistributedModel:
    """What this process holds of a model; every process makes the same calls in one order."""

    def __init__(
        self, config: Config, plan: Plan, shard: Shard, group: Group, precision: Precision
    ) -> None:
        self.config = config
        self.plan = plan
        self.shard = shard
        self.group = group
        self.precision = precision
        self.stage = dist.get_rank() // plan.tensor

    def score(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities ``[T, V]`` in nats, the same on every rank."""
        return [
            decoder.log_probabilities(self.logits(prompt), self.precision) for prompt in prompts
        ]

    def logits(self, prompt: Sequence[int]) -> Tensor:
        """Logits ``[T, V]`` of one prompt, from the last stage to every rank."""
        model, at, group, held = self.config.model, self.precision, self.group, [self.shard]
        ids = whole.token_ids(prompt, model.vocab_size)  # [T]
        with torch.inference_mode(), exact_products():
            residual = self.first_residual(ids)  # [T, H]
            residual = stage.run_layers(residual, held, model, at, group, decoder.ignore)
            if self.stage == self.plan.pipeline - 1:
                z = stage.logits(residual, held, model, at, group).contiguous()  # [T, V]
            else:
                with meeting():
                    dist.send(residual, dist.get_rank() + self.plan.tensor)
                z = torch.empty(len(ids), model.vocab_size, dtype=at.between)  # [T, V]
            with meeting():
                dist.broadcast(z, self.plan.ranks - self.plan.tensor)
            return z

    def first_residual(self, ids: Tensor) -> Tensor:
        """What the layers of this stage begin with: embeddings, or what the stage before sent."""
        if self.stage == 0:
            return stage.embed(ids, [self.shard], self.precision, self.group)
        width = self.config.model.hidden_size
        residual = torch.empty(len(ids), width, dtype=self.precision.residual)  # [T, H]
        with meeting():
            dist.recv(residual, dist.get_rank() - self.plan.tensor)
        return residual

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants on every rank, or on none. Raises ``Rejected``."""
        found = changes.problems(self.config, self.precision.params, tensors)
        if every := of_all_ranks(found):
            raise Rejected(every)
        changes.write_own(self.shard, tensors)

    def reload(self, path: str | Path) -> None:
        """Refuse a layerwise reload (UPD-4)."""
        changes.reload([self.shard], path)


def load(path: str | Path, dtype: torch.dtype, plan: Plan) -> DistributedModel:
    """Load this process's part of a checkpoint. Raises as ``model.load``, on every rank.

    ``joined`` must be in force, over as many processes as the plan has ranks.
    """
    if dist.get_world_size() != plan.ranks:
        raise ValueError(
            f"{dist.get_world_size()} processes, expected {plan.ranks} for {plan.tensor} ranks in "
            f"each of {plan.pipeline} stages"
        )
    config, tensors = together(lambda: loading.checked(path, dtype, plan))
    number, index = divmod(dist.get_rank(), plan.tensor)
    rank = index, plan.tensor
    members = [
        [first * plan.tensor + one for one in range(plan.tensor)] for first in range(plan.pipeline)
    ]
    with meeting():
        groups = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in members]
    shard = loading.read_stage(config, tensors, plan, number, rank)
    return DistributedModel(config, plan, shard, Processes(rank, groups[number]), plain(dtype))


def together(step: Callable[[], Result]) -> Result:
    """Take a step on every rank; where one rank is refused, all are. Raises ``Rejected``."""
    found: tuple[Problem, ...] = ()
    result = None
    try:
        result = step()
    except Rejected as rejected:
        found = rejected.problems
    if every := of_all_ranks(found):
        raise Rejected(every)
    assert result is not None
    return result


def of_all_ranks(found: Sequence[Problem]) -> list[Problem]:
    """The problems of every rank, each once: no rank goes on while another has one."""
    every: list[Sequence[Problem]] = [()] * dist.get_world_size()
    with meeting():
        dist.all_gather_object(every, tuple(found))
    return list(dict.fromkeys(problem for of_one in every for problem in of_one))
