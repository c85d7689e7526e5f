"""The router part of config.json -> a ``RouterRule`` (SEM-1)."""

from __future__ import annotations

from mone_ref.errors import Code, show
from mone_ref.families import Family, Groups, RouterRule
from mone_ref.fields import Fields, Found

METHODS = {"greedy": False, "group_limited_greedy": True, "noaux_tc": True}
"""``topk_method`` -> whether it limits the choice to groups."""


def read(fields: Fields, family: Family, num_experts: int | None, top_k: int | None) -> RouterRule:
    """The rule by which this model routes; problems go to ``fields``."""
    normalise = family.normalise_default
    if "norm_topk_prob" in family.reads:
        normalise = fields.flag("norm_topk_prob", normalise)
    _check_scoring(fields, family)
    groups = read_groups(fields, family) if "n_group" in family.reads else None
    if groups and num_experts and top_k:
        _check_groups(fields, groups, num_experts, top_k)
    return RouterRule(family.scoring, normalise, read_factor(fields, family), groups)


def read_factor(fields: Fields, family: Family) -> float:
    """``routed_scaling_factor``, 1 in families without one."""
    if "routed_scaling_factor" not in family.reads:
        return 1.0
    factor = fields.positive(fields.agree(fields.find("routed_scaling_factor")))
    return float(family.defaults["routed_scaling_factor"]) if factor is None else factor


def read_groups(fields: Fields, family: Family) -> Groups | None:
    """The groups, or None where every expert may be chosen."""
    if not _limits_to_groups(fields, family):
        return None
    count = fields.size("n_group", default=int(family.defaults.get("n_group", 1)))
    chosen = fields.size("topk_group", default=int(family.defaults.get("topk_group", 1)))
    if count is None or chosen is None or count == 1:
        return None
    return Groups(count, chosen, family.group_best)


def _limits_to_groups(fields: Fields, family: Family) -> bool:
    """What ``topk_method`` says; without that key, groups count as soon as there are some."""
    method = fields.agree(fields.find("topk_method")) if "topk_method" in family.reads else None
    if method is None:
        return "topk_method" not in family.reads or bool(family.correction_bias)
    known = [name for name in METHODS if (name == "noaux_tc") == bool(family.correction_bias)]
    if method.value in known:
        return METHODS[method.value]
    fields.report(Code.MODEL_FEATURE, method.path, show(method.value), f"one of {known}")
    return False


def _check_scoring(fields: Fields, family: Family) -> None:
    """``scoring_func`` may be said; another one is another model."""
    for found in fields.find("scoring_func") if "scoring_func" in family.reads else ():
        if found.value != family.scoring:
            fields.report(Code.MODEL_FEATURE, found.path, show(found.value), family.scoring)


def _check_groups(fields: Fields, groups: Groups, num_experts: int, top_k: int) -> None:
    """Equal groups, each large enough for its standing, and room for every route."""
    (where,) = fields.find("n_group")[:1] or [Found("$.n_group", None)]
    size = num_experts // groups.count
    for sound, found, expected in (
        (num_experts % groups.count == 0, groups.count, f"a divisor of {num_experts} experts"),
        (size >= groups.best, groups.count, f"groups of at least {groups.best} experts"),
        (groups.chosen <= groups.count, groups.chosen, f"at most {groups.count} groups"),
        (groups.chosen * size >= top_k, groups.chosen, f"groups that hold {top_k} experts"),
    ):
        if not sound:
            fields.report(Code.MODEL_FIELD, where.path, str(found), expected)
            return
