"""The resolution of recorded numbers, from their spacing: bf16 printed with six decimals is as coarse as bf16."""

from __future__ import annotations

import math

import numpy as np

from analysis.records.steps import Booleans, Floats

SHARE = 0.8
"""The share of different numbers that must be multiples of a unit."""
CHANCE = 1e-4
"""Numbers share a unit if so many of them would be its multiples by chance less often than this."""
_EPSILON = float(np.finfo(np.float64).eps)


def resolution(values: Floats, units: Floats) -> Floats:
    """Return the unit of which each number is a multiple, shape (steps,): at least ``units``, that of its last printed digit.

    Numbers of one power of two are looked at together, since floats have one unit there.
    """
    found = units.copy()
    usable, exponents = np.isfinite(values) & (values != 0) & (units > 0), np.frexp(values)[1]
    for exponent in np.unique(exponents[usable]):
        group: Booleans = usable & (exponents == exponent)
        unit = _largest_unit(np.unique(np.abs(values[group])), float(units[group].min()))
        found[group] = np.maximum(found[group], unit)
    return found


def _largest_unit(values: Floats, printed: float) -> float:
    """Return the largest power of ten or two of which ``values`` are multiples, but for the digits that were rounded off.

    ``values`` are positive and differ, shape (values,). Return ``printed`` if no larger unit is sure.
    """
    blur = printed + 4 * _EPSILON * float(values.max())
    for unit in _powers(10 * blur, float(values.max())):
        with np.errstate(over="ignore"):
            rest = np.abs(values - unit * np.rint(values / unit))
        multiples = int(np.sum(rest <= blur / 2 * (1 + 1e-6)))
        sure = multiples * math.log(unit / blur) > len(values) * math.log(2) - math.log(CHANCE)
        if sure and multiples >= SHARE * len(values):
            return unit
    return printed


def _powers(least: float, most: float) -> list[float]:
    """Return the powers of ten and of two from ``most`` down to ``least``."""
    if not least <= most:
        return []
    spans = ((base, range(math.ceil(math.log(least, base)), math.floor(math.log(most, base)) + 1)) for base in (2, 10))
    return sorted((float(base) ** power for base, powers in spans for power in powers), reverse=True)
