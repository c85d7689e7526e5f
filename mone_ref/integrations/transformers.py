"""Run a substituted checkpoint in Hugging Face transformers (5.16 or newer).

    from mone_ref.integrations.transformers import load

    model = load("path/to/checkpoint", dtype="bfloat16")
    model.generate(...)

Stock ``from_pretrained`` cannot read such a checkpoint: it finds fewer experts than the
config says, and no place for the constants. ``load`` gives the model class that the config
names, with transformers' own router, attention and expert arithmetic. Its experts modules
hold the retained experts only, and add the constants (SEM-1). No global state of
transformers is changed.

What differs from a stock model: in a substituted layer ``experts.num_experts`` counts the
retained experts, ``experts.constants`` is one more parameter, and ``save_pretrained`` writes
the substituted checkpoint back, in the form in which it was read.

Limits of transformers that hold here too: on a CPU grouped_mm needs expert rows of a multiple
of 16 bytes, and it knows no float64; eager and batched_mm take both. Tensor and expert
parallelism, quantisation and adapters stored beside the weights are not offered. MTP layers
are not loaded, and so not saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mone_ref import families, tensor_names, updates, validate
from mone_ref.checkpoint import Checkpoint
from mone_ref.config import Config
from mone_ref.errors import Problem, Rejected
from mone_ref.integrations import same_model, stored_tensors, substituted_experts
from mone_ref.integrations.substituted_experts import SubstitutedExperts
from mone_ref.precision import FLOATS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Base = nn.Module
else:
    Base = object

OLDEST = (5, 16)
EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def load(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    *,
    experts_implementation: str | None = None,
    attn_implementation: str | None = None,
    device_map: Any = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | None = None,
    offload_buffers: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint directory, substituted in either form or not at all.

    ``dtype`` holds the parameters; ``auto`` is the one that the config declares.
    ``experts_implementation`` is ``eager``, ``batched_mm`` or ``grouped_mm``, and may be
    changed later (``model.set_experts_implementation``); None leaves the choice to
    transformers, which takes grouped_mm. The rest is handed to ``from_pretrained``. Every
    tensor is read once, retained experts straight into their rows (LOAD-1, EXEC-1).

    Raises ``Rejected`` with every error that ``validate.check`` finds, before anything is
    allocated; ``ValueError`` for an unknown dtype or experts implementation, and for a
    multimodal model; ``ImportError`` when transformers is missing or older than 5.16.
    """
    require()
    import transformers

    if experts_implementation not in (None, *EXPERTS_IMPLEMENTATIONS):
        known = ", ".join(EXPERTS_IMPLEMENTATIONS)
        raise ValueError(f"experts_implementation {experts_implementation!r} is none of {known}")
    directory = Path(path)
    substituted, checkpoint, held = _checked(directory, dtype)
    architectures = substituted.model.family.architectures
    if set(architectures) & set(families.MULTIMODAL):
        raise ValueError(f"{architectures[0]} is a multimodal model: only decoders are loaded")
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    same_model.check(config, substituted.model)
    stock = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = _mixed(stock).from_pretrained(
        None,
        config=config,
        state_dict=stored_tensors.parameters(substituted, checkpoint, held),
        substituted=substituted,
        output_loading_info=True,
        generation_config=_generation_config(directory),
        dtype=held,
        experts_implementation=experts_implementation,
        attn_implementation=attn_implementation,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        offload_buffers=offload_buffers,
    )
    astray = {kind: names for kind, names in info.items() if names}
    if astray:
        raise RuntimeError(f"transformers {transformers.__version__} loads other tensors: {astray}")
    model.config.name_or_path = str(directory)
    return model


def update(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Change constants of a loaded model in place, by their names in the checkpoint (UPD-1).

    All others keep their values. Raises ``Rejected`` (phase ``update``) with every problem,
    and then nothing has changed (UPD-2): ``UPDATE``, ``CONSTANT_SHAPE``,
    ``NON_FINITE_CONSTANT`` (UPD-3); ``RuntimeError`` when the constants are offloaded.
    """
    places = _constant_places(model)
    problems: list[Problem] = []
    for name, value in tensors.items():
        problems += updates.update_problems(name, value, places.get(name, [None])[0])
    if problems:
        raise Rejected(problems)
    if any(place.is_meta for name in tensors for place in places[name]):
        raise RuntimeError("offloaded constants cannot be updated: load the model without offload")
    for name, value in tensors.items():
        for place in places[name]:
            place.copy_(value)


def expert_rows(model: PreTrainedModel) -> dict[int, int]:
    """Layer index -> rows allocated for its experts (EXEC-1)."""
    modules = experts_modules(model, model.substituted)
    return {layer: len(module.down_proj) for layer, (_, module) in sorted(modules.items())}


class SubstitutedModel(Base):
    """Mixed into a model class of transformers by ``load``: how it is built and saved."""

    def __init__(self, config: Any, *args: Any, substituted: Config, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.substituted = substituted
        modules = experts_modules(self, substituted)
        for layer in substituted.substitution.layers.values():
            _, module = modules[layer.layer]
            substituted_experts.substitute(module, layer)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the substituted checkpoint back, in the form in which it was read.

        Arguments are those of ``PreTrainedModel.save_pretrained``. Raises ``ValueError`` for
        a format of transformers' own, and for a model with offloaded weights.
        """
        if not save_original_format or distributed_checkpoint:
            raise ValueError("a substituted model is saved in its checkpoint format only")
        tensors = self.state_dict() if state_dict is None else state_dict
        if any(tensor.is_meta for tensor in tensors.values()):
            raise ValueError("a substituted model with offloaded weights cannot be saved")
        modules = experts_modules(self, self.substituted)
        paths = {layer: path for layer, (path, _) in modules.items()}
        super().save_pretrained(  # type: ignore[misc]
            save_directory,
            is_main_process,
            stored_tensors.stored(self.substituted, paths, tensors),
            save_original_format=False,
            **kwargs,
        )


@cache
def _mixed(stock: type[Any]) -> type[Any]:
    """A model class with ``SubstitutedModel`` before it, under the name of that class.

    transformers writes the name into saved configs, and looks into the source of the
    module for what the class can do.
    """
    return type(stock.__name__, (SubstitutedModel, stock), {"__module__": stock.__module__})


def _checked(directory: Path, dtype: torch.dtype | str) -> tuple[Config, Checkpoint, torch.dtype]:
    """A sound checkpoint, and the dtype of its parameters. Raises ``Rejected``, ``ValueError``."""
    held = None if dtype == "auto" else _float_type(dtype)
    report = validate.check(directory, None if held is None else str(held).removeprefix("torch."))
    if reasons := report.errors + report.not_modelled:
        raise Rejected(reasons)
    assert report.config is not None
    assert report.checkpoint is not None
    return report.config, report.checkpoint, held or _float_type(report.config.model.stored_dtype)


def experts_modules(model: nn.Module, config: Config) -> dict[int, tuple[str, Any]]:
    """Layer index -> path and module of the stacked experts of that decoder layer."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        layer = tensor_names.layer_index(config.model.family, f"{name}.")
        if layer is not None and all(
            isinstance(getattr(module, stack, None), nn.Parameter)
            for stack in substituted_experts.STACKS
        ):
            found[layer] = (name, module)
    return found


def _constant_places(model: Any) -> dict[str, list[Tensor]]:
    """Constant name -> every row ``[H]`` that holds it."""
    places: dict[str, list[Tensor]] = {}
    for _, module in experts_modules(model, model.substituted).values():
        if isinstance(module, SubstitutedExperts):
            for place, expert in enumerate(module.substitution.substituted):
                name = module.substitution.constants[expert]
                places.setdefault(name, []).append(module.constants.detach()[place])
    return places


def _generation_config(directory: Path) -> Any:
    """The generation config beside the weights; None when there is none."""
    import transformers

    if not (directory / "generation_config.json").is_file():
        return None
    return transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)


def _float_type(dtype: torch.dtype | str) -> torch.dtype:
    """``torch.bfloat16`` of itself and of ``"bfloat16"``. Raises ``ValueError``."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in FLOATS:
        known = ", ".join(str(known) for known in FLOATS)
        raise ValueError(f"dtype must be auto or one of {known}, got {dtype!r}")
    return found


def require() -> None:
    """Raise ``ImportError`` unless transformers is installed and new enough."""
    oldest = ".".join(map(str, OLDEST))
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ImportError(
            f"this needs transformers {oldest} or newer: pip install 'mone-ref[transformers]'"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(f"this needs transformers {oldest} or newer, found {found}")
