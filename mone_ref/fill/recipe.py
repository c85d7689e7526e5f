"""A recipe: which checkpoint to make, in a few lines of YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from mone_ref import strict_yaml
from mone_ref.backend import COMPUTE_TYPES
from mone_ref.checkpoint.opening import read_regular
from mone_ref.errors import show
from mone_ref.families import FAMILIES, DenseRule, Family
from mone_ref.strict_yaml import StrictYamlError

FAMILY_FIELDS = {
    "normalise": "norm_topk_prob",
    "head_dim": "head_dim",
    "dense_layers": "mlp_only_layers",
    "sparse_step": "decoder_sparse_step",
}
"""Fields of a recipe that a family must read, and the config key that says so."""

SCHEMA = json.loads(Path(__file__).with_name("recipe.schema.json").read_text(encoding="utf-8"))


class RecipeError(Exception):
    """A recipe that cannot be filled; the message names file, field, found and expected."""


@dataclass(frozen=True)
class Recipe:
    """What one fixture is made from; the fields of ``recipe.schema.json``.

    ``substitution`` maps a layer (as text, like the config) to its ids in the order in
    which they are listed. ``loudness`` scales expert outputs and constants by
    ``2**loudness``. ``constant_seeds`` re-seeds single constants (``{"1.5": seed}`` for
    expert 5 of layer 1), which makes the target of an update. In the explicit ``form``
    each group of ``shared_constants`` is one tensor, and constants may be named
    ``<constant_prefix>.<layer>.<expert>``. ``shards`` is the number of weight files, with
    an ``index`` or without; 0 is one file under its usual name. ``prompts`` are lengths.
    ``control`` names the plain sibling when it is shared with another fixture.

    Only for families that have it: ``normalise``, ``head_dim`` (0 is hidden / heads),
    ``dense_layers`` and ``sparse_step`` (which layers have no experts), and
    ``dense_intermediate_size`` of those (0 is the experts' own). ``fields`` go to config.json
    as they are: everything else that a family's config says.
    """

    name: str
    family: str
    seed: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    top_k: int
    substitution: Mapping[str, list[int]]
    prompts: list[int]
    normalise: bool = False
    head_dim: int = 0
    dense_layers: list[int] = field(default_factory=list)
    sparse_step: int = 1
    dense_intermediate_size: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    stored: str = "bfloat16"
    loudness: int = 0
    form: str = "approx"
    constant_prefix: str = ""
    shared_constants: list[list[str]] = field(default_factory=list)
    shards: int = 0
    index: bool = True
    constant_seeds: Mapping[str, int] = field(default_factory=dict)
    compute_types: list[str] = field(default_factory=lambda: list(COMPUTE_TYPES))
    control: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether this is a control: nothing is substituted."""
        return not self.substitution

    @property
    def control_name(self) -> str:
        """Name of the plain sibling."""
        return self.control or f"{self.name}-plain"

    @property
    def row(self) -> Family:
        """The family's row."""
        return next(family for family in FAMILIES if family.name == self.family)

    def plain(self) -> Recipe:
        """The control: the same values and files, with no expert substituted (GEN-3)."""
        return replace(
            self,
            name=self.control_name,
            substitution={},
            form=DEFAULTS.form,
            constant_prefix=DEFAULTS.constant_prefix,
            shared_constants=[],
            constant_seeds={},
            control="",
        )


def read(path: Path) -> Recipe:
    """Read a recipe file. Raises ``RecipeError``."""
    try:
        document = strict_yaml.parse(read_regular(path))
    except (OSError, StrictYamlError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    try:
        return parse(document)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def parse(document: Any) -> Recipe:
    """A recipe from its YAML document. Raises ``RecipeError`` naming the field."""
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)
    )
    if error is not None:
        raise RecipeError(f"{error.json_path}: {error.message}")
    recipe = Recipe(**document)
    shared = [place for group in recipe.shared_constants for place in group]
    for key, places in (("constant_seeds", recipe.constant_seeds), ("shared_constants", shared)):
        for place in places:
            layer, expert = place.split(".")
            if int(expert) not in recipe.substitution.get(layer, []):
                raise RecipeError(f"$.{key}: {show(place)} is not a substituted expert")
    followers = {place for group in recipe.shared_constants for place in group[1:]}
    for place in followers & recipe.constant_seeds.keys():
        raise RecipeError(f"$.constant_seeds: {show(place)} is not the first of its shared group")
    if len(set(shared)) != len(shared):
        raise RecipeError("$.shared_constants: an expert stands in two groups")
    for name, key in FAMILY_FIELDS.items():
        if name in document and key not in recipe.row.reads:
            raise RecipeError(f"$.{name}: {recipe.family} has no {key}")
    if recipe.dense_intermediate_size and recipe.row.dense_rule is DenseRule.NONE:
        raise RecipeError(f"$.dense_intermediate_size: {recipe.family} has no dense layers")
    return recipe


def dump(recipe: Recipe) -> str:
    """A recipe as YAML, one field a line, defaults left out."""
    kept = {
        name: value
        for name, value in asdict(recipe).items()
        if name in SCHEMA["required"] or value != getattr(DEFAULTS, name)
    }
    return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=100)


DEFAULTS = Recipe("", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, [])
