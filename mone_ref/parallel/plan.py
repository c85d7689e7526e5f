"""How many ranks a model is spread over, which do what, and whether its sizes divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mone_ref.config import ModelConfig
from mone_ref.errors import Code, Phase, Problem


@dataclass(frozen=True)
class Plan:
    """Ranks of each stage (``tensor``) and stages (``pipeline``)."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.tensor * self.pipeline


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as they come, the longer stages first."""
    least, longer = divmod(num_layers, stages)
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + least + (stage < longer))
    return [range(start, end) for start, end in pairwise(ends)]


def problems(model: ModelConfig, plan: Plan) -> list[Problem]:
    """Every size that does not divide among the ranks; constants never limit them."""
    found = [*uneven(model, plan.tensor)]
    if not 1 <= plan.pipeline <= model.num_layers:
        seen = f"{model.num_layers} layers among {plan.pipeline} stages"
        found.append(problem("num_layers", seen, f"1 to {model.num_layers} stages", "PAR-2"))
    return found


def uneven(model: ModelConfig, ranks: int) -> Iterator[Problem]:
    """Sizes that tensor parallelism cuts; 0 is a part that the model does not have."""
    if ranks < 1:
        yield problem("ranks", f"{ranks} ranks", "1 rank or more", "PAR-1")
        return
    for name in (
        "num_heads",
        "intermediate_size",
        "dense_intermediate_size",
        "shared_intermediate_size",
    ):
        size = getattr(model, name)
        if size % ranks:
            yield problem(name, f"{size} among {ranks} ranks", working(divisors(size)), "PAR-1")
    heads = model.num_kv_heads
    if heads % ranks and ranks % heads:
        fitting = divisors(model.num_heads)
        counts = [count for count in fitting if heads % count == 0 or count % heads == 0]
        yield problem("num_kv_heads", f"{heads} among {ranks} ranks", working(counts), "PAR-1")


def divisors(size: int) -> list[int]:
    """All numbers that divide a size."""
    return [count for count in range(1, size + 1) if size % count == 0]


def working(counts: list[int]) -> str:
    """The numbers of ranks that a size allows."""
    return f"{', '.join(map(str, counts))} ranks"


def problem(name: str, found: str, expected: str, clause: str) -> Problem:
    """A size that does not divide, known before anything is loaded."""
    return Problem(Code.RANKS, Phase.INIT, name, found, expected, clause=clause)
