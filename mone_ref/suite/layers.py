"""Running a layer case: build the layer for every rank, ask it, add up the ranks, compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mone_ref.backend import LayerSession, Unavailable, capable
from mone_ref.errors import Phase
from mone_ref.suite import judge
from mone_ref.suite.bench import Bench
from mone_ref.suite.cases import Case
from mone_ref.suite.compare import same
from mone_ref.suite.guard import Failure
from mone_ref.suite.judge import Judgement
from mone_ref.suite.layer_cases import LayerCase
from mone_ref.suite.layer_compare import compare_answer
from mone_ref.suite.memory import fresh_memory_is_nan
from mone_ref.suite.outcomes import Outcome

Tensors = list[Tensor]


@dataclass(frozen=True)
class Changed:
    """A call changed a tensor that it was given, and the session does not say that it may."""

    argument: int


def run(bench: Bench, case: Case, dtype: str) -> Judgement:
    """Judge one layer case at every number of ranks; the worst one is told."""
    assert case.layer is not None
    if not capable(bench.engine.backend, "build_layer"):
        return Judgement(Outcome.NOT_APPLICABLE, "the engine has no build_layer()")
    judged: list[Judgement] = []
    for size in case.layer.sizes:
        judged.append(at_size(bench, case, case.layer, dtype, size))
        if judged[-1].outcome is not Outcome.OK:
            break
    parts = {size: found for one in judged for size, found in one.parts.items()}
    return replace(max(judged, key=badness), parts=parts)


def badness(judgement: Judgement) -> tuple[bool, float]:
    """Order of judgements: those that are not ok last, then by their ratio to the budget."""
    ratio = judgement.numbers.token_ratio if judgement.numbers else 0.0
    return judgement.outcome is not Outcome.OK, ratio


def at_size(bench: Bench, case: Case, layer: LayerCase, dtype: str, size: int) -> Judgement:
    """Ask every rank; each alone where the layer reduces, else their sum."""
    answers: list[Tensors] = []
    for rank in range(size):
        answer = ask(bench, layer, dtype, (rank, size))
        if isinstance(answer, Unavailable):
            return Judgement(Outcome.NOT_APPLICABLE, answer.reason)
        if isinstance(answer, Failure):
            return of_failure(case, answer)
        if isinstance(answer, Changed):
            found = f"{layer.call}() changed its argument {answer.argument}: declare in_place"
            return Judgement(Outcome.ERRORED, found)
        answers.append(answer)
    if not layer.reduced:
        answers = [summed(answers)]
    compared = [
        compare_answer(layer, answer, dtype, bench.info.compute[dtype]) for answer in answers
    ]
    rank, worst = max(enumerate(compared), key=lambda entry: judge.badness(entry[1]))
    place = f"{size} ranks, rank {rank}: " if layer.reduced else f"{size} ranks: "
    place = place if size > 1 else ""
    outcome, found = Outcome.OK, f"{place}{layer.call}() is right"
    if worst.flaw:
        outcome, found = Outcome.MISMATCH, f"{place}{worst.flaw}"
    return Judgement(outcome, found, numbers=worst.numbers, parts={size: answers})


def of_failure(case: Case, failure: Failure) -> Judgement:
    """A refusal where the case allows one; any other failure is one."""
    if not case.expected.groups:
        return judge.of_failure(failure)
    return judge.of_refusal(failure, case.expected)


def summed(answers: list[Tensors]) -> Tensors:
    """What a reduction over ranks gives, in float64: the harness adds no rounding of its own."""
    if len(answers) == 1:
        return answers[0]
    return [torch.stack(parts).double().sum(dim=0) for parts in zip(*answers, strict=True)]


def ask(
    bench: Bench, layer: LayerCase, dtype: str, tp: tuple[int, int]
) -> Tensors | Failure | Unavailable | Changed:
    """Build one rank's layer and call it once."""
    engine = bench.engine
    spec = layer.recipe.spec(dtype, tp, layer.reduced)

    def build() -> LayerSession | Unavailable:
        try:
            with fresh_memory_is_nan():
                built = engine.backend.build_layer(spec, layer.recipe.build())
        except Unavailable as unavailable:
            return unavailable
        if not isinstance(built, LayerSession):
            raise TypeError(f"build_layer() returned {type(built).__name__}, not a LayerSession")
        return built

    session = engine.guard.call(Phase.LOAD, build)
    if not isinstance(session, LayerSession):
        return session
    if not capable(session, layer.call):
        return Unavailable(f"the engine's layers have no {layer.call}()")
    given = layer.inputs(getattr(torch, dtype))
    return engine.guard.call(Phase.RUN, lambda: call(session, layer.call, given))


def call(session: LayerSession, method: str, given: Tensors) -> Tensors | Unavailable | Changed:
    """One call with fresh inputs and fresh memory. Raises ``TypeError``."""
    handed = [tensor.clone() for tensor in given]
    try:
        with fresh_memory_is_nan():
            answer = getattr(session, method)(*handed)
    except Unavailable as unavailable:
        return unavailable
    if not session.in_place:
        for index, (before, after) in enumerate(zip(given, handed, strict=True)):
            if not same(before, after):
                return Changed(index)
    return as_tensors(method, answer)


def as_tensors(method: str, answer: Any) -> Tensors:
    """An answer as tensors on the CPU that nothing else can change."""
    parts = answer if method == "rewrite_routes" else (answer,)
    if method == "expert_rows":
        parts = (torch.tensor(int(answer)),)
    if not isinstance(parts, tuple) or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"{method}() returned {type(answer).__name__}")
    if method == "rewrite_routes" and len(parts) != 3:
        raise TypeError(f"rewrite_routes() returned {len(parts)} tensors, not 3")
    return [part.detach().cpu().clone() for part in parts]
