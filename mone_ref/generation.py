"""Greedy continuation: the reference as an engine that decodes, one token after the other.

Nothing is cached. Every step computes the whole sequence again, which gives the numbers of a
step on cached keys and values, and leaves attention in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mone_ref.backend import Generation, Scores
from mone_ref.loading import Model


def generate_each(model: Model, prompts: Sequence[Sequence[int]], steps: int) -> list[Generation]:
    """Continue every prompt by itself: nothing of one reaches another."""
    return [generate(model, prompt, steps) for prompt in prompts]


def generate(model: Model, prompt: Sequence[int], steps: int) -> Generation:
    """The ``steps`` likeliest next tokens of one prompt, one after the other, ties to the lower id.

    Row ``s`` of the scores ``[S, V]`` is what token ``s`` was chosen from. Raises ``ValueError``
    on an empty or foreign prompt.
    """
    sequence, rows = list(prompt), []
    for _ in range(steps):
        (logprobs,) = model.score([sequence])  # [T, V]
        rows.append(logprobs[-1])
        sequence.append(int(logprobs[-1].argmax()))
    return Generation(sequence[len(prompt) :], Scores(torch.stack(rows)))
