"""Wrong handling of what only some families have: a factor, a correction, groups, shared
experts, MTP layers, a text config.

Faults of a layer sit where it substitutes: one of the base model decides nothing (GEN-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from mone_ref import config, declaration, moe, routing
from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.config import Config
from mone_ref.declaration import Bounds, Listed, Named, Substitution
from mone_ref.errors import Code, Problem
from mone_ref.faults import plant
from mone_ref.faults.plant import Patch
from mone_ref.faults.rare import all_substituted
from mone_ref.fields import ROOT, Fields, Found
from mone_ref.model_config import ModelConfig
from mone_ref.moe import MoeLayer, Record
from mone_ref.precision import Precision
from mone_ref.rules import constants as constant_rules
from mone_ref.rules import unread
from mone_ref.strict_json import child

# The right steps, bound before anything is planted.
_constants = moe.constants
_forward = moe.forward
_routes = moe.routes
_bind = config.bind
_agreed = declaration.agreed
_missing_constants = constant_rules.missing_constants
_unbuilt_layers = unread.unbuilt_layers


# -- routed_scaling_factor


def constants_unscaled(
    weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision
) -> Tensor:
    """Scale the output of the experts, and add constants afterwards."""
    return _constants(weights / layer.rule.scaling_factor, ids, layer, precision)


def constants_scaled_twice(
    weights: Tensor, ids: Tensor, layer: MoeLayer, precision: Precision
) -> Tensor:
    """Scale weights that are scaled already, for the constants."""
    return _constants(weights * layer.rule.scaling_factor, ids, layer, precision)


def factor_lost(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Leave the factor to a step that a substituted layer does not have."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    return (weights / layer.rule.scaling_factor if substitutes(layer) else weights), ids


# -- the correction of the router


def correction_pays(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Pay routes with the corrected scores that they were chosen by."""
    weights, ids = _routes(logits, layer, precision)  # [T, K]
    if not substitutes(layer) or layer.correction is None:
        return weights, ids
    scores = routing.score(logits, layer.rule, precision.router)  # [T, E]
    paid = routing.weigh(routing.corrected(scores, layer.correction), ids)  # [T, K]
    paid = routing.normalise(paid) if layer.rule.normalise else paid
    return routing.scale(paid, layer.rule), ids


def correction_of_retained(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Correct the scores of retained experts only."""
    if layer.correction is None:
        return _routes(logits, layer, precision)
    correction = layer.correction.clone()  # [E]
    correction[list(layer.substitution.substituted)] = 0
    return _routes(logits, replace(layer, correction=correction), precision)


# -- groups


def groups_ignored(logits: Tensor, layer: MoeLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Choose among all experts."""
    rule = replace(layer.rule, groups=None) if substitutes(layer) else layer.rule
    return _routes(logits, replace(layer, rule=rule), precision)


def groups_by_other_sum(
    logits: Tensor, layer: MoeLayer, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Let a group stand by its best expert where the family takes two, and the other way."""
    groups = layer.rule.groups
    if groups is None or not substitutes(layer):
        return _routes(logits, layer, precision)
    rule = replace(layer.rule, groups=replace(groups, best=3 - groups.best))
    return _routes(logits, replace(layer, rule=rule), precision)


# -- shared experts


def shared_dropped(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """Build a substituted layer without its shared experts."""
    kept = None if substitutes(layer) else layer.shared
    return _forward(x, replace(layer, shared=kept), precision, record)


def shared_with_retained(
    x: Tensor, layer: MoeLayer, precision: Precision, record: Record
) -> Tensor:
    """Leave out the shared experts for a token without a retained route."""
    y = _forward(x, layer, precision, record)  # [T, H]
    routed = _forward(x, replace(layer, shared=None), precision, record)  # [T, H]
    return y.where(~all_substituted(x, layer, precision), routed)


def shared_scaled(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """Scale the whole output of a layer, shared experts included."""
    y = _forward(x, layer, precision, record)  # [T, H]
    if layer.shared is None or not substitutes(layer):
        return y
    return y + (layer.rule.scaling_factor - 1) * moe.shared(x, layer.shared, precision)


def shared_ungated(x: Tensor, layer: MoeLayer, precision: Precision, record: Record) -> Tensor:
    """Add shared experts without their gate."""
    if layer.shared is None or not substitutes(layer):
        return _forward(x, layer, precision, record)
    open_wide = replace(layer, shared=replace(layer.shared, gate=None))
    return _forward(x, open_wide, precision, record)


def substitutes(layer: MoeLayer) -> bool:
    """Whether a layer has a substituted expert."""
    return bool(layer.substitution.listed)


# -- MTP layers


def mtp_counted_anew(model: ModelConfig, listed: Listed, named: Named) -> Substitution:
    """Count MTP layers from zero again, and lay their lists over the decoder's layers."""
    bound = _bind(model, listed, named)
    names = {index: dict(entry.constants) for index, entry in bound.layers.items()}
    for index, entry in bound.unbuilt.items():
        below = model.moe_layers[index - model.num_layers]
        names[below] = {**names.get(below, {}), **entry.constants}
    return declaration.bind(bound.form, names, model.num_experts, model.num_layers)


def mtp_constants_refused(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Refuse the constants of a layer that is not built."""
    yield from _unbuilt_layers(config, checkpoint)
    for entry in config.substitution.unbuilt.values():
        for name in entry.constants.values():
            if name in checkpoint.tensors:
                yield tensor_problem(
                    Code.UNKNOWN_TENSOR, checkpoint, name, "a constant", "no such layer"
                )


def mtp_constants_demanded(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Ask for the constants of every listed layer, built or not."""
    everything = {**config.substitution.layers, **config.substitution.unbuilt}
    whole = replace(config.substitution, layers=everything)
    yield from _missing_constants(replace(config, substitution=whole), checkpoint)


# -- the text config


def one_place(seen: Callable[[list[Found]], list[Found]]) -> Callable[..., Listed | None]:
    """Read the list in some of the places that hold one."""

    def read(fields: Fields, bounds: Bounds) -> Listed | None:
        approx = seen(fields.find(declaration.APPROX))
        copies = [declaration.read_map(fields, found, bounds) for found in approx]
        return _agreed(fields, approx, copies)

    return read


def at_the_top(places: list[Found]) -> list[Found]:
    """The top level, and never the text config."""
    return [found for found in places if found.path == child(ROOT, declaration.APPROX)]


def below_the_top(places: list[Found]) -> list[Found]:
    """The text config of a model that has one; this model has."""
    return [found for found in places if found.path != child(ROOT, declaration.APPROX)]


def first_place(fields: Fields, approx: list[Found], copies: list[Listed | None]) -> Listed | None:
    """Take the first of two lists, whatever the other one says."""
    return _agreed(fields, approx[:1], copies[:1])


def two_places_refused(
    fields: Fields, approx: list[Found], copies: list[Listed | None]
) -> Listed | None:
    """Refuse a second list, although it says the same."""
    if len(approx) > 1:
        found = approx[0]
        fields.report(Code.PLACEMENT_CONFLICT, found.path, "two lists", "one list", "FMT-15")
    return _agreed(fields, approx, copies)


CONSTANTS = "mone_ref.moe", "constants"
ROUTES = "mone_ref.moe", "routes"
FORWARD = "mone_ref.moe", "forward"
READ = "mone_ref.declaration", "read"
AGREED = "mone_ref.declaration", "agreed"

fault = partial(plant.fault, stage="run", group="routing")

FAULTS = (
    fault(
        "factor-not-on-constants",
        "The scaling factor multiplies the output of experts, and not the constants.",
        "SEM-6",
        Patch(*CONSTANTS, constants_unscaled),
    ),
    fault(
        "factor-twice-on-constants",
        "The scaling factor reaches constants twice.",
        "SEM-6",
        Patch(*CONSTANTS, constants_scaled_twice),
    ),
    fault(
        "factor-lost",
        "A substituted layer has no scaling factor.",
        "SEM-6",
        Patch(*ROUTES, factor_lost),
    ),
    fault(
        "correction-pays",
        "Routes of a substituted layer are paid with corrected scores.",
        "SEM-2",
        Patch(*ROUTES, correction_pays),
    ),
    fault(
        "correction-of-retained",
        "The router's correction is cut to the retained experts.",
        "SEM-7",
        Patch(*ROUTES, correction_of_retained),
    ),
    fault(
        "groups-ignored",
        "The router of a substituted layer does not limit its choice to groups.",
        "SEM-2",
        Patch(*ROUTES, groups_ignored),
    ),
    fault(
        "groups-by-other-sum",
        "Groups of a substituted layer stand by another number of experts than the family's.",
        "SEM-2",
        Patch(*ROUTES, groups_by_other_sum),
    ),
    fault(
        "shared-dropped",
        "A substituted layer has no shared experts.",
        "SEM-7",
        Patch(*FORWARD, shared_dropped),
    ),
    fault(
        "shared-with-retained",
        "A token without a retained route gets nothing from shared experts.",
        "SEM-7",
        Patch(*FORWARD, shared_with_retained),
    ),
    fault(
        "shared-scaled",
        "The scaling factor multiplies shared experts of a substituted layer too.",
        "SEM-7",
        Patch(*FORWARD, shared_scaled),
    ),
    fault(
        "shared-ungated",
        "The shared expert of a substituted layer is added without its gate.",
        "SEM-7",
        Patch(*FORWARD, shared_ungated),
    ),
    fault(
        "mtp-counted-anew",
        "The list of an MTP layer is laid over a layer of the decoder.",
        "LOAD-6",
        Patch("mone_ref.config", "bind", mtp_counted_anew),
        group="config",
        stage="parse",
    ),
    fault(
        "mtp-constants-refused",
        "Constants of an MTP layer that is not built are refused.",
        "LOAD-4",
        Patch("mone_ref.rules.unread", "unbuilt_layers", mtp_constants_refused),
        group="loading",
        stage="load",
    ),
    fault(
        "mtp-constants-demanded",
        "Constants of an MTP layer that is not built have to be there.",
        "LOAD-6",
        Patch("mone_ref.rules.constants", "missing_constants", mtp_constants_demanded),
        group="loading",
        stage="load",
    ),
    fault(
        "text-config-unread",
        "A list on the text config is not read.",
        "FMT-3",
        Patch(*READ, one_place(at_the_top)),
        group="config",
        stage="parse",
    ),
    fault(
        "top-level-unread",
        "A list at the top level is not read where there is a text config.",
        "FMT-3",
        Patch(*READ, one_place(below_the_top)),
        group="config",
        stage="parse",
    ),
    fault(
        "first-list-wins",
        "Of two lists that differ the first one is taken.",
        "FMT-15",
        Patch(*AGREED, first_place),
        group="config",
        stage="parse",
    ),
    fault(
        "second-list-refused",
        "A list in a second place is refused, although both are equal.",
        "FMT-15",
        Patch(*AGREED, two_places_refused),
        group="config",
        stage="parse",
    ),
)
