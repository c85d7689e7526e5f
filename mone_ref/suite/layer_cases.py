"""Cases about one MoE layer: the layer, what its method is given, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mone_ref.fill.layer_recipe import CALLS, LayerRecipe, LayerRecipeError, Values, tensor
from mone_ref.suite.golden import Budget

ANSWERS = {
    "forward": ("output",),
    "forward_routed": ("output",),
    "rewrite_routes": ("weights", "rows", "constants"),
    "expert_rows": ("allocated",),
}
"""What a case says about the answer of each method; only ``weights`` and ``rows`` may lack."""

GOLDEN = "golden"
"""The output of a case that stands in its own file, with budgets."""


@dataclass(frozen=True)
class LayerGolden:
    """Output ``[T, H]`` in float64 and a budget per compute type (SPEC, Numbers)."""

    output: Tensor
    budgets: Mapping[str, Budget]


@dataclass(frozen=True)
class LayerCase:
    """What a case does with one layer.

    ``call`` is asked once for each number of tensor-parallel ranks in ``sizes``, of every
    rank. ``expected`` maps the names of ``ANSWERS`` to values, in which a row may be None:
    a token that is not judged.
    """

    recipe: LayerRecipe
    call: str
    given: Mapping[str, Values]
    expected: Mapping[str, Values]
    sizes: tuple[int, ...] = (1,)
    reduced: bool = False
    golden: LayerGolden | None = None

    @property
    def width(self) -> int:
        """Width of what comes back."""
        return self.recipe.activation or self.recipe.hidden

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """What the call is given."""
        return self.recipe.inputs(self.call, self.given, dtype)


@dataclass(frozen=True)
class Rows:
    """Expected numbers in float64, and which of the tokens are judged, ``[T]``."""

    values: Tensor
    judged: Tensor = field(repr=False)


def expected_rows(values: Values, name: str, shape: tuple[int, ...]) -> Rows:
    """Values of an answer; a row that is one number is that number in every column.

    Raises ``LayerRecipeError`` when they have another shape.
    """
    judged = torch.ones(shape[0], dtype=torch.bool)  # [T]
    if isinstance(values, list):
        judged = torch.tensor([row is not None for row in values], dtype=torch.bool)
        values = [row if isinstance(row, list) else [row or 0.0] * shape[1] for row in values]
    return Rows(tensor(values, name, shape, torch.float64), judged)


def golden_path(root: Path, case: str) -> Path:
    """Where the golden of a layer case stands."""
    return root / "conformance" / "goldens" / f"{case}.json"


def flaws(document: Mapping[str, Any], root: Path) -> Iterator[tuple[str, str]]:
    """JSON path and message for what the schema cannot see in the layer of a case."""
    call, expect = document["call"], document["expect"]
    for name in sorted(set(CALLS[call]) - set(document.get("given", {}))):
        yield "$.given", f"{call} needs {name}"
    unknown = sorted(set(expect) - {"or"} - set(ANSWERS[call]))
    if unknown or not set(expect) & set(ANSWERS[call]):
        yield "$.expect", f"{call} answers with {', '.join(ANSWERS[call])}"
        return
    if call == "forward" and expect["output"] not in (GOLDEN, []):
        yield "$.expect.output", "what a router chooses is written down for no token only"
    if expect.get("output") == GOLDEN and not golden_path(root, document["id"]).is_file():
        yield "$.expect.output", "no such golden; mone-ref fixtures layers writes it"
        return
    try:
        case = build(document, root)
        case.recipe.build()
        case.inputs(torch.float32)
    except LayerRecipeError as error:
        yield "$.layer", str(error)


def build(document: Mapping[str, Any], root: Path) -> LayerCase:
    """The layer of a case from its document."""
    expected = {key: values for key, values in document["expect"].items() if key in _ANSWERED}
    has_golden = expected.get("output") == GOLDEN
    return LayerCase(
        recipe=build_recipe(document["layer"]),
        call=document["call"],
        given=document.get("given", {}),
        expected=expected,
        sizes=tuple(document.get("ranks", (1,))),
        reduced=document.get("reduced", False),
        golden=read_golden(golden_path(root, document["id"])) if has_golden else None,
    )


_ANSWERED = frozenset(name for names in ANSWERS.values() for name in names)


def build_recipe(layer: Mapping[str, Any]) -> LayerRecipe:
    """The layer itself."""
    others = {int(index): tuple(ids) for index, ids in layer.get("others", {}).items()}
    return LayerRecipe(
        **{key: value for key, value in layer.items() if key not in ("substituted", "others")},
        substituted=tuple(layer["substituted"]),
        others=others,
    )


def read_golden(path: Path) -> LayerGolden:
    """The golden of a case."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    budgets = {
        name: Budget(torch.tensor(budget["token"], dtype=torch.float64), budget["max"])
        for name, budget in stored["budgets"].items()
    }
    return LayerGolden(torch.tensor(stored["output"], dtype=torch.float64), budgets)
