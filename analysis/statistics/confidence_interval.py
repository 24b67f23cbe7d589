"""The interval of a cell's speed-up, and how wide it has to be where words are said of many cells at once.

By itself a cell has the two-sided interval of Student's t on the logarithms of its pairs' ratios, at 95%. It misses the truth
once in twenty times, so that of twenty cells that are not faster one would be called so. Where there are several, two ways to
be sure share the 5%, and either will do, so that the narrower interval counts:

- whatever the noise: Bonferroni's, by the cell's own standard deviation, at ``ALONE``. With the one or two degrees of freedom
  that repeats leave it is very wide, unless the pairs of the cell hardly differ.
- by the noise of all: the cell's own at ``TOGETHER``, by its own deviation or that of the cells that share its eager runs (root
  mean square), whichever is more, since the noise of those runs is in all of them and counts once; but no narrower than
  Bonferroni's by the deviation of the least steady cell, with the degrees of freedom of all cells. This last would hold if all
  cells were equally steady. They need not be, which is why no cell counts as steadier than the least steady one.

docs/speed.md has how often that errs by simulation, and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.statistics.student_t import quantile

Interval = tuple[float, float] | None
ALPHA = 0.05
"""How often any word of a sweep may be wrongly FASTER or SLOWER."""
ALONE, TOGETHER = 0.01, 0.04
"""How it is shared between the two ways."""
MINIMUM_PAIRS = 2


@dataclass(frozen=True)
class Family:
    """The cells that a word is said of at once, as one of them sees it. Deviations are standard deviations of the logarithms
    of a cell's ratios.

    ``looks`` is how many words are said, ``degrees`` of freedom all cells have together; ``beside`` is the deviation of the
    cells that share this one's eager runs, ``widest`` that of the least steady cell.
    """

    looks: int
    degrees: int
    beside: float
    widest: float

    def half_width(self, deviation: float, pairs: int) -> float:
        """Of the interval of a cell of so many ``pairs``."""
        if self.looks == 1:
            return _quantile(ALPHA, pairs - 1) * deviation / math.sqrt(pairs)
        alone = _quantile(ALONE / self.looks, pairs - 1) * deviation
        own = _quantile(TOGETHER, pairs - 1) * max(deviation, self.beside)
        of_all = _quantile(ALPHA / self.looks, self.degrees) * self.widest
        return min(alone, max(own, of_all)) / math.sqrt(pairs)


def _quantile(alpha: float, degrees: int) -> float:
    """That is exceeded in either direction so often."""
    return quantile(1 - alpha / 2, degrees)


def families(cells: Sequence[tuple[str, Sequence[float]]], looks: int | None = None) -> tuple[Family, ...]:
    """For each of ``cells`` the family that all of them are. A cell is the name of what shares its eager runs, and the ratios
    of its pairs, of two at least. As many words are said as there are cells, or ``looks``."""
    sums: dict[str, tuple[float, int]] = {}
    for name, ratios in cells:
        squares, degrees = sums.get(name, (0.0, 0))
        sums[name] = squares + _variance(ratios) * (len(ratios) - 1), degrees + len(ratios) - 1
    widest = math.sqrt(max((_variance(ratios) for _, ratios in cells), default=0.0))
    in_all = sum(degrees for _, degrees in sums.values())
    beside = {name: math.sqrt(squares / degrees) for name, (squares, degrees) in sums.items()}
    return tuple(Family(looks or len(cells), in_all, beside[name], widest) for name, _ in cells)


def _variance(ratios: Sequence[float]) -> float:
    return float(np.log(ratios).var(ddof=1))


def interval_of(ratios: Sequence[float], family: Family | None = None) -> Interval:
    """The two-sided interval of the geometric mean of ``ratios``, positive numbers, for a cell by itself or of a ``family``;
    None of fewer than two."""
    if len(ratios) < MINIMUM_PAIRS:
        return None
    logs = np.log(ratios)
    deviation, centre = float(logs.std(ddof=1)), float(logs.mean())
    half = (family or Family(1, len(logs) - 1, deviation, deviation)).half_width(deviation, len(logs))
    return math.exp(centre - half), math.exp(centre + half)
