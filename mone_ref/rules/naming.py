"""A model that is stored whole, under names that its family does not use.

Every tensor would be reported as missing. One problem that shows the names found says
what is wrong; the rules that look for single tensors then add nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from mone_ref import layout
from mone_ref.checkpoint import Checkpoint
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import count, plain, some
from mone_ref.config import Config
from mone_ref.errors import Code, Problem, show
from mone_ref.families import DenseRule
from mone_ref.tensor_names import expert_tensor, layer_index


def decoder_path(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The decoder lies under its family's path, not under one more prefix or one less.

    Judged only where no tensor is under that path at all.
    """
    family = config.model.family
    if any(name.startswith(f"{family.stack}.") for name in checkpoint.tensors):
        return
    layers = family.stack.rpartition(".")[2]
    pattern = re.compile(
        rf"(.*?\b{layers})\.[0-9]+\.(?:{re.escape(family.experts)}|{re.escape(family.router)})\..*",
        re.ASCII | re.DOTALL,
    )
    matches = [match for name in checkpoint.tensors if (match := pattern.fullmatch(name))]
    if matches:
        (stack, number), *_ = Counter(match[1] for match in matches).most_common()
        first = next(match[0] for match in matches if match[1] == stack)
        found = f"{count(number, 'tensor')} of experts and routers under {plain(stack)}"
        expected = f"them under {family.stack}, the path of {family.architectures[0]}"
        yield tensor_problem(Code.DECODER_PATH, checkpoint, first, found, expected, "FMT-4")


def layer_kinds(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """The layers that store experts are those to which the config gives experts (FMT-1).

    A layer stored with a dense MLP and with experts counts as one with experts.
    """
    model, family = config.model, config.model.family
    if family.dense_rule is DenseRule.NONE:
        return
    stored = {one.layer for name in checkpoint.tensors if (one := expert_tensor(family, name))}
    stored |= {i for i in range(model.num_layers) if family.router_name(i) in checkpoint.tensors}
    dense = {
        layer
        for layer in set(model.moe_layers) - stored
        if family.dense_name(layer, family.gate) in checkpoint.tensors
    }
    wrong = dense | (stored & model.dense_layers)
    if wrong:
        where = f"{family.layer_prefix(min(wrong))}.{family.dense}"
        found = f"experts in layers {show(sorted(set(model.moe_layers) ^ wrong))}"
        expected = f"experts in layers {show(model.moe_layers)}, as config.json says"
        yield tensor_problem(Code.LAYER_KINDS, checkpoint, where, found, expected, "FMT-1")


def no_router(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Experts without any router: the routers have another name (FMT-1)."""
    family = config.model.family
    routers = [family.router_name(layer) for layer in config.model.moe_layers]
    if not _stores_experts(config, checkpoint) or any(r in checkpoint.tensors for r in routers):
        return
    found = "no router in any layer, and experts"
    if candidates := router_candidates(config, checkpoint):
        found += f"; {some(candidates, 'unread tensor')} with {config.model.num_experts} rows"
    expected = f"routers named {family.stack}.N.{family.router}.weight"
    yield tensor_problem(Code.MISSING_TENSOR, checkpoint, routers[0], found, expected, "FMT-1")


def no_expert(config: Config, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Not one expert under its family's path: they have another name, or none are stored."""
    if not config.model.moe_layers or _stores_experts(config, checkpoint):
        return
    found = "no tensor of any expert"
    if candidates := expert_candidates(config, checkpoint):
        found += f"; {some(candidates, 'unread tensor')} with a number below a layer"
    where = config.model.family.experts_path(config.model.moe_layers[0])
    expected = f"tensors named {config.model.family.stack}.N.{config.model.family.experts}.J"
    yield tensor_problem(Code.MISSING_EXPERT, checkpoint, where, found, expected, "LOAD-11")


def router_candidates(
    config: Config, checkpoint: Checkpoint, layer: int | None = None
) -> list[str]:
    """Unread matrices of a layer, or of all, with one row per logical expert."""
    family, known = config.model.family, layout.expected(config)
    return [
        name
        for name, entry in checkpoint.tensors.items()
        if len(entry.shape) == 2
        and entry.shape[0] == config.model.num_experts
        and name not in known
        and expert_tensor(family, name) is None
        and (index := layer_index(family, name)) is not None
        and layer in (None, index)
    ]


def expert_candidates(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Unread tensors of decoder layers with one more number in their name."""
    family, known = config.model.family, layout.expected(config)
    return [
        name
        for name in checkpoint.tensors
        if name not in known
        and layer_index(family, name) is not None
        and sum(part.isdigit() for part in name.split(".")) > 1
    ]


def _stores_experts(config: Config, checkpoint: Checkpoint) -> bool:
    """Whether any weight of a retained expert of a built layer is stored, fused or not."""
    tensors = (expert_tensor(config.model.family, name) for name in checkpoint.tensors)
    return any(
        tensor.layer < config.model.num_layers
        and not tensor.is_constant
        and (
            tensor.is_fused
            or tensor.part.removesuffix(".weight") in config.model.family.projections
        )
        for tensor in tensors
        if tensor
    )
