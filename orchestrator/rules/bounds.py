"""Ranges of numbers, and which fields lie outside theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launch.contract.spec import RunSpec
from launch.support.rule import field_value


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, without ``high``, and without ``low`` where ``low_open``. NaN is outside."""

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


def outside(spec: RunSpec, section: str, limits: Mapping[str, Interval]) -> list[str]:
    """Return the fields of ``section`` that lie outside their interval."""
    fields = {f"{section}.{name}": interval for name, interval in limits.items()}
    return [field for field, interval in fields.items() if field_value(spec, field) not in interval]
