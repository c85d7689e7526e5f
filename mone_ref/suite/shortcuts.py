"""Whether a fault changes anything for one checkpoint, found out with as little as possible.

Most faults of the library misread a config or a file that is not what it should be. Where the
checks, or the loaded model, are the same with a fault, and none of its steps is called later,
everything that follows is the same too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from mone_ref import loading, validate
from mone_ref.backend import Scores
from mone_ref.errors import Rejected
from mone_ref.faults import Fault, planted
from mone_ref.fill.exact import exact
from mone_ref.loading import Model
from mone_ref.suite.attempt import Answers
from mone_ref.suite.identical import identical
from mone_ref.suite.planted import SEES_SEVERAL, steps, watch

T = TypeVar("T")

DISK = "mone_ref.checkpoint"
"""Steps below it make what a report does not show."""


class Same:
    """A fault changes nothing."""


class Checkpoint:
    """A checkpoint as the honest reference reads, loads and scores it, and the steps it calls."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        prompts: Sequence[Sequence[int]],
        faults: Iterable[Fault],
    ) -> None:
        self.directory, self.dtype, self.prompts = directory, dtype, prompts
        self._found: dict[Fault, Answers | Same | None] = {}
        watched = watch(faults)
        self.report, self.in_check = counted(watched, self._check)
        self.model, self.in_load = counted(watched, self._load)
        self.exact = exact(self.model) if self.model else None
        self.in_score: Counter[str] = Counter()
        if self.exact:
            _, self.in_score = counted(watched, self._score)

    def with_fault(self, fault: Fault) -> Answers | Same | None:
        """Answers, or that they are the honest ones; None where only a whole run can tell."""
        if fault not in self._found:
            self._found[fault] = self._look(fault)
        return self._found[fault]

    def _look(self, fault: Fault) -> Answers | Same | None:
        own = steps(fault)
        if any(self.in_score[step] for step in own):
            loads = any(self.in_load[step] for step in own)
            if self.exact is None or loads or SEES_SEVERAL in own:
                return None
            return self._run(fault, self._score)
        if not any(self.in_load[step] for step in own):
            return Same()
        only_checks = all(self.in_load[step] == self.in_check[step] for step in own)
        if only_checks and not any(step.startswith(DISK) for step in own):
            same = self._run(fault, self._check) == self.report
        else:
            same = self.model is not None and identical(self._run(fault, self._load), self.model)
        return Same() if same else None

    def _run(self, fault: Fault, step: Callable[[], T]) -> T | None:
        """One step with a fault; None when it fails, which a whole run then tells about."""
        try:
            with planted(fault):
                return step()
        except Exception:
            return None

    def _check(self) -> tuple[Any, ...]:
        name = str(self.dtype).removeprefix("torch.")
        report = validate.check(self.directory, dtype=name)
        return report.problems, report.config, report.not_modelled

    def _load(self) -> Model | None:
        try:
            return loading.load(self.directory, self.dtype)
        except Rejected:
            return None

    def _score(self) -> Answers:
        assert self.exact is not None
        return tuple(Scores(logprobs) for logprobs in self.exact.score(self.prompts))


def counted(watched: Fault, step: Callable[[], T]) -> tuple[T, Counter[str]]:
    """What a step returns, and how often it calls each watched one."""
    with planted(watched) as witness:
        value = step()
    return value, Counter(witness.calls)
