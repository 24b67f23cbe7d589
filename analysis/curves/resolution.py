"""Find the resolution of recorded numbers from their spacing. bf16 printed with six decimals is as coarse as bf16.

Numbers of a coarse format are multiples of one unit. After conversion they still are: losses in bits, or means of
micro-batches, are multiples of another unit. Logarithms of perplexities are multiples of a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from analysis.records.steps import Booleans, Floats

SHARE = 0.8
"""The share of the distinct numbers that must be multiples of a unit."""
CHANCE = 1e-4
"""The largest accepted probability that as many numbers are multiples of a unit by chance."""
_ROUNDING = 2.0**-22
"""The relative error of a few operations in float32. Units that are not much larger are full precision."""
_NUMBERS, _GAPS, _DIVISORS = 1000, 4, range(1, 9)
"""The search for a unit: the most numbers per power of two, the most of their smallest gaps, and the divisors of a gap."""


def resolution(values: Floats, units: Floats) -> Floats:
    """Return the unit of which each number is a multiple, shape (steps,).

    It is at least the unit of the last printed digit (``units``, but zeros may be omitted), and for numbers that are exact in
    float32 at least its spacing.
    """
    with np.errstate(all="ignore"):
        single, sizes = values.astype(np.float32), np.abs(values)
        exact = bool(np.all((np.abs(values - single) <= units / 2) | ~np.isfinite(single)))
        printed = _with_omitted_zeros(sizes, units)
        found = np.fmax(printed, np.spacing(np.abs(single))) if exact else printed
        of_logarithms = _spacing(np.abs(np.log(sizes)), units / sizes, fit=False) * sizes
        return np.fmax(np.fmax(found, _spacing(sizes, units, fit=True)), of_logarithms)


def rounded_units(values: Floats, resolution: Floats) -> Floats:
    """Return the unit of each rounded number, or 0 for a number with all bits of float32. Shape (steps,)."""
    sizes = np.abs(values)
    # Zero has no digits of its own. Other numbers show how many it would have.
    least = float(np.min(sizes, where=sizes > 0, initial=np.inf)) if (sizes > 0).any() else 0.0
    with np.errstate(all="ignore"):
        spacing = np.spacing(np.maximum(sizes, least).astype(np.float32))
    return np.where(resolution > np.nan_to_num(spacing), resolution, 0.0)


def _with_omitted_zeros(sizes: Floats, units: Floats) -> Floats:
    """Return ``units`` without those that come from omitted zeros: 2.100 is often stored as 2.1. Shape (steps,).

    In any format, numbers of one decimal magnitude have one unit, and smaller numbers have no larger one. Half of the numbers
    or more end with a digit that is not 0.
    """
    printed = (units > 0) & np.isfinite(sizes)
    if not printed.any():
        return units
    magnitudes = np.floor(np.log10(sizes))
    # Zero has the unit of the smallest numbers.
    magnitudes = np.maximum(magnitudes, np.min(magnitudes[printed & (sizes > 0)], initial=np.inf))
    found, least = units.copy(), np.inf
    for magnitude in np.unique(magnitudes[printed])[::-1]:
        same = printed & (magnitudes == magnitude)
        least = min(least, float(np.quantile(units[same], 0.5, method="lower")))
        found[same] = np.minimum(units[same], least)
    return found


def _spacing(sizes: Floats, units: Floats, *, fit: bool) -> Floats:
    """Return the common unit of ``sizes`` if it exceeds their printed ``units``, or 0 where none is certain. Shape (steps,).

    Consider the numbers within one power of two together, since floats have one unit there. Without ``fit``, try only powers of
    ten and two: a smooth curve of logarithms is a line, and its values are evenly spaced.
    """
    found = np.zeros(len(sizes))
    usable, exponents = np.isfinite(sizes) & (sizes > 0) & (units > 0), np.frexp(sizes)[1]
    for exponent in np.unique(exponents[usable]):
        group: Booleans = usable & (exponents == exponent)
        found[group] = _largest_unit(np.unique(sizes[group][:_NUMBERS]), float(units[group].min()), fit)
    return found


def _largest_unit(values: Floats, printed: float, fit: bool) -> float:
    """Return the largest unit of which ``values`` are multiples, except for rounding, or 0 if none is certain.

    ``values`` are positive and distinct, in ascending order, with shape (values,).
    """
    most = float(values.max())
    blur = printed + _ROUNDING * most
    if most < 10 * blur:
        return 0.0
    # A unit that is fitted to the numbers matches by chance more often than a given one.
    freedom = math.log(most / blur)
    tried = [(unit, 0.0) for unit in _powers(10 * blur, most)]
    tried += [(unit, freedom) for unit in _fitted(values, blur)] if fit else []
    for unit, free in sorted(tried, reverse=True):
        multiples = int(np.sum(np.abs(values - unit * np.rint(values / unit)) <= blur))
        sure = multiples * math.log(unit / (2 * blur)) > len(values) * math.log(2) + free - math.log(CHANCE)
        if sure and multiples >= SHARE * len(values):
            return unit
    return 0.0


def _powers(least: float, most: float) -> Iterator[float]:
    """Yield the powers of ten and of two from ``least`` to ``most``."""
    for base in (2, 10):
        for power in range(math.ceil(math.log(least, base)), math.floor(math.log(most, base)) + 1):
            yield float(base) ** power


def _fitted(values: Floats, blur: float) -> Iterator[float]:
    """Yield candidate units, from the smallest gaps between ``values``. Refine each with ever larger distances between
    values."""
    gaps = np.diff(values)
    lengths = np.concatenate((gaps, values - values[0], values))
    for gap in np.sort(gaps[gaps > 10 * blur])[:_GAPS]:
        for unit in (gap / divisor for divisor in _DIVISORS if gap > 10 * blur * divisor):
            reach = gap
            while reach < 4 * values[-1]:
                near = lengths[lengths <= reach * (1 + 1e-9)]
                counts = np.rint(near / unit)
                unit, reach = float(near @ counts / (counts @ counts)), 4 * reach
            yield unit
