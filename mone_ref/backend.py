"""The plug-in surface: what an engine implements to be judged.

One ``Backend`` per engine; it loads a checkpoint into a ``Session``, which
scores token ids. Everything else is optional, and overriding a method is how an
adapter says that its engine can do it. An adapter never sees expected values,
and never decides what counts as a refusal: it lets its engine's exceptions
propagate (or raises ``Refused``), and the suite weighs the evidence.

An adapter lives where it likes: in its engine's repository, say. ``--backend`` takes
``module:Class``, or a name that an installed package gives to it::

    [project.entry-points."mone_ref.backends"]
    toy = "toy_engine.adapter:ToyBackend"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mone_ref.errors import Code, Phase

if TYPE_CHECKING:
    from torch import Tensor

FEATURES = (
    "expert_parallel",
    "data_parallel",
    "eplb",
    "lora",
    "fused_shared_experts",
    "quantized_experts",
    "routed_transforms",
    "deferred_finalize",
    "prefill_context_parallel",
    "sequence_parallel",
    "router_weight_on_input",
)
"""Configurations that a case can request. An engine lists those it knows; a case
that requests another one is not applicable to it."""

PARALLEL = ("tensor_parallel", "pipeline_parallel")
"""Numbers of ranks that a case can ask for. Where an engine does not list one, a case that asks
for several is not applicable to it."""

COMPUTE_TYPES = ("float32", "tf32", "bfloat16", "float16")
"""Arithmetic in which an engine runs its matrix products; budgets are pinned for each."""


@dataclass(frozen=True)
class BackendInfo:
    """Identity and abilities of an engine, printed in every report.

    ``compute`` maps each dtype the engine runs (``float32``, ``bfloat16``,
    ``float16``) to the arithmetic of its matrix products, one of
    ``COMPUTE_TYPES``: an engine that runs float32 models in TF32 says so here.
    ``parallel`` names those of ``PARALLEL`` that it honours here.
    """

    name: str
    version: str
    device: str
    compute: Mapping[str, str]
    features: frozenset[str] = frozenset()
    components: Mapping[str, str] = field(default_factory=dict)
    workarounds: tuple[str, ...] = ()
    parallel: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoadOptions:
    """How a case wants a checkpoint loaded.

    ``max_tokens`` and ``max_prompts`` bound what will be scored, so that an
    engine can size its caches. ``engine_args`` are passed verbatim.
    """

    dtype: str = "float32"
    device: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_tokens: int = 64
    max_prompts: int = 8
    features: frozenset[str] = frozenset()
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the next token at every position of one prompt.

    Full: ``logprobs`` ``[T, V]`` (nats, any float dtype), ``ids`` is None.
    Top-n: ``ids`` ``[T, n]`` int64 and ``logprobs`` ``[T, n]``.
    An engine that scores prompts only leaves the last row out (``T-1`` rows); NaN in any
    row that is there is wrong.
    """

    logprobs: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True)
class Generation:
    """An engine's own continuation: ``tokens`` ``[S]`` and their ``scores`` (``S`` rows).

    Row ``s`` is the distribution that token ``s`` was chosen from.
    """

    tokens: Sequence[int]
    scores: Scores


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer for engines that can build it without a model.

    ``path`` is the full module path (``model.layers.3.mlp.experts``). ``declared`` is the
    config's whole list, layer index -> substituted ids as listed, since a layer finds its
    own entry by the index in its path (EXEC-6).

    ``tp`` is ``(rank, size)``. A layer built for one rank returns that rank's partial; with
    ``reduced`` it returns the sum over all ranks, as every rank sees it. The suite asks one
    rank after the other in one process: where ranks have to meet, the adapter runs them.

    ``activation_size`` is the width of padded activations, ``hidden_size`` when 0: the
    constants' sum of ``rewrite_routes`` is that wide then, zero beyond ``hidden_size``.
    """

    layer: int
    path: str
    hidden_size: int
    intermediate_size: int
    num_logical_experts: int
    top_k: int
    scoring: str
    normalise: bool
    scaling_factor: float
    scale_on_output: bool
    declared: Mapping[int, tuple[int, ...]]
    form: str
    dtype: str
    device: str
    groups: tuple[int, int] | None = None
    correction_bias: bool = False
    tp: tuple[int, int] = (0, 1)
    reduced: bool = False
    activation_size: int = 0


class Unavailable(Exception):
    """An adapter's word, with a reason, that its engine has no way to do this at all here.

    Raised by ``load``, ``build_layer``, ``Session.generate`` or a method of a ``LayerSession``,
    before the engine is asked, or where it shows nothing: an architecture for which there is no
    kernel on this device, say, substituted or not. It is no refusal and no failure: the case
    is not applicable, and the reason is printed. What an engine raises itself must reach the
    suite as it is.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Refused(Exception):
    """An engine's deliberate refusal of a checkpoint, an option or an update.

    ``evidence`` is what the engine said, per rank; ``phase`` and ``code`` (one, or several)
    when the engine itself reports them.
    """

    def __init__(
        self,
        evidence: str | Sequence[str],
        *,
        phase: Phase | None = None,
        code: Code | str | Sequence[str] | None = None,
    ) -> None:
        self.evidence = (evidence,) if isinstance(evidence, str) else tuple(evidence)
        self.phase = phase
        self.codes = (str(code),) if isinstance(code, str) else tuple(code or ())
        super().__init__("\n".join(self.evidence))


class Crashed(Exception):
    """An adapter's word that the process which ran its engine is gone.

    Where an engine has a process of its own, only the adapter can tell one that died
    from one that said no. Never a refusal, whatever its last words were.
    """


class Session(ABC):
    """One loaded checkpoint."""

    abilities: frozenset[str] | None = None

    @abstractmethod
    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Score prompts in one batch; one ``Scores`` per prompt, in their order."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Called once, also after a failure."""

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Continue each prompt by ``steps`` tokens, the likeliest at every step (decode path).

        A token that ends a text ends nothing here. One ``Generation`` per prompt, in their
        order, without the prompt's own tokens. Raises ``Unavailable`` where the engine does
        not show the scores of what it generates.
        """
        raise NotImplementedError

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants in place, by their names in the checkpoint."""
        raise NotImplementedError

    def reload(self, checkpoint: Path) -> None:
        """Reload all weights layer by layer."""
        raise NotImplementedError

    def expert_rows(self) -> dict[int, int]:
        """Layer index -> number of expert rows that were allocated."""
        raise NotImplementedError

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Per prompt: ``layers.{L}.router_ids``, ``router_weights``, ``moe_in``, ``moe_out``."""
        raise NotImplementedError


class LayerSession:
    """One MoE layer, with the weights and the substitution of its ``LayerSpec``.

    Every method is optional: some kernels are one step of a layer. ``in_place`` says that
    calls may change the tensors they are given; a change that it does not announce is an error.
    """

    in_place = False
    abilities: frozenset[str] | None = None

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """``[T, H]``, ``[T, E]`` -> ``[T, H]``."""
        raise NotImplementedError

    def forward_routed(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """``[T, H]``, ``[T, K]``, ``[T, K]`` -> ``[T, H]``."""
        raise NotImplementedError

    def rewrite_routes(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[T, K]`` twice -> rewritten weights, physical ids and the constants' sum ``[T, H]``."""
        raise NotImplementedError

    def expert_rows(self) -> int:
        """Number of expert rows that were allocated."""
        raise NotImplementedError


class Backend(ABC):
    """One engine.

    ``error_map`` and ``expectations`` are the TOML files that an adapter brings along, so
    that ``mone-ref conform --backend=NAME`` needs no further option: patterns that tell the
    engine's refusals apart, and its declared deviations. The options of the same names come
    first; None leaves it to the suite, which has files for the engines that it knows. ::

        class ToyBackend(Backend):
            error_map = Path(__file__).with_name("error_map.toml")
    """

    error_map: Path | None = None
    expectations: Path | None = None

    abilities: frozenset[str] | None = None

    @abstractmethod
    def describe(self) -> BackendInfo:
        """Name, version, device and abilities; must not load a model."""

    @abstractmethod
    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load a checkpoint directory.

        Raises ``Unavailable``, ``Refused``, or whatever the engine raises.
        """

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """Build one MoE layer from tensors under their checkpoint names, stored in float32.

        Constants and projections are named as in an OLMoE checkpoint, below ``layer.path``.
        Raises ``Unavailable``, ``Refused``, or whatever the engine raises.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - optional: most engines hold nothing between loads
        """Free what outlives the sessions. Called once, at the end of the run."""


def capable(instance: Backend | Session | LayerSession, method: str) -> bool:
    """Whether an engine can do what an optional method asks of it.

    An adapter declares it by overriding the method. One that speaks for an engine elsewhere
    overrides them all, and holds in ``abilities`` what that engine declared.
    """
    if instance.abilities is not None:
        return method in instance.abilities
    for base in type(instance).__mro__:
        if method in vars(base):
            return base.__module__ != __name__
    return False
