"""How far honest runs and planted faults stand from the budgets, fixture by fixture.

A ratio is what the suite itself compares: the worst token's error over its budget ``b``, or
the largest error over ``M``, whichever is larger; up to 3 passes. Honest: re-runs of the
oracle in each dtype, with one and two threads and with columns in ten orders that no budget
was made from. Faults of computation: on how many fixtures each is seen, and the weakest ratio
there.

    python benchmarks/budget_ratios.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import mone_ref
from mone_ref import faults
from mone_ref.backend import Scores
from mone_ref.fill import fixture
from mone_ref.fill.fixture import Fixture
from mone_ref.fill.variants import STORAGE, permuted
from mone_ref.loading import Model
from mone_ref.suite import golden
from mone_ref.suite.compare import MULTIPLIER, compare

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
COMPUTE_TYPES = ("float32", "bfloat16", "float16")
FRESH_SEEDS = range(100, 110)
WIDTH = 30


def ratio(model: Model, one: Fixture, compute_type: str) -> float:
    """Worst ratio over all prompts of a fixture."""
    pinned = golden.read(one.directory / "golden.safetensors")
    answers = model.score(pinned.ids)
    return max(
        compare(Scores(answer), prompt, compute_type).ratio
        for answer, prompt in zip(answers, pinned.prompts, strict=True)
    )


def honest(one: Fixture, compute_type: str) -> float:
    """Worst honest ratio: two thread counts and ten fresh column orders."""
    model = mone_ref.load(one.checkpoint, STORAGE[compute_type])
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(ratio(model, one, compute_type))
    for seed in FRESH_SEEDS:
        other = Model(model.config, permuted(model, seed), model.precision)
        found.append(ratio(other, one, compute_type))
    return max(found)


def seen(fault: faults.Fault, everything: list[Fixture], compute_type: str) -> str:
    """``weakest ratio (fixtures that show it / all)``."""
    with faults.planted(fault):
        found = [
            ratio(mone_ref.load(one.checkpoint, STORAGE[compute_type]), one, compute_type)
            for one in everything
        ]
    visible = [value for value in found if value > MULTIPLIER]
    weakest = f"{min(visible):.1f} " if visible else ""
    return f"{weakest}({len(visible)}/{len(found)})"


def main() -> None:
    """Print both tables."""
    everything = [fixture.read(path.parent) for path in sorted(FIXTURES.glob("*/recipe.yaml"))]
    heads = "".join(f"{name:>20}" for name in COMPUTE_TYPES)
    print(f"{f'worst honest (limit {MULTIPLIER:g})':{WIDTH}}{heads}")
    for one in everything:
        cells = "".join(f"{honest(one, name):20.2f}" for name in COMPUTE_TYPES)
        print(f"{one.recipe.name:{WIDTH}}{cells}", flush=True)

    print(f"\n{'fault: weakest (seen on)':{WIDTH}}{heads}")
    substituted = [one for one in everything if not one.recipe.is_plain]
    for fault in [fault for fault in faults.FAULTS.values() if fault.stage == "run"]:
        cells = "".join(f"{seen(fault, substituted, name):>20}" for name in COMPUTE_TYPES)
        print(f"{fault.id:{WIDTH}}{cells}", flush=True)


if __name__ == "__main__":
    main()
