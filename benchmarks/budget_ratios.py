"""How far honest runs and planted faults stand from the budgets, fixture by fixture.

A ratio is the worst token's error over its budget ``b``, or the largest error over ``M``,
whichever is larger; the number rule passes up to 3. Honest: re-runs of the oracle in each
dtype, with one and two threads and with columns in ten orders that no budget was made from.
Faults: the smallest ratio over the fixtures that show the fault at all.

    python benchmarks/budget_ratios.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import mone_ref
from mone_ref import faults
from mone_ref.fill import fixture
from mone_ref.fill.fixture import Fixture
from mone_ref.fill.variants import STORAGE, permuted
from mone_ref.loading import Model

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
COMPUTE_TYPES = ("float32", "bfloat16", "float16")
FRESH_SEEDS = range(100, 110)
MULTIPLIER = 3


def ratio(model: Model, one: Fixture, compute_type: str) -> float:
    """Worst ``e / b`` over all tokens, or ``max error / M``, over all prompts."""
    golden = one.golden()
    worst = 0.0
    for index in range(len(one.recipe.prompts)):
        found = model.score([golden[f"prompt.{index}.ids"].tolist()])[0]
        error = found - golden[f"prompt.{index}.logprobs"]  # [T, V]
        per_token = error.square().mean(-1).sqrt() / golden[f"prompt.{index}.{compute_type}.token"]
        top = error.abs().max() / golden[f"prompt.{index}.{compute_type}.max"]
        worst = max(worst, float(per_token.max()), float(top))
    return worst


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


def main() -> None:
    """Print both tables."""
    everything = [fixture.read(path.parent) for path in sorted(FIXTURES.glob("*/recipe.yaml"))]
    print(f"{'worst honest e/b (limit 3)':28}" + "".join(f"{c:>12}" for c in COMPUTE_TYPES))
    for one in everything:
        cells = [f"{honest(one, c):12.2f}" for c in COMPUTE_TYPES]
        print(f"{one.recipe.name:28}" + "".join(cells))

    print(f"\n{'fault: weakest visible e/b':28}" + "".join(f"{c:>12}" for c in COMPUTE_TYPES))
    substituted = [one for one in everything if not one.recipe.is_plain]
    for fault in faults.FAULTS.values():
        cells = []
        for compute_type in COMPUTE_TYPES:
            with faults.planted(fault):
                found = [
                    ratio(mone_ref.load(o.checkpoint, STORAGE[compute_type]), o, compute_type)
                    for o in substituted
                ]
            visible = [value for value in found if value > MULTIPLIER]
            cells.append(f"{min(visible):12.1f}" if visible else f"{'(load)':>12}")
        print(f"{fault.id:28}" + "".join(cells))


if __name__ == "__main__":
    main()
