"""One rank of four: everything that is asked of real processes, in one start.

Run by ``test_parallel_distributed.py`` as ``python distributed_ranks.py OUT``, with the
environment that ``torch.distributed`` reads; writes what this rank saw to ``OUT/RANK.safetensors``
and prints a line per refusal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mone_ref import layer, layout, loading
from mone_ref.errors import Rejected
from mone_ref.parallel import changes, distributed
from mone_ref.parallel.distributed import Processes
from mone_ref.parallel.plan import Plan
from mone_ref.suite import data

FIXTURES = data.root() / "fixtures"
PROMPT = [1, 5, 9, 2, 7, 11, 3]
PLANS = {
    "tp4": ("olmoe-ranks", Plan(4, 1)),
    "tp2pp2": ("qwen3-explicit", Plan(2, 2)),
    "pp4": ("olmoe-ranks", Plan(1, 4)),
}
TERMS = torch.tensor([256.0, 1.0, 1.0, 0.5])
"""One partial a rank, of which bfloat16 loses some in any order."""


def checkpoint(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


def constants_of(name: str) -> dict[str, torch.Tensor]:
    source = load_file(checkpoint(name) / "model.safetensors")
    return {name: source[name] for name in layout.constants(loading.load(checkpoint(name)).config)}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    seen: dict[str, torch.Tensor] = {}
    with distributed.joined():
        for plan_name, (name, plan) in PLANS.items():
            for dtype in (torch.float32, torch.bfloat16):
                model = distributed.load(checkpoint(name), dtype, plan)
                seen[f"{plan_name}.{dtype}"] = model.score([PROMPT])[0]
        collectives(rank, seen)
        updates(rank, seen)
        loads(rank)
    save_file(seen, out / f"{rank}.safetensors")


def collectives(rank: int, seen: dict[str, torch.Tensor]) -> None:
    group = Processes((rank, 4), None)
    seen["sum"] = group.reduce([TERMS[rank].bfloat16()[None]])
    seen["gathered"] = group.gather([torch.full((2, 1), float(rank))])
    seen["adds"] = torch.tensor([float(layer.adds_constants((rank, 4)))])


def updates(rank: int, seen: dict[str, torch.Tensor]) -> None:
    """An update for all, one that every rank refuses, one that the last rank alone refuses."""
    model = distributed.load(checkpoint("qwen3-explicit"), torch.float32, Plan(2, 2))
    good = constants_of("qwen3-explicit-updated")
    last = [*good][-1]
    refused("every rank", lambda: model.update(good | {last: good[last][None]}))
    own = good | {last: good[last] * float("nan")} if rank == 3 else good
    refused("one rank", lambda: model.update(own))
    refused("reload", lambda: model.reload(checkpoint("qwen3-explicit-updated")))
    seen["refused"] = model.score([PROMPT])[0]
    model.update(good)
    seen["updated"] = model.score([PROMPT])[0]
    assert not changes.problems(model.config, torch.float32, good)


def loads(rank: int) -> None:
    """Sizes that do not divide, and a checkpoint that one rank alone finds wanting."""
    refused("sizes", lambda: distributed.load(checkpoint("olmoe-approx"), torch.float32, Plan(4)))
    place = Path("nowhere") if rank == 2 else checkpoint("olmoe-ranks")
    refused("one load", lambda: distributed.load(place, torch.float32, Plan(4)))
    dist.barrier()


def refused(what: str, step) -> None:
    try:
        step()
    except Rejected as rejected:
        print(f"{what}: {' '.join(rejected.codes)}")
    else:
        print(f"{what}: accepted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
