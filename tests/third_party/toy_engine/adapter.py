"""What mone-ref needs to judge the toy engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from mone_ref.backend import Backend, BackendInfo, LoadOptions, Scores, Session, Unavailable
from mone_ref.backends import architectures
from toy_engine.engine import NAMES, Model

HERE = Path(__file__).parent


class ToyBackend(Backend):
    """One per engine."""

    error_map = HERE / "error_map.toml"
    expectations = HERE / "expectations.toml"

    def describe(self) -> BackendInfo:
        """What the engine is, and in which dtypes it runs with which arithmetic."""
        return BackendInfo(
            name="toy",
            version="0.3.0",
            device="cpu",
            compute={"float32": "float32"},
            components={"numpy": np.__version__},
        )

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """Load; the engine's own exceptions go through, and the error map knows them.

        Raises ``Unavailable`` for a model that the engine does not have, substituted or not.
        """
        for name in architectures.named(architectures.read(checkpoint)):
            if name not in NAMES:
                raise Unavailable(f"the engine has no {name}")
        return ToySession(Model(checkpoint))


class ToySession(Session):
    """One per loaded checkpoint."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities [T, V] of the token after each one, prompt by prompt."""
        return [Scores(torch.from_numpy(self.model.score(prompt))) for prompt in prompts]

    def close(self) -> None:
        """Numpy holds nothing that has to be let go."""

    # What follows is optional. To override a method is to say that the engine can do it.

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Change constants of the loaded model."""
        self.model.update({name: value.float().numpy() for name, value in tensors.items()})

    def expert_rows(self) -> dict[int, int]:
        """How many experts of each layer take memory."""
        mlps = enumerate(self.model.mlps)
        return {layer: len(mlp) for layer, mlp in mlps if isinstance(mlp, dict)}
