"""The trend of a pair's speed-up within its steady window.

A run may start in a state that it leaves only slowly, for example with cold caches or boosted clocks. If one side of every pair
does so, every ratio is off alike, and no interval over pairs shows it. The steps themselves do: the ratio changes along the
window. What it changes to follows from the window's second half, because most transients slow down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.student_t import quantile

BLOCKS = 10
"""Parts of a window. Their means average out what neighbouring steps share."""
HORIZON = 3
"""How many windows ahead a verdict must hold."""
ALPHA = 0.05
PLACES = (np.arange(BLOCKS) + 0.5) / BLOCKS
"""The centres of the blocks, in windows."""


@dataclass(frozen=True)
class Trend:
    """The trend of the logarithm of eager over graphed step times.

    ``change`` is its change along the window by a straight line, with the standard error ``error``. ``ahead`` is the difference
    between its value ``HORIZON`` windows later, by a straight line through the second half, and its mean.
    """

    change: float = 0.0
    error: float = 0.0
    ahead: float = 0.0

    def minus(self, other: Trend) -> Trend:
        """Return the trend of the ratio of two ratios."""
        return Trend(self.change - other.change, math.hypot(self.error, other.error), self.ahead - other.ahead)


NO_TREND = Trend()


def trend_of(eager_ms: Floats, graphed_ms: Floats) -> Trend:
    """Return the trend over the steps of a window, both of shape (steps,). A window of fewer than ``BLOCKS`` steps has none."""
    if len(eager_ms) < BLOCKS:
        return NO_TREND
    means = np.array([block.mean() for block in np.array_split(np.log(eager_ms / graphed_ms), BLOCKS)])
    half = BLOCKS // 2
    line, late = _line(PLACES, means), _line(PLACES[half:], means[half:])
    residuals = means - line.at(PLACES)
    error = math.sqrt(float(residuals @ residuals) / (BLOCKS - 2) / line.spread)
    return Trend(line.slope, error, float(late.at(np.array(1 + HORIZON)) - means.mean()))


@dataclass(frozen=True)
class _Line:
    """A least-squares line through points around the centre (``x``, ``y``), whose squared distances in x add up to ``spread``."""

    x: float
    y: float
    slope: float
    spread: float

    def at(self, x: Floats) -> Floats:
        return self.y + self.slope * (x - self.x)


def _line(x: Floats, y: Floats) -> _Line:
    from_centre = x - x.mean()
    spread = float(from_centre @ from_centre)
    return _Line(float(x.mean()), float(y.mean()), float(from_centre @ y) / spread, spread)


def extrapolate(trends: Sequence[Trend]) -> float:
    """Return the factor by which the mean ratio of a cell's pairs changes until ``HORIZON`` windows later, or 1 if noise explains
    the trend (Student's t at ``ALPHA``).
    """
    change = sum(trend.change for trend in trends) / len(trends)
    error = math.hypot(*(trend.error for trend in trends)) / len(trends)
    if abs(change) <= quantile(1 - ALPHA / 2, (BLOCKS - 2) * len(trends)) * error:
        return 1.0
    return math.exp(sum(trend.ahead for trend in trends) / len(trends))
