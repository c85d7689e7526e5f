"""A loaded model without rounding: its parameters as loaded, everything else in float64."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mone_ref.loading import Model
from mone_ref.parallel.model import ParallelModel
from mone_ref.precision import plain


def exact(model: Model) -> Model:
    """A copy that computes in float64 with the parameters of ``model``."""
    return Model(model.config, in_float64(model.weights), plain(torch.float64))


def exact_ranks(model: ParallelModel) -> ParallelModel:
    """The same of a model over several ranks."""
    stages = in_float64(model.stages)
    return ParallelModel(model.config, model.plan, stages, plain(torch.float64))


def in_float64(value: Any) -> Any:
    """A copy of nested dataclasses and lists with every float tensor widened."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list):
        return [in_float64(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: in_float64(each) for name, each in held.items()})
    return value
