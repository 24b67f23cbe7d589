"""Ranges of numbers, and which fields of a section lie outside theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """From ``low`` up to, never reaching, ``high``; without ``low`` itself where ``low_open``. NaN is outside."""

    low: float
    high: float = math.inf
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.high and not (self.low_open and value == self.low)

    def __str__(self) -> str:
        start = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return start if self.high == math.inf else f"{start} and below {self.high:g}"


POSITIVE = Interval(1)
COUNT = Interval(0)
ABOVE_ZERO = Interval(0, low_open=True)


def outside(section: str, values: object, limits: Mapping[str, Interval]) -> str | None:
    """Every field of ``values`` outside its interval, as one message; None where all lie inside."""
    wrong = [
        f"{section}.{name}={value} (must be {interval} and finite)"
        for name, interval in limits.items()
        if (value := getattr(values, name)) not in interval
    ]
    return ", ".join(wrong) or None
