"""The oracle itself as an engine: the default of ``make conformance``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import __version__, loading
from mone_ref.backend import FEATURES, Backend, BackendInfo, LoadOptions, Refused, Scores, Session
from mone_ref.errors import Code, Phase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ReferenceBackend(Backend):
    """mone-ref's own oracle at an engine's precision."""

    def describe(self) -> BackendInfo:
        """Float32, bfloat16 and float16 on the CPU; every listed feature is refused."""
        return BackendInfo(
            name="reference",
            version=__version__,
            device="cpu",
            compute={dtype: dtype for dtype in DTYPES},
            features=frozenset(FEATURES),
            components={"torch": torch.__version__},
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load through ``mone_ref.load``. Raises ``Rejected``; ``Refused`` for a feature."""
        if options.features:
            names = ", ".join(sorted(options.features))
            raise Refused(
                f"expert substitution excludes: {names}",
                phase=Phase.INIT,
                code=Code.UNSUPPORTED_FEATURE,
            )
        return ReferenceSession(loading.load(checkpoint, DTYPES[options.dtype]))


class ReferenceSession(Session):
    """One loaded ``mone_ref.Model``."""

    def __init__(self, model: loading.Model) -> None:
        self.model = model

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Full log-probabilities ``[T, V]``, each prompt alone."""
        return [Scores(logprobs) for logprobs in self.model.score(prompts)]

    def close(self) -> None:
        """Nothing is held outside the model."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Change constants; all or nothing."""
        self.model.update(tensors)

    def reload(self, checkpoint: Path) -> None:
        """Always refused."""
        self.model.reload(checkpoint)

    def expert_rows(self) -> dict[int, int]:
        """Rows of the compact weights."""
        return self.model.expert_rows()

    def trace(self, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Every recorded intermediate of every MoE layer."""
        traces: list[dict[str, Tensor]] = []
        for prompt in prompts:
            trace: dict[str, Tensor] = {}
            self.model.score([prompt], trace.__setitem__)
            traces.append(trace)
        return traces
