"""The reference in exact arithmetic: what an engine would answer if it did not round.

Diagnosis compares answers with those of planted faults. A candidate that rounds as well
would be twice as far from the engine that it explains.
"""

from __future__ import annotations

from pathlib import Path

from mone_ref import generation
from mone_ref.backend import Generation, LoadOptions, Scores, Session
from mone_ref.backends.reference import RanksSession, ReferenceBackend, ReferenceSession
from mone_ref.fill.exact import exact, exact_ranks


class ExactBackend(ReferenceBackend):
    """The reference, which loads in the dtype that is asked for and scores in float64.

    Parameters are rounded to that dtype, as in any engine. Layers are those of the
    reference: their inputs are in that dtype too.
    """

    def load(self, checkpoint: Path, options: LoadOptions) -> Session:
        """As the reference."""
        session = super().load(checkpoint, options)
        if isinstance(session, RanksSession):
            return ExactRanksSession(session.model)
        assert isinstance(session, ReferenceSession)
        return ExactSession(session.model)


class ExactSession(ReferenceSession):
    """A loaded model that is widened for every call: an update may come between two."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities ``[T, V]`` in float64."""
        return [Scores(logprobs) for logprobs in exact(self.model).score(prompts)]

    def generate(self, prompts: list[list[int]], steps: int) -> list[Generation]:
        """Each prompt continued alone, in float64."""
        return generation.generate_each(exact(self.model), prompts, steps)


class ExactRanksSession(RanksSession):
    """The same over several ranks."""

    def score(self, prompts: list[list[int]]) -> list[Scores]:
        """Log-probabilities ``[T, V]`` in float64."""
        return [Scores(logprobs) for logprobs in exact_ranks(self.model).score(prompts)]
