"""Which known mistake explains a failure: the planted fault whose answer is nearest.

Every fault of the library is simulated on the failing case. Faults that cannot be told
apart there form one class. A class is named only when it is near and no other one is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mone_ref.faults import FAULTS, Fault, decode
from mone_ref.suite import distance, divergence, golden, rounding
from mone_ref.suite.cases import USUAL, Case, Kind
from mone_ref.suite.compare import MULTIPLIER
from mone_ref.suite.distance import BROKEN, Distance, Yardstick
from mone_ref.suite.golden import Golden
from mone_ref.suite.rounding import BrokeDown, Candidate, Flip
from mone_ref.suite.shortcuts import Checkpoint, Same
from mone_ref.suite.simulate import Simulated, Simulator

NEAR = 2.0
"""An explanation is at most this far; honest engines stay within 2.04 on every fixture."""
FAR = 4.0
"""Every other class is at least this far, or nothing is claimed."""
REFINED = 3
"""How many of the nearest candidates are looked at again, with their own rounding."""
HONEST = "honest"
WITHIN_ROUNDING = "The right answer is as near as any: no fault is told from rounding here."


@dataclass(frozen=True)
class Place:
    """Where an answer first differs; ``layer`` is known where the engine can trace."""

    prompt: int
    token: int
    layer: int | None = None


@dataclass(frozen=True)
class Rival:
    """The nearest class that was not chosen."""

    faults: tuple[str, ...]
    distance: float


@dataclass(frozen=True)
class Diagnosis:
    """What explains one failure, or that nothing known does.

    ``kind`` is ``known-fault``, ``router-flip`` or ``unknown``. ``faults`` is the class, the
    likeliest first; empty where nothing is claimed. Distances are in budgets of the golden.
    """

    kind: str
    faults: tuple[str, ...]
    sentence: str
    clauses: tuple[str, ...] = ()
    distance: float | None = None
    runner_up: Rival | None = None
    place: Place | None = None

    def __str__(self) -> str:
        kind = "router flip" if self.kind == "router-flip" else self.kind
        parts = [f"{one_of(self.faults) or kind}: {self.sentence}"]
        if self.faults and self.distance is not None:
            parts.append(f"Distance {self.distance:.2g} x budget.")
        if self.runner_up:
            rival = f"{one_of(self.runner_up.faults)}, {self.runner_up.distance:.3g} x budget"
            rival = rival.replace(HONEST, "the right answer")
            parts.append(f"{'Next class' if self.claims else 'Nearest'}: {rival}.")
        if self.clauses:
            parts.append(f"Breaks {', '.join(self.clauses)}.")
        if self.place:
            layer = "" if self.place.layer is None else f"layer {self.place.layer}, "
            parts.append(
                f"First differs at {layer}token {self.place.token} of prompt {self.place.prompt}."
            )
        return " ".join(parts)

    @property
    def claims(self) -> bool:
        """Whether something is said to explain the failure."""
        return self.kind != "unknown"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = asdict(self)
        plain["faults"], plain["clauses"] = list(self.faults), list(self.clauses)
        if self.runner_up:
            plain["runner_up"]["faults"] = list(self.runner_up.faults)
        return plain


@dataclass(frozen=True)
class Explanation:
    """One candidate and how far it is. ``fault`` is None for the honest engine."""

    fault: Fault | None
    simulated: Simulated
    distance: Distance
    flips: tuple[Flip, ...] = ()

    @property
    def name(self) -> str:
        """Id of the fault."""
        return self.fault.id if self.fault else HONEST


class Diagnostician:
    """Compares failures with every fault of a library.

    ``simulator`` runs cases on the reference in exact arithmetic. ``ratios`` keeps how far
    each fault was from each failure, for the conclusion of a run.
    """

    def __init__(self, simulator: Simulator, faults: Mapping[str, Fault] = FAULTS) -> None:
        self.simulator = simulator
        self.faults = {
            name: fault
            for name, fault in faults.items()
            if not fault.equivalent and fault.group != decode.GROUP
        }
        self.ratios: dict[tuple[str, str], dict[str, float]] = {}
        self.fixtures = simulator.fixtures
        self._goldens: dict[str, Golden] = {}
        self._checkpoints: dict[tuple[str, str, str], Checkpoint] = {}

    def knowing(self, faults: Mapping[str, Fault]) -> Diagnostician:
        """One with another library, and with everything that was simulated so far."""
        other = Diagnostician(self.simulator, faults)
        other._goldens, other._checkpoints = self._goldens, self._checkpoints
        return other

    def diagnose(
        self,
        case: Case,
        dtype: str,
        compute: str,
        seen: Simulated,
        traces: Sequence[Mapping[str, Tensor]] = (),
    ) -> Diagnosis | None:
        """What explains a failure; None for an engine that broke down and answered nothing, and
        for one that took tokens of its own, which no simulation takes again.

        ``seen`` is what the engine did, ``traces`` what it recorded of each prompt, where it
        can.
        """
        if seen.result.outcome in BROKEN or case.kind is Kind.DECODE:
            return None
        yardstick = self.yardstick(case, dtype, compute)
        ranked = self.ranked(case, dtype, seen, yardstick)
        if ranked[0].distance.ratio > NEAR:
            ranked = self.refined(case, seen, yardstick, ranked)
        self.ratios[case.id, dtype] = {each.name: each.distance.ratio for each in ranked}
        diagnosis = self.concluded(ranked, yardstick)
        return self.placed(case, diagnosis, seen, yardstick, traces)

    def checkpoint(self, fixture: str) -> Path:
        """What was loaded."""
        return self.fixtures / fixture / "checkpoint"

    def golden(self, fixture: str) -> Golden:
        """The right answers, read once."""
        if fixture not in self._goldens:
            path = self.checkpoint(fixture).with_name("golden.safetensors")
            self._goldens[fixture] = golden.read(path)
        return self._goldens[fixture]

    def yardstick(self, case: Case, dtype: str, compute: str) -> Yardstick:
        """What distances are measured in: budgets of the prompts that the case asks."""
        if case.layer is not None:
            return Yardstick(compute, dtype, layer=case.layer)
        asked = case.change.source if case.change else case.fixture
        return Yardstick(compute, dtype, self.golden(asked).prompts)

    def ranked(
        self, case: Case, dtype: str, seen: Simulated, yardstick: Yardstick
    ) -> list[Explanation]:
        """The honest engine and every fault, the nearest first.

        Among equals those come first that the case was written for, then those that are like
        no other.
        """
        found = []
        for fault in (None, *self.faults.values()):
            simulated = self.simulated(case, dtype, fault)
            away = distance.between(seen, simulated, yardstick)
            found.append(Explanation(fault, simulated, away))

        def order(one: Explanation) -> tuple[float, bool, bool]:
            return one.distance.ratio, one.name not in case.kills, root(one) != one.name

        return sorted(found, key=order)

    def simulated(self, case: Case, dtype: str, fault: Fault | None) -> Simulated:
        """What an engine with a fault does with a case; the honest one's record where the fault
        changes nothing, or where only its answers count."""
        plain = case.change is None and case.layer is None and case.setting == USUAL
        if fault is None or not plain:
            return self.simulator.run(bare(case), dtype, fault)
        honest = self.simulator.run(bare(case), dtype)
        found = self.looked_at(case, dtype).with_fault(fault)
        if found is None:
            return self.simulator.run(bare(case), dtype, fault)
        if isinstance(found, Same):
            return honest
        return replace(honest, answers=dict.fromkeys(honest.answers, found))

    def looked_at(self, case: Case, dtype: str) -> Checkpoint:
        """The checkpoint of a case, looked at once."""
        key = case.fixture, dtype, json.dumps(case.edits)
        if key not in self._checkpoints:
            prompts = self.golden(case.fixture).ids
            directory = self.simulator.copy(case.fixture, case.edits)
            storage = getattr(torch, dtype)
            every = FAULTS.values()
            self._checkpoints[key] = Checkpoint(directory, storage, prompts, every)
        return self._checkpoints[key]

    def refined(
        self, case: Case, seen: Simulated, yardstick: Yardstick, ranked: list[Explanation]
    ) -> list[Explanation]:
        """The same, where a token or two keep a candidate from being near.

        A wrong engine leaves the activations that prompts are certified for; see ``rounding``.
        """
        if case.change is not None or case.setting != USUAL:
            return ranked
        close: list[Explanation] = []
        for each in ranked:
            told_apart = not any(self.alike(other, each, yardstick) for other in close)
            if told_apart and typical(each.distance) <= NEAR:
                close.append(each)
            if len(close) == REFINED:
                break
        better = {}
        for each in close:
            with suppress(BrokeDown):
                better[each.name] = self.reconsidered(case, seen, yardstick, each)
        again = [better.get(each.name, each) for each in ranked]
        return sorted(again, key=lambda each: each.distance.ratio)

    def reconsidered(
        self, case: Case, seen: Simulated, yardstick: Yardstick, one: Explanation
    ) -> Explanation:
        """One candidate by its own budgets, then with routes that flip."""
        prompts = [prompt.ids for prompt in yardstick.prompts]
        directory = self.simulator.copy(case.fixture, case.edits)
        candidate = Candidate(directory, prompts, yardstick.compute, one.fault)
        if one.fault is not None:
            own = distance.widened(yardstick, rounding.own_budgets(candidate))
            away = distance.between(seen, one.simulated, own)
            if away.ratio <= NEAR:
                return replace(one, distance=away)
        explained = rounding.flips_that_explain(candidate, seen.answers, yardstick, NEAR)
        if explained is None:
            return one
        away, flips = explained
        return replace(one, distance=away, flips=tuple(flips))

    def concluded(self, ranked: Sequence[Explanation], yardstick: Yardstick) -> Diagnosis:
        """The claim, if there is one."""
        winner = ranked[0]
        members, others = self.class_of(winner, ranked, yardstick)
        rival = None
        if others and isfinite(others[0].distance.ratio):
            alike, _ = self.class_of(others[0], others, yardstick)
            rival = Rival(names(alike), others[0].distance.ratio)
        if winner.distance.ratio > NEAR or (rival and rival.distance < FAR):
            return unknown(winner, members, rival)
        if HONEST in names(members) and not winner.flips:
            return Diagnosis("unknown", (), WITHIN_ROUNDING, (), winner.distance.ratio)
        if HONEST in names(members) or winner.fault is None:
            return Diagnosis(
                "router-flip", (), told(winner.flips), (), winner.distance.ratio, rival
            )
        return Diagnosis(
            "known-fault",
            names(members),
            " ".join([winner.fault.sentence, told(winner.flips)]).strip(),
            winner.fault.clauses,
            winner.distance.ratio,
            rival,
        )

    def class_of(
        self, one: Explanation, among: Sequence[Explanation], yardstick: Yardstick
    ) -> tuple[list[Explanation], list[Explanation]]:
        """Those that cannot be told from ``one`` on this case, and the others; order is kept.

        What looks like it by nature and does not here is neither.
        """
        members: list[Explanation] = []
        others: list[Explanation] = []
        for other in among:
            if other is one or self.alike(one, other, yardstick):
                members.append(other)
            elif root(other) != root(one):
                others.append(other)
        return members, others

    def alike(self, one: Explanation, other: Explanation, yardstick: Yardstick) -> bool:
        """Whether two candidates answer equally, within the budget."""
        if other.simulated.answers is one.simulated.answers and one.simulated.answers:
            return True
        return distance.between(one.simulated, other.simulated, yardstick).ratio <= NEAR

    def placed(
        self,
        case: Case,
        diagnosis: Diagnosis,
        seen: Simulated,
        yardstick: Yardstick,
        traces: Sequence[Mapping[str, Tensor]],
    ) -> Diagnosis:
        """The same with the place where the answer leaves the right one."""
        right = self.simulator.run(bare(case), yardstick.dtype)
        first = distance.between(seen, right, yardstick).beyond(MULTIPLIER)
        place = Place(*first) if first else None
        if traces:
            prompts = self.golden(case.fixture).ids
            directory = self.simulator.copy(case.fixture, case.edits)
            parting = divergence.first(directory, yardstick.compute, prompts, traces)
            if parting is not None:
                place = Place(parting.prompt, parting.token, parting.layer)
                sentence = f"{diagnosis.sentence} {parting.sentence}"
                diagnosis = replace(diagnosis, sentence=sentence)
        return replace(diagnosis, place=place)


def root_of(fault: Fault) -> str:
    """The fault that stands for all that look alike by nature."""
    return fault.looks_like or fault.id


def root(explanation: Explanation) -> str:
    """The same of a candidate."""
    return root_of(explanation.fault) if explanation.fault else HONEST


def bare(case: Case) -> Case:
    """A case without its control: of a failure it is known that the base model is read right."""
    return replace(case, kind=Kind.CONTROL) if case.kind is Kind.OUTPUT else case


def names(members: Sequence[Explanation]) -> tuple[str, ...]:
    """Ids of a class; what cannot be told from the honest engine is not seen at all."""
    ids = tuple(member.name for member in members)
    return (HONEST,) if HONEST in ids else ids


def typical(away: Distance) -> float:
    """The median distance of a token; infinite where there are none."""
    return median(torch.cat(away.tokens).tolist()) if away.tokens else inf


def one_of(names: Sequence[str]) -> str:
    """A class by its members; the likeliest first."""
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}" if names else ""


def told(flips: Sequence[Flip]) -> str:
    """What flipped, as a sentence; empty when nothing did."""
    places = [f"token {flip.token} of prompt {flip.prompt} in layer {flip.layer}" for flip in flips]
    if not places:
        return ""
    return f"The route to the last chosen expert goes to the next one for {', '.join(places)}."


def unknown(winner: Explanation, members: Sequence[Explanation], rival: Rival | None) -> Diagnosis:
    """Nothing is claimed: what came nearest, or what cannot be told apart."""
    if not isfinite(winner.distance.ratio):
        return Diagnosis("unknown", (), "No known fault does this.")
    nearest = Rival(names(members), winner.distance.ratio)
    if winner.distance.ratio > NEAR:
        sentence = "No known fault explains it."
    else:
        assert rival is not None
        sentence = f"{members[0].name} and {rival.faults[0]} explain it too much alike."
    return Diagnosis("unknown", (), sentence, (), winner.distance.ratio, nearest)
