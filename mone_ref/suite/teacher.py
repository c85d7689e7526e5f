"""The right scores along the tokens that an engine chose itself (SPEC, Numbers, Decoding).

Which tokens an engine takes cannot be pinned: where two are equally likely, honest engines
differ. So the oracle follows the engine, as far as no honest rounding changes a route, and the
budget of every row is made as a fixture's is, from the same low-precision runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mone_ref import loading
from mone_ref.fill import certificate
from mone_ref.fill.golden import golden
from mone_ref.fill.variants import variants
from mone_ref.suite.golden import Budget, Golden, GoldenPrompt


@dataclass(frozen=True)
class Lesson:
    """What an engine owes along one continuation.

    ``rows`` are the certified ones, None without any: row ``s`` is what token ``s`` of the
    continuation had to be chosen from. ``decoded`` counts the tokens of the continuation that
    these rest on, as far as they have a route to a substituted expert.
    """

    rows: GoldenPrompt | None
    decoded: int


class Teacher:
    """The oracle and the eight low-precision runs of one checkpoint at one compute type.

    No budget is smaller than what the prompts of the fixture have anywhere, ``pinned``: a
    handful of tokens may all have met lucky sums. Raises ``Rejected`` for a checkpoint that the
    oracle refuses.
    """

    def __init__(self, checkpoint: Path, compute: str, pinned: Golden) -> None:
        self.compute = compute
        budgets = [prompt.budgets[compute] for prompt in pinned.prompts]
        self.least_token = max(float(budget.token.min()) for budget in budgets)
        self.least_maximum = max(budget.maximum for budget in budgets)
        self.oracle = loading.load(checkpoint, torch.float64)
        self.runs = list(variants(checkpoint, compute))
        self._lessons: dict[tuple[tuple[int, ...], tuple[int, ...]], Lesson] = {}

    @property
    def vocabulary(self) -> int:
        """How many ids there are."""
        return self.oracle.config.model.vocab_size

    def lesson(self, prompt: Sequence[int], tokens: Sequence[int]) -> Lesson:
        """The right rows after ``prompt`` and after each of ``tokens`` but the last one."""
        key = tuple(prompt), tuple(tokens)
        if key not in self._lessons:
            self._lessons[key] = self._lesson(list(prompt), list(tokens))
        return self._lessons[key]

    def _lesson(self, prompt: list[int], tokens: list[int]) -> Lesson:
        sequence = prompt + tokens[:-1]
        certified = sequence[: self._certified(sequence)]
        first = len(prompt) - 1
        if len(certified) <= first:
            return Lesson(None, 0)
        found = golden(self.oracle, self.runs, [certified])
        token = found[f"prompt.0.{self.compute}.token"][first:]  # [N]
        maximum = float(found[f"prompt.0.{self.compute}.max"])
        budget = Budget(token.clamp(min=self.least_token), max(maximum, self.least_maximum))
        logprobs = found["prompt.0.logprobs"][first:]  # [N, V]
        rows = GoldenPrompt(certified[first:], logprobs, {self.compute: budget})
        return Lesson(rows, self._substituted(certified, len(prompt)))

    def _certified(self, sequence: list[int]) -> int:
        """How many tokens of a sequence no honest rounding routes otherwise."""
        exact = certificate.contests(self.oracle, sequence)
        runs = [certificate.contests(run.model, sequence) for run in self.runs]
        return certificate.first_uncertified(exact, runs)

    def _substituted(self, sequence: list[int], given: int) -> int:
        """How many tokens behind the first ``given`` have a route to a substituted expert."""
        trace: dict[str, Tensor] = {}
        self.oracle.logits(sequence, trace.__setitem__)
        hit = torch.zeros(len(sequence), dtype=torch.bool)  # [T]
        for layer, entry in self.oracle.substitution.layers.items():
            ids = trace[f"layers.{layer}.router_ids"]  # [T, K]
            hit |= torch.isin(ids, torch.tensor(entry.substituted)).any(dim=-1)
        return int(hit[given:].sum())
