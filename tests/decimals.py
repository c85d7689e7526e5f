"""Comparing with numbers worked by hand."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any


def right(expected: Any, actual: Any) -> bool:
    """Lists element by element, strings to half a unit in the last place, numbers exactly."""
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(right, expected, actual))
    if isinstance(expected, str):
        printed = Decimal(expected)
        half_unit = Decimal(5).scaleb(printed.as_tuple().exponent - 1)
        return math.isfinite(actual) and abs(Decimal(actual) - printed) <= half_unit
    return bool(expected == actual)
