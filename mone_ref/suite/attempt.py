"""What an engine did with one checkpoint: its answers in three orders, or why there are none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from mone_ref.backend import (
    Backend,
    Generation,
    LoadOptions,
    Scores,
    Session,
    Unavailable,
    capable,
)
from mone_ref.errors import Phase
from mone_ref.suite.compare import form_flaw
from mone_ref.suite.guard import Failure, Guard
from mone_ref.suite.memory import fresh_memory_is_nan

METHODS = ("generate", "update", "reload", "expert_rows", "trace")
Prompts = Sequence[Sequence[int]]
Answers = tuple[Scores, ...]
Continuations = tuple[Generation, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """One load, the same prompts in every order, and the close.

    ``answers`` maps ``alone``, ``together`` and ``reversed`` to one answer per prompt,
    always in the order of the prompts; it is empty after a ``failure``. ``rows`` is what
    ``expert_rows`` said, None where the engine cannot tell. ``abilities`` are the optional
    methods of its session. ``closing`` is a failure to close.
    """

    failure: Failure | None = None
    answers: Mapping[str, Answers] = field(default_factory=dict)
    rows: Mapping[int, int] | Failure | None = None
    abilities: frozenset[str] = frozenset()
    closing: Failure | None = None

    @property
    def flaw(self) -> str:
        """Why this load does not vouch for another one: it failed, or is no finite answer."""
        if self.failure is not None:
            return f"{self.failure.kind}: {self.failure.first_line}"
        for order, answers in self.answers.items():
            for index, scores in enumerate(answers):
                flaw = finite_flaw(scores)
                if flaw:
                    return f"prompt {index}, {order}: {flaw}"
        return ""


def finite_flaw(scores: Scores) -> str:
    """Why an answer is not even finite numbers."""
    flaw = form_flaw(scores, len(scores.logprobs) if scores.logprobs.ndim else 0)
    if flaw:
        return flaw
    return "" if scores.logprobs.isfinite().all() else "the answer holds NaN or infinity"


@dataclass
class Opened:
    """A session, or why there is none; ``closing`` is known once the block is left."""

    session: Session | Failure
    closing: Failure | None = None


class Engine:
    """A backend whose every call is guarded.

    What it allocates while it loads or changes a model is NaN until it is written, so that
    a weight that was never loaded cannot be right by luck.
    """

    def __init__(self, backend: Backend, guard: Guard) -> None:
        self.backend = backend
        self.guard = guard

    @contextmanager
    def open(self, checkpoint: Path, options: LoadOptions) -> Iterator[Opened]:
        """Load a checkpoint; the session is closed whatever happens in the block.

        Raises ``Unavailable`` where the adapter does.
        """
        loaded = self.guard.call(Phase.LOAD, lambda: self._load(checkpoint, options))
        if isinstance(loaded, Unavailable):
            raise loaded
        opened = Opened(loaded)
        try:
            yield opened
        finally:
            if isinstance(opened.session, Session):
                closed = self.guard.call(Phase.RUN, opened.session.close, closing=True)
                opened.closing = closed if isinstance(closed, Failure) else None

    def _load(self, checkpoint: Path, options: LoadOptions) -> Session | Unavailable:
        try:
            with fresh_memory_is_nan():
                session = self.backend.load(checkpoint, options)
        except Unavailable as unavailable:
            return unavailable
        if not isinstance(session, Session):
            raise TypeError(f"load() returned {type(session).__name__}, not a Session")
        return session

    def update(self, session: Session, tensors: Mapping[str, Tensor]) -> Failure | None:
        """Direct update of a loaded model."""
        return self._change(Phase.UPDATE, lambda: session.update(tensors))

    def reload(self, session: Session, checkpoint: Path) -> Failure | None:
        """Layerwise reload of a loaded model."""
        return self._change(Phase.RELOAD, lambda: session.reload(checkpoint))

    def _change(self, phase: Phase, change: Callable[[], None]) -> Failure | None:
        def on_fresh_memory() -> None:
            with fresh_memory_is_nan():
                change()

        return self.guard.call(phase, on_fresh_memory)

    def score(self, session: Session, prompts: Prompts) -> Answers | Failure:
        """Answers to prompts in one batch."""
        return self.guard.call(Phase.RUN, lambda: snapshot(session, prompts))

    def answers(self, session: Session, prompts: Prompts) -> dict[str, Answers] | Failure:
        """Answers with prompts alone, together and in reverse order."""
        return in_every_order(lambda some: self.score(session, some), prompts)

    def continuations(
        self, session: Session, prompts: Prompts, steps: int
    ) -> dict[str, Continuations] | Failure:
        """The same for the engine's own next tokens. Raises ``Unavailable`` where it does."""

        def made(some: Prompts) -> Continuations | Unavailable:
            try:
                return continuations(session, some, steps)
            except Unavailable as unavailable:
                return unavailable

        def asked(some: Prompts) -> Continuations | Failure:
            given = self.guard.call(Phase.RUN, lambda: made(some))
            if isinstance(given, Unavailable):
                raise given
            return given

        return in_every_order(asked, prompts)

    def traces(self, session: Session, prompts: Prompts) -> Sequence[Mapping[str, Tensor]]:
        """What a session records of each prompt; nothing when it fails to."""

        def record() -> list[dict[str, Tensor]]:
            return session.trace([list(prompt) for prompt in prompts])

        traces = self.guard.call(Phase.RUN, record)
        return () if isinstance(traces, Failure) else traces

    def rows(self, session: Session) -> Mapping[int, int] | Failure | None:
        """Allocated expert rows per layer, where the engine can tell."""
        if not capable(session, "expert_rows"):
            return None
        return self.guard.call(Phase.LOAD, lambda: dict(session.expert_rows()))

    def attempt(self, checkpoint: Path, prompts: Prompts, options: LoadOptions) -> Attempt:
        """Load, ask and close. Raises ``Unavailable`` where the adapter does."""
        with self.open(checkpoint, options) as opened:
            if isinstance(opened.session, Failure):
                return Attempt(opened.session)
            session = opened.session
            abilities = frozenset(name for name in METHODS if capable(session, name))
            rows = self.rows(session)
            answers = self.answers(session, prompts)
        if isinstance(answers, Failure):
            return Attempt(answers, rows=rows, abilities=abilities, closing=opened.closing)
        return Attempt(None, answers, rows, abilities, opened.closing)


def in_every_order(
    ask: Callable[[Prompts], tuple[T, ...] | Failure], prompts: Prompts
) -> dict[str, tuple[T, ...]] | Failure:
    """What comes of prompts alone, together and in reverse order, always in their own order."""
    alone: list[T] = []
    for prompt in prompts:
        one = ask([prompt])
        if isinstance(one, Failure):
            return one
        alone += one
    together = ask(prompts)
    if isinstance(together, Failure):
        return together
    backwards = ask(prompts[::-1])
    if isinstance(backwards, Failure):
        return backwards
    return {"alone": tuple(alone), "together": together, "reversed": backwards[::-1]}


def snapshot(session: Session, prompts: Prompts) -> Answers:
    """Score, and copy: an engine may reuse its buffers. Raises ``TypeError``."""
    answers = session.score([list(prompt) for prompt in prompts])
    if not isinstance(answers, list) or len(answers) != len(prompts):
        found = f"{len(answers)} answers" if isinstance(answers, list) else type(answers).__name__
        raise TypeError(f"score() returned {found} for {len(prompts)} prompts")
    return tuple(copied(answer) for answer in answers)


def continuations(session: Session, prompts: Prompts, steps: int) -> Continuations:
    """Continue, and copy. Raises ``TypeError``."""
    made = session.generate([list(prompt) for prompt in prompts], steps)
    if not isinstance(made, list) or len(made) != len(prompts):
        found = f"{len(made)} answers" if isinstance(made, list) else type(made).__name__
        raise TypeError(f"generate() returned {found} for {len(prompts)} prompts")
    return tuple(map(copied_continuation, made))


def copied_continuation(made: Generation) -> Generation:
    """Tokens as plain numbers, and scores that nothing else can change."""
    if not isinstance(made, Generation):
        raise TypeError(f"generate() returned {type(made).__name__}, not Generation")
    return Generation([operator.index(token) for token in made.tokens], copied(made.scores))


def copied(scores: Scores) -> Scores:
    """An answer on the CPU that nothing else can change."""
    if not isinstance(scores, Scores):
        raise TypeError(f"score() returned {type(scores).__name__}, not Scores")
    for name in ("logprobs", "ids"):
        value = getattr(scores, name)
        if not isinstance(value, Tensor) and (name == "logprobs" or value is not None):
            found = type(value).__name__
            raise TypeError(f"score() returned {name} as {found}, expected a torch.Tensor")
    ids = None if scores.ids is None else scores.ids.detach().cpu().clone()
    return Scores(scores.logprobs.detach().cpu().clone(), ids)
