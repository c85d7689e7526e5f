"""Hugging Face transformers as an engine, through ``mone_ref.integrations.transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mone_ref import families
from mone_ref.backend import (
    Backend,
    BackendInfo,
    Generation,
    LayerSession,
    LayerSpec,
    LoadOptions,
    Refused,
    Scores,
    Session,
    Unavailable,
)
from mone_ref.backends import architectures
from mone_ref.backends.transformers_layer import DTYPES, TransformersLayer
from mone_ref.errors import Code, Phase
from mone_ref.integrations import transformers as integration

ENGINE_ARGS = ("experts_implementation", "attn_implementation")


class TransformersBackend(Backend):
    """The model class that a config names, on the CPU or a GPU.

    Raises ``ImportError`` when transformers is missing or too old.
    """

    def __init__(self) -> None:
        integration.require()

    def describe(self) -> BackendInfo:
        """Float32, bfloat16 and float16; no feature that can be requested."""
        return BackendInfo(
            name="transformers",
            version=version("transformers"),
            device=default_device(),
            compute={dtype: dtype for dtype in DTYPES},
            components={"torch": torch.__version__},
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load through the integration.

        Raises ``Rejected``; ``ValueError`` for an argument; ``Unavailable`` for a multimodal model.
        """
        if set(families.MULTIMODAL) & set(architectures.named(architectures.read(checkpoint))):
            raise Unavailable("only models that are a decoder are loaded, no multimodal ones")
        unknown = set(options.engine_args) - set(ENGINE_ARGS)
        if unknown:
            known = ", ".join(ENGINE_ARGS)
            raise ValueError(f"engine arguments are {known}, got {', '.join(sorted(unknown))}")
        if options.tensor_parallel > 1 or options.pipeline_parallel > 1:
            raise ValueError("this backend runs a whole model in one process")
        device = default_device() if options.device == "auto" else options.device
        model = integration.load(checkpoint, options.dtype, **options.engine_args)
        return TransformersSession(model.to(device))

    def build_layer(self, layer: LayerSpec, tensors: Mapping[str, Tensor]) -> LayerSession:
        """OLMoE's router and its substituted experts, run eager, which takes rows of any size."""
        if layer.tp != (0, 1):
            raise Unavailable("one rank of a layer needs a process group in transformers")
        plain = layer.scoring == "softmax" and layer.scaling_factor == 1
        if not plain or layer.groups or layer.correction_bias:
            raise Unavailable("only the router of OLMoE is built here")
        return TransformersLayer(layer, tensors)


class TransformersSession(Session):
    """One loaded model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Full log-probabilities ``[T, V]``, all prompts in one batch, padded on the right."""
        longest = max(map(len, prompts))
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        mask = [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor(padded, device=self.model.device),  # [B, T]
                attention_mask=torch.tensor(mask, device=self.model.device),  # [B, T]
                use_cache=False,
            ).logits  # [B, T, V]
            logprobs = logits.float().log_softmax(-1).cpu()
        return [Scores(rows[: len(ids)]) for rows, ids in zip(logprobs, prompts, strict=True)]

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Greedy tokens of the model's own ``generate``, all in one batch, padded on the left.

        Keys and values are cached, so every step but the first is a pass of one token a prompt.
        """
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            made = self.model.generate(
                input_ids=torch.tensor(padded, device=self.model.device),  # [B, T]
                attention_mask=torch.tensor(mask, device=self.model.device),  # [B, T]
                max_new_tokens=steps,
                do_sample=False,
                use_cache=True,
                eos_token_id=[],  # go on behind an end
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logits = torch.stack(made.logits, dim=1)  # [B, S, V]
            logprobs = logits.float().log_softmax(-1).cpu()
        tokens = made.sequences[:, longest:].tolist()  # [B, S]
        return [Generation(*pair) for pair in zip(tokens, map(Scores, logprobs), strict=True)]

    def close(self) -> None:
        """Nothing is held outside the model."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants; all or nothing."""
        integration.update(self.model, tensors)

    def reload(self, checkpoint: Path) -> None:
        """Always refused: transformers loads a model once."""
        raise Refused(
            "transformers has no layerwise reload: load the checkpoint again",
            phase=Phase.RELOAD,
            code=Code.UNSUPPORTED_RELOAD,
        )

    def expert_rows(self) -> dict[int, int]:
        """Rows of the stacked weights."""
        return integration.expert_rows(self.model)


def default_device() -> str:
    """A GPU when there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
