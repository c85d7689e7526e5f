"""A checkpoint directory -> a model in memory, and what may change afterwards.

Every rule is checked before anything is allocated (``validate.py``). Retained
experts go to their compact row by logical id (LOAD-1); a substituted expert is
never allocated (EXEC-1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mone_ref import layout, updates, validate
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import Config, LayerSubstitution, Substitution
from mone_ref.errors import Rejected, show
from mone_ref.experts import ExpertWeights
from mone_ref.model import decoder
from mone_ref.model.attention import AttentionWeights
from mone_ref.model.decoder import Decoder, DecoderLayer
from mone_ref.model.latent_attention import LatentWeights
from mone_ref.moe import MoeLayer, Record, SharedExperts
from mone_ref.precision import FLOATS, Precision, exact_products, plain

Reading = Callable[[str], None]
"""Receives the name of every tensor before it is read; what a progress line counts."""


class Model:
    """A loaded checkpoint that scores prompts, one at a time, on the CPU.

    ``precision`` may be replaced to move single cast points; its ``params`` must stay
    the dtype in which the weights were loaded.
    """

    def __init__(self, config: Config, weights: Decoder, precision: Precision) -> None:
        self.config = config
        self.weights = weights
        self.precision = precision

    @property
    def substitution(self) -> Substitution:
        """What is substituted, layer by layer."""
        return self.config.substitution

    def logits(self, prompt: Sequence[int], record: Record = decoder.ignore) -> Tensor:
        """Logits ``[T, V]`` of one prompt. Raises ``ValueError`` on an empty or foreign prompt."""
        ids = token_ids(prompt, self.config.model.vocab_size)  # [T]
        with torch.inference_mode(), exact_products():
            return decoder.logits(ids, self.weights, self.config.model, self.precision, record)

    def score(
        self, prompts: Sequence[Sequence[int]], record: Record = decoder.ignore
    ) -> list[Tensor]:
        """Log-probabilities ``[T, V]`` in nats of the next token, for every prompt.

        Computed in the model's precision, returned in float32 or wider.
        """
        return score_each(self, prompts, record)

    def expert_rows(self) -> dict[int, int]:
        """Index of each MoE layer -> number of physical rows allocated for it (EXEC-1)."""
        return {i: layer.experts.rows for i, layer in self.weights.moe_layers.items()}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants in place, by their names in the checkpoint (UPD-1).

        A name that several experts share changes all of them (FMT-29); all other constants
        keep their values. Raises ``Rejected`` (phase ``update``) with every problem, and
        then nothing has changed (UPD-2): ``UPDATE``, ``CONSTANT_SHAPE``,
        ``NON_FINITE_CONSTANT`` (UPD-3).
        """
        updates.update(self.weights, tensors)

    def reload(self, path: str | Path) -> None:
        """Refuse a layerwise reload; the weights stay as they are (UPD-4, UPD-5)."""
        updates.reload(self.weights, path)


def token_ids(prompt: Sequence[int], vocab: int) -> Tensor:
    """One prompt as a tensor ``[T]``. Raises ``ValueError`` on an empty or foreign prompt."""
    whole = all(type(token) is int and 0 <= token < vocab for token in prompt)
    if not prompt or not whole:
        raise ValueError(f"a prompt needs token ids in [0, {vocab}), got {show(list(prompt))}")
    return torch.tensor(prompt, dtype=torch.int64)


def score_each(model: Model, prompts: Sequence[Sequence[int]], record: Record) -> list[Tensor]:
    """Score every prompt by itself: nothing of one reaches another."""
    return [
        decoder.log_probabilities(model.logits(prompt, record), model.precision)
        for prompt in prompts
    ]


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> Model:
    """Load a checkpoint directory with its parameters in ``dtype``.

    Raises ``Rejected`` with every error that ``validate.check`` finds, before anything
    is allocated; ``ValueError`` when ``dtype`` is not a float type of at least 16 bits.
    """
    return build(check(path, dtype), dtype)


def check(path: str | Path, dtype: torch.dtype) -> validate.Report:
    """All that is to be said of a checkpoint for ``dtype``. Raises ``ValueError`` as ``load``."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {FLOATS}, got {dtype}")
    return validate.check(Path(path), dtype=str(dtype).removeprefix("torch."))


def quiet(name: str) -> None:
    """Tell nobody."""


def build(report: validate.Report, dtype: torch.dtype, reading: Reading = quiet) -> Model:
    """A model from a checkpoint that was checked for ``dtype``. Raises as ``accepted``."""
    config, tensors = accepted(report, dtype, reading)
    return Model(config, read_decoder(config, tensors), plain(dtype))


def accepted(
    report: validate.Report, dtype: torch.dtype, reading: Reading = quiet
) -> tuple[Config, Tensors]:
    """The config and the tensors of a checkpoint that was checked for ``dtype``.

    Raises ``Rejected`` with the errors of ``report``, or with what is not computed here.
    """
    if reasons := report.errors + report.not_modelled:
        raise Rejected(reasons)
    assert report.config is not None
    assert report.checkpoint is not None
    names = layout.of_model(report.config)
    return report.config, Tensors(report.checkpoint, names, dtype, reading)


class Tensors:
    """Tensors of a checked checkpoint, by name, in one dtype.

    ``names`` are those of the model (``layout.py``): what else is stored is never read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Collection[str],
        dtype: torch.dtype,
        reading: Reading = quiet,
    ) -> None:
        self.checkpoint = checkpoint
        self.names = names
        self.dtype = dtype
        self.reading = reading
        self._open = cache(self._open_shard)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, in the dtype of the model or in another one."""
        self.reading(name)
        shard = self._open(self.checkpoint.tensors[name].file)
        tensor: Tensor = shard.get_tensor(name)
        return tensor.to(dtype or self.dtype)

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        """A tensor that not every model has; None in a model without it."""
        return self.read(name, dtype) if name in self.names else None

    def _open_shard(self, file: str) -> Any:
        return safe_open(self.checkpoint.directory / file, framework="pt")


def read_decoder(config: Config, tensors: Tensors) -> Decoder:
    """All weights of a decoder."""
    model = config.model
    embedding = tensors.read(model.family.embedding_name)  # [V, H]
    return Decoder(
        embedding=embedding,
        layers=[read_layer(config, tensors, index) for index in range(model.num_layers)],
        norm=tensors.read(model.family.norm_name),
        head=embedding if model.tie_word_embeddings else tensors.read("lm_head.weight"),
    )


def read_layer(config: Config, tensors: Tensors, index: int) -> DecoderLayer:
    """One decoder layer."""
    model = config.model
    prefix = model.family.layer_prefix(index)
    read_attention = read_grouped if model.latent is None else read_latent
    read_mlp = read_dense if index in model.dense_layers else read_moe
    return DecoderLayer(
        attention_norm=tensors.read(f"{prefix}.input_layernorm.weight"),
        attention=read_attention(tensors, f"{prefix}.self_attn"),
        mlp_norm=tensors.read(f"{prefix}.post_attention_layernorm.weight"),
        mlp=read_mlp(config, tensors, index),
    )


def read_grouped(tensors: Tensors, path: str) -> AttentionWeights:
    """Grouped-query attention; norms and biases where the checkpoint of the model has them."""
    return AttentionWeights(
        q=tensors.read(f"{path}.q_proj.weight"),
        k=tensors.read(f"{path}.k_proj.weight"),
        v=tensors.read(f"{path}.v_proj.weight"),
        o=tensors.read(f"{path}.o_proj.weight"),
        q_norm=tensors.find(f"{path}.q_norm.weight"),
        k_norm=tensors.find(f"{path}.k_norm.weight"),
        q_bias=tensors.find(f"{path}.q_proj.bias"),
        k_bias=tensors.find(f"{path}.k_proj.bias"),
        v_bias=tensors.find(f"{path}.v_proj.bias"),
    )


def read_latent(tensors: Tensors, path: str) -> LatentWeights:
    """Multi-head latent attention, with a latent for queries or without."""
    q_down = tensors.find(f"{path}.q_a_proj.weight")
    return LatentWeights(
        q_down=q_down,
        q_norm=tensors.find(f"{path}.q_a_layernorm.weight"),
        q_up=tensors.read(f"{path}.{'q_proj' if q_down is None else 'q_b_proj'}.weight"),
        kv_down=tensors.read(f"{path}.kv_a_proj_with_mqa.weight"),
        kv_norm=tensors.read(f"{path}.kv_a_layernorm.weight"),
        kv_up=tensors.read(f"{path}.kv_b_proj.weight"),
        o=tensors.read(f"{path}.o_proj.weight"),
    )


def read_dense(config: Config, tensors: Tensors, index: int) -> ExpertWeights:
    """The MLP of a layer without experts, as one row."""
    family = config.model.family
    return read_mlp(tensors, family.mlp_names(f"{family.layer_prefix(index)}.{family.dense}"))


def read_mlp(tensors: Tensors, names: Iterable[str]) -> ExpertWeights:
    """A single MLP, as one row."""
    parts = (tensors.read(name) for name in names)
    return ExpertWeights(*(part[None] for part in parts))  # [1, I, H], [1, I, H], [1, H, I]


def read_moe(config: Config, tensors: Tensors, index: int) -> MoeLayer:
    """One MoE layer: router, retained experts in compact rows, constants."""
    model, family = config.model, config.model.family
    correction = f"{family.layer_prefix(index)}.{family.correction_bias}"
    wide = torch.promote_types(tensors.dtype, torch.float32)
    layer = config.substitution.layer(index, model.num_experts)
    return MoeLayer(
        router=read_router(config, tensors, index),
        experts=read_experts(config, tensors, layer),
        constants=read_constants(config, tensors, layer),
        substitution=layer,
        rule=model.router,
        top_k=model.top_k,
        correction=tensors.find(correction, wide),  # [E], never rounded to the model's dtype
        shared=read_shared(config, tensors, index),
    )


def read_shared(config: Config, tensors: Tensors, index: int) -> SharedExperts | None:
    """Shared experts as one row, with their gate."""
    family = config.model.family
    if not config.model.shared_intermediate_size:
        return None
    prefix = family.layer_prefix(index)
    return SharedExperts(
        weights=read_mlp(tensors, family.mlp_names(f"{prefix}.{family.shared}")),
        gate=tensors.find(f"{prefix}.{family.shared_gate}.weight"),  # [1, H]
    )


def read_router(config: Config, tensors: Tensors, index: int) -> Tensor:
    """The router of one layer, over all logical experts: ``[E, H]``."""
    return tensors.read(config.model.family.router_name(index))


def read_experts(config: Config, tensors: Tensors, layer: LayerSubstitution) -> ExpertWeights:
    """Retained experts, each read by logical id into its row (LOAD-1, EXEC-2)."""
    model, family = config.model, config.model.family
    rows, hidden, inner = len(layer.retained), model.hidden_size, model.intermediate_size
    gate = torch.empty(rows, inner, hidden, dtype=tensors.dtype)  # [R, I, H]
    up = torch.empty(rows, inner, hidden, dtype=tensors.dtype)  # [R, I, H]
    down = torch.empty(rows, hidden, inner, dtype=tensors.dtype)  # [R, H, I]
    for row, expert in enumerate(layer.retained):
        for stack, projection in zip((gate, up, down), family.projections, strict=True):
            fill(stack[row], tensors, family.projection_name(layer.layer, expert, projection))
    return ExpertWeights(gate, up, down)


def read_constants(config: Config, tensors: Tensors, layer: LayerSubstitution) -> Tensor:
    """Constants of one layer, ascending by logical id: ``[S, H]``."""
    constants = torch.empty(len(layer.substituted), config.model.hidden_size, dtype=tensors.dtype)
    for row, expert in enumerate(layer.substituted):
        fill(constants[row], tensors, layer.constants[expert])
    return constants


def fill(place: Tensor, tensors: Tensors, name: str) -> None:
    """Read one tensor into its place: a row of stacked experts, or of constants."""
    place[...] = tensors.read(name)
