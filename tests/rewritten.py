"""Outputs of the checkpoint tools to load, with prompts and budgets of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import mone_ref
from mone_ref.fill import certificate, checkpoint, recipe
from mone_ref.fill.golden import golden as filled
from mone_ref.fill.recipe import Recipe
from mone_ref.fill.variants import all_variants
from mone_ref.rewrite import convert, make, structure, writer
from mone_ref.rewrite.plan import Form, Kind, LayerPlan, Mtp, Plan
from mone_ref.suite import golden
from mone_ref.suite.golden import Golden

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PROMPTS = (10, 6)  # tokens


@dataclass(frozen=True)
class Subject:
    """A model to cut: a fixture's recipe, changes to it, and per layer the experts that go.

    ``compute_type`` is one in which vLLM has right answers for the architecture on any CPU.
    """

    fixture: str
    gone: Mapping[int, Sequence[int]]
    compute_type: str = "float32"
    changes: Mapping[str, Any] | None = None
    top_k: int | None = None
    drops_mtp: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe of the plain model."""
        plain = recipe.read(FIXTURES / self.fixture / "recipe.yaml").plain()
        return replace(plain, name="subject", **(self.changes or {}))


# Every layer loses another set, from both ends and the middle; expert 0 and the last among them.
SUBJECTS = {
    "olmoe": Subject("olmoe-sharded", {0: (0, 2, 3, 5), 1: (1, 4, 6, 7)}),
    "qwen3_moe": Subject(
        "qwen3-normalised",
        {1: (0, 1, 7, 11), 3: (2, 5, 6, 10)},  # layers 0 and 2 are dense
        top_k=3,
    ),
    "mixtral": Subject("mixtral-approx", {0: (0, 3, 6), 1: (1, 2, 7)}),
    # 4 groups of 4 experts, of which 2 stay in each: a group stands by its 2 best.
    "deepseek_v3": Subject(
        "deepseek3-approx",
        {1: (0, 1, 4, 7, 9, 10, 13, 15), 2: (1, 3, 5, 6, 8, 11, 12, 14)},
        "bfloat16",
        {"num_experts": 16},
        drops_mtp=True,
    ),
}


def source(subject: Subject, parent: Path) -> Path:
    """The plain model."""
    directory = parent / "source"
    directory.mkdir(parents=True)
    checkpoint.write(subject.recipe, directory)
    return directory


def pruned(subject: Subject, directory: Path, out: Path) -> Path:
    """Without the experts that go."""
    layers = {str(layer): LayerPlan(kept(subject, layer)) for layer in subject.gone}
    mtp = Mtp.DROP if subject.drops_mtp else None
    return write(directory, Plan(Kind.PRUNE, layers, top_k=subject.top_k, mtp=mtp), out)


def kept(subject: Subject, layer: int) -> tuple[int, ...]:
    return tuple(sorted(set(range(subject.recipe.num_experts)) - set(subject.gone[layer])))


def substituted(subject: Subject, directory: Path, form: Form, out: Path) -> Path:
    """With constants as loud as experts in their place; explicit by way of the approx form."""
    blocks = {layer.place.layer: layer.block for layer in structure.read(directory).layers}
    drawn = torch.Generator().manual_seed(1)
    constants = {
        f"{blocks[layer]}.experts.{expert}.approx_value": torch.randn(
            subject.recipe.hidden_size, generator=drawn
        ).to(torch.bfloat16)
        for layer, ids in subject.gone.items()
        for expert in ids
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.parent / "constants.safetensors"
    save_file(constants, file)
    layers = {str(layer): LayerPlan(tuple(ids), False) for layer, ids in subject.gone.items()}
    mtp = Mtp.KEEP if subject.drops_mtp else None
    plan = Plan(Kind.SUBSTITUTE, layers, Form.APPROX, file, mtp=mtp)
    if form is Form.APPROX:
        return write(directory, plan, out)
    first = write(directory, plan, out.with_name("first"))
    made = convert.blueprint(first, form, scan=True)
    assert made.blueprint
    writer.write(made.blueprint, out)
    return out


def write(directory: Path, plan: Plan, out: Path) -> Path:
    made = make.blueprint(directory, plan, scan=True)
    assert made.blueprint, [str(problem) for problem in made.problems]
    writer.write(made.blueprint, out)
    return out


def right(subject: Subject, directory: Path, place: Path) -> Golden:
    """The oracle's answers to certified prompts, and the budgets of both compute types."""
    oracle = mone_ref.load(directory, torch.float64)
    types = sorted({"float32", subject.compute_type})
    runs = all_variants(directory, types)
    prompts = [
        certificate.grow(subject.recipe, index, length, oracle, runs)
        for index, length in enumerate(PROMPTS)
    ]
    save_file(filled(oracle, runs, prompts), place, metadata={"compute_types": ",".join(types)})
    return golden.read(place)
