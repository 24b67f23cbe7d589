"""The confidence interval of a cell's speed-up, for a cell alone and for a cell of a sweep.

A cell alone has the two-sided 95% interval of Student's t on the logarithms of its pairs' ratios. This interval misses the true
ratio once in twenty times, so in a large sweep some cells would get a wrong verdict by chance. With several cells, two
intervals share the 5%. Either suffices, so the narrower one counts:

- Bonferroni's at ``ALONE``, from the larger of two deviations: the cell's own, and the median over all cells. With the one or two
  degrees of freedom of a few repeats it is very wide, unless the pairs hardly differ. They may do so by chance, for example if
  runs are either fast or slow, so the median is its lower limit.
- The interval at ``TOGETHER``, from the larger of two deviations: the cell's own, and the root mean square over the cells that
  share its eager runs, whose noise is in all of them. Its lower limit is Bonferroni's interval from the deviation of the least
  steady cell, with the degrees of freedom of all cells, because cells need not be equally steady.

Runs may be either fast or slow as a whole, for example because of where a process was placed. Student's t does not allow for
this: a few pairs may agree by chance, and then hardly differ. For a true ratio of 1, a pair is an eager run that is slow beside a
graphed one that is fast with a probability of at most 1/4, or the other way round. So where :func:`agreement` of too few pairs is
likely, the interval allows for a difference of ``WIDEST_GAP``. The cells of a family show by how much their runs differ, so there
it allows for this.

A bundle with ``repeats: auto`` stops once its verdicts are settled (analysis.sweep.early_stop). No cell's interval then depends on
another's, and the error is split evenly over cells and looks: see :class:`EvenSplit`.

docs/speed.md has the error rates by simulation, and the cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from analysis.statistics.student_t import quantile

Interval = tuple[float, float] | None
ALPHA = 0.05
"""The probability that any speed verdict of a sweep is wrongly FASTER or SLOWER."""
ALONE, TOGETHER = 0.01, 0.04
"""The shares of ALPHA of the two intervals."""
MINIMUM_PAIRS = 2
WIDEST_GAP = 0.2
"""The largest difference of two speeds that a verdict from few pairs allows for, in logarithms."""
UNSEEN = 0.02
"""If the pairs of a cell agree by chance with a larger probability, the interval also depends on how all cells' pairs differ."""
SEEN_DEGREES = 4
"""The degrees of freedom from which cells show whether runs have two speeds."""
BEYOND = 1.1
"""The factor by which a ratio must exceed a difference of speeds, because both have noise."""
MOST_PAIRS = 50
"""The most pairs to advise. If noise needs more, it is better to remove the noise."""
WIDEST = 35.0
"""The largest half width. No logarithm of a ratio of step times is as large (analysis/speed/steady_window.py)."""


def agreement(cells: int, pairs: int) -> float:
    """Return the largest probability that all ``pairs`` of one of ``cells`` agree on a difference, if runs have two speeds."""
    return 2.0 * cells / 4.0**pairs


@dataclass(frozen=True)
class EvenSplit:
    """ALPHA, split evenly over ``cells`` and over the ``looks`` at each (Bonferroni). It holds whenever a bundle stops."""

    cells: int = 1
    looks: int = 1

    @property
    def alone(self) -> EvenSplit:
        """The interval of the cell without the others."""
        return EvenSplit(1, self.looks)

    def half_width(self, deviation: float, pairs: int) -> float:
        """Return half the width of the interval of a cell with ``pairs`` pairs."""
        half = _quantile(ALPHA / self.cells / self.looks, pairs - 1) * deviation / math.sqrt(pairs)
        return max(half, self.gap(pairs))

    def gap(self, pairs: int) -> float:
        """Return the least half width of the interval over ``pairs`` pairs, which runs of two speeds require."""
        return BEYOND * WIDEST_GAP if agreement(self.cells, pairs) > ALPHA else 0.0


ALONE_ONCE = EvenSplit()
"""The 95% interval of a cell by itself, looked at once."""


@dataclass(frozen=True)
class Family:
    """What the interval of one cell needs to know about all cells of its sweep with a speed verdict.

    Deviations are of the logarithms of ratios.

    ``cells`` is the number of verdicts, and ``sharing`` that of verdicts which share this cell's eager runs. ``degrees`` are the
    degrees of freedom of all cells. ``workload`` is the deviation of the cells that share this cell's eager runs. ``typical`` is
    the median over all cells. ``widest`` is the deviation of the least steady cell.
    """

    cells: int
    degrees: int
    sharing: int
    workload: float
    typical: float
    widest: float

    @property
    def alone(self) -> Family:
        """The 95% interval of the cell without the others. They may only show that runs have one speed."""
        return replace(self, cells=1, sharing=1)

    def half_width(self, deviation: float, pairs: int) -> float:
        """Return half the width of the interval of a cell with ``pairs`` pairs."""
        return max(self._by_noise(deviation, pairs), self.gap(pairs))

    def gap(self, pairs: int) -> float:
        """Return the least half width of the interval over ``pairs`` pairs, which runs of two speeds require."""
        if agreement(self.sharing, pairs) <= (ALPHA if self.cells == 1 else UNSEEN):
            return 0.0
        # If one of several pairs has another speed than the rest, the square root times the deviation is the gap.
        seen = math.sqrt(pairs) * self.widest if self.degrees >= SEEN_DEGREES else WIDEST_GAP
        return BEYOND * min(seen, WIDEST_GAP)

    def _by_noise(self, deviation: float, pairs: int) -> float:
        if self.cells == 1:
            return _quantile(ALPHA, pairs - 1) * deviation / math.sqrt(pairs)
        alone = _quantile(ALONE / self.cells, pairs - 1) * max(deviation, self.typical)
        own = _quantile(TOGETHER, pairs - 1) * max(deviation, self.workload)
        of_all = _quantile(ALPHA / self.cells, self.degrees) * self.widest
        return min(alone, max(own, of_all)) / math.sqrt(pairs)


def _quantile(alpha: float, degrees: int) -> float:
    """Return the two-sided quantile: |t| exceeds it with probability ``alpha``."""
    return quantile(1 - alpha / 2, degrees)


Correction = Family | EvenSplit
"""How the interval of a cell is widened because several cells are judged, or one is judged several times."""


def families(cells: Sequence[tuple[str, Sequence[float]]], verdicts: int | None = None) -> tuple[Correction, ...]:
    """Return the family for each cell. A single cell is by itself.

    A cell is given by the name of its workload and the ratios of at least two pairs. ``verdicts`` defaults to the number of
    cells.
    """
    if len(cells) == 1:
        return (ALONE_ONCE,)
    sums: dict[str, tuple[float, int]] = {}
    variances: list[float] = []
    for name, ratios in cells:
        squares, degrees = sums.get(name, (0.0, 0))
        variances.append(_centre_and_variance(ratios)[1])
        sums[name] = squares + variances[-1] * (len(ratios) - 1), degrees + len(ratios) - 1
    typical, widest = (math.sqrt(one) for one in (median_low(variances or [0.0]), max(variances, default=0.0)))
    in_all = sum(degrees for _, degrees in sums.values())
    shared = {name: math.sqrt(squares / degrees) for name, (squares, degrees) in sums.items()}
    sharing = Counter(name for name, _ in cells)
    count = verdicts or len(cells)
    return tuple(
        Family(count, in_all, sharing[name] * count // len(cells), shared[name], typical, widest) for name, _ in cells
    )


def _centre_and_variance(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the variance of the logarithms. For a handful of numbers, NumPy takes five times as long."""
    logs = list(map(math.log, ratios))
    centre = math.fsum(logs) / len(logs)
    return centre, math.fsum([(one - centre) ** 2 for one in logs]) / (len(logs) - 1)


def interval_of(ratios: Sequence[float], family: Correction = ALONE_ONCE) -> Interval:
    """Return the two-sided interval of the geometric mean of positive ``ratios``, or None for fewer than two."""
    if len(ratios) < MINIMUM_PAIRS:
        return None
    centre, variance = _centre_and_variance(ratios)
    half = min(family.half_width(math.sqrt(variance), len(ratios)), WIDEST)
    return math.exp(centre - half), math.exp(centre + half)


def may_agree_by_chance(ratios: Sequence[float], family: Correction) -> bool:
    """Return whether only two speeds of runs make the interval of at least two ``ratios`` as wide as it is."""
    deviation, gap = math.sqrt(_centre_and_variance(ratios)[1]), family.gap(len(ratios))
    return gap > 0 and family.half_width(deviation, len(ratios)) == gap


def pairs_to_narrow(ratios: Sequence[float], half_width: float, family: Correction) -> int | None:
    """Return how many pairs of the present spread have an interval of at most ``half_width``, in logarithms, on either side.

    Return None above ``MOST_PAIRS``. There are at least two ``ratios``; the other cells of the ``family`` get as many pairs.
    """
    present, deviation = len(ratios), math.sqrt(_centre_and_variance(ratios)[1])
    for pairs in range(present + 1, MOST_PAIRS + 1):
        if isinstance(family, Family):
            grown: Correction = replace(family, degrees=family.degrees * (pairs - 1) // (present - 1))
        else:
            grown = family
        if grown.half_width(deviation, pairs) <= half_width:
            return pairs
    return None
