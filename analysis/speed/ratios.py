"""The ratios of step times, eager over graphed, of a cell's pairs, and how drift and the order of runs change them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analysis.speed.pair_speed import PairSpeed

MOST_DRIFT = 1.0
"""The largest change of a step time's logarithm that drift may cause within a pair. A larger one extrapolates the line too
far."""


def ratios_of(pairs: Sequence[PairSpeed]) -> list[float]:
    """Return the ratios of the pairs that have one."""
    return [pair.eager_ms / pair.graphed_ms for pair in pairs if pair.ratio is not None]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers, or 0 for zeros. The mean of equal numbers equals them bit for bit."""
    first = values[0]
    if first == 0:
        return 0.0
    return float(first * np.exp(np.mean(np.log(np.divide(values, first)))))


def drift_corrected(pairs: Sequence[PairSpeed]) -> list[float]:
    """Return the ratios with each eager time moved to the time of its graphed run.

    A straight line is fitted to the logarithms of eager step times over the times at which the runs began.
    """
    began, steps = np.array([pair.eager_began for pair in pairs]), np.log([pair.eager_ms for pair in pairs])
    since = began - began.mean()
    slope = float(since @ steps) / float(since @ since) if since.any() else 0.0
    later = [slope * (pair.graphed_began - pair.eager_began) for pair in pairs]
    factors = [math.exp(min(max(rise, -MOST_DRIFT), MOST_DRIFT)) for rise in later]
    return [pair.eager_ms / pair.graphed_ms * factor for pair, factor in zip(pairs, factors, strict=True)]


def order_balance(pairs: Sequence[PairSpeed]) -> float:
    """Return the factor by which the mean ratio changes if both orders of pairs have equal weight. Both must occur."""
    logs, eager_first = np.log(ratios_of(pairs)), np.array([pair.eager_began < pair.graphed_began for pair in pairs])
    return math.exp((logs[eager_first].mean() + logs[~eager_first].mean()) / 2 - logs.mean())
