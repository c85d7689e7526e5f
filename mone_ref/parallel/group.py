"""How the ranks of one stage meet: the two collectives that tensor parallelism needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mone_ref.layer import Rank


class Group(ABC):
    """The ranks of one stage, of which this process holds some.

    Every call is given one tensor for each rank held, in their order.
    """

    held: Sequence[Rank]

    @abstractmethod
    def reduce(self, partials: Sequence[Tensor]) -> Tensor:
        """The sum of the partials of all ranks, which every rank has afterwards."""

    @abstractmethod
    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of all ranks side by side along the last dimension, in their order."""


class InProcess(Group):
    """A simulation: this process holds every rank."""

    def __init__(self, size: int) -> None:
        self.held = [(index, size) for index in range(size)]

    def reduce(self, partials: Sequence[Tensor]) -> Tensor:
        """As ``summed``."""
        return summed(partials)

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """As ``torch.cat``."""
        return torch.cat(list(parts), dim=-1)


def summed(partials: Sequence[Tensor]) -> Tensor:
    """The reduction: each partial as it was rounded by its rank, their sum rounded once."""
    return torch.stack(list(partials)).sum(dim=0)
