"""Errors against their budgets, drawn and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any

from mone_ref.suite.compare import MULTIPLIER

SCALE = (-1, 5)
"""Powers of ten at both ends of an error bar. Honest engines stand near 1, wrong ones at
10 to 100 000."""


@dataclass(frozen=True)
class Bar:
    """An error against its budget; ``place`` in percent of a logarithmic scale,
    ``beside`` what else the numbers say."""

    ratio: str
    place: float
    within: bool
    beside: tuple[str, ...]


def bar(numbers: Mapping[str, Any]) -> Bar:
    """The worse of both ratios, drawn; what the sentence about it leaves out, in words."""
    ratios = {kind: size(numbers[f"{kind}_ratio"]) for kind in ("token", "max")}
    ratio = max(ratios.values())
    other = min(ratios, key=lambda kind: ratios[kind])
    return Bar(number(ratio), place(ratio), ratio <= MULTIPLIER, tuple(beside(numbers, other)))


def worst(of_results: Iterable[Mapping[str, Any] | None]) -> Bar | None:
    """The longest bar; None without numbers."""
    bars = [bar(numbers) for numbers in of_results if numbers]
    return max(bars, key=lambda bar: bar.place, default=None)


def beside(numbers: Mapping[str, Any], kind: str) -> Iterator[str]:
    """One error against its limit, and what hints at a cause."""
    name = "largest error" if kind == "max" else f"worst token {number(numbers['token'])}: error"
    error, budget = number(numbers[f"{kind}_error"]), number(numbers[f"{kind}_budget"])
    yield f"{name} {error} against {MULTIPLIER:g} x {budget}"
    yield f"norm {number(numbers['norm_ratio'])} x the golden's"
    agreeing = size(numbers["argmax"])
    if agreeing < inf:
        yield f"the likeliest id agrees for {agreeing:.0%} of tokens"


def size(value: float | None) -> float:
    """A ratio from a report, where what JSON cannot say is null."""
    try:
        return inf if value is None or not isfinite(value) else float(value)
    except OverflowError:
        return inf


def number(value: float | None) -> str:
    """Three digits, or that there is no number."""
    return f"{size(value):.3g}" if size(value) < inf else "not finite"


def place(ratio: float) -> float:
    """Percent of the way along the scale."""
    low, high = SCALE
    power = log10(ratio) if 0 < ratio < inf else (high if ratio > 0 else low)
    return round(100 * min(max((power - low) / (high - low), 0.02), 1), 1)


def scale() -> dict[str, Any]:
    """What the bars show, for the legend and the line that marks the limit."""
    low, high = SCALE
    return {"limit": f"{MULTIPLIER:g}", "at": place(MULTIPLIER), "ends": (10**low, 10**high)}
