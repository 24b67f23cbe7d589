"""Rung 3: two one-sided tests (TOST) that a mean difference lies within its margin, for autocorrelated noise.

The estimate d is the difference between the mean graphed and the mean eager curve, averaged over the steps. With standard
error s and margin M, both one-sided tests reject at level alpha if (M - |d|) / s exceeds Student's t quantile (Schuirmann
1987, doi:10.1007/BF01068419). The standard error is estimated in two ways, and the tests must reject with both:

- Between repeats: each run's mean is one observation. The pooled variance of the two groups gives the standard error of the
  difference of their means. This is valid for any dependence between steps, but wide with few repeats.
- Along the steps: the differences are an autoregressive process of order one, AR(1). Its n steps are worth
  n (1 - r) / (1 + r) independent observations. This detects noise in a graphed run even if there is only one such run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.student_t import quantile, upper_tail
from analysis.verdict.curve_difference import Estimate, Sample

ALPHA = 0.05
"""The significance level: the largest probability with which a true difference at its margin may pass."""
_ROUNDING = 1e-12
"""Rounding error of the residuals of a line fit, relative to the largest difference."""


@dataclass(frozen=True)
class StandardError:
    """The standard error of a weighted sum, and the degrees of freedom of its estimate (1 or more)."""

    size: float
    degrees: float

    @property
    def half_width(self) -> float:
        """Return the half width of the two-sided confidence interval at level 1 - 2 ``ALPHA``."""
        return quantile(1 - ALPHA, self.degrees) * self.size

    def p(self, distance: float) -> float:
        """Return the one-sided p-value of an estimate at ``distance`` inside the margin.

        The null hypothesis is that the true value is at the margin. Return 1 at or outside the margin, and where a number is
        not finite.
        """
        if not (math.isfinite(distance) and math.isfinite(self.size)) or distance <= 0:
            return 1.0
        return upper_tail(distance / self.size, self.degrees) if self.size > 0 else 0.0


def estimate_of(sample: Sample, weights: Floats) -> Estimate:
    """Estimate the weighted sum of the difference over the steps, with its confidence interval.

    ``weights`` has shape (steps,). The sample needs two or more eager runs.
    """
    value, errors = _weighted_sum(sample, weights)
    return Estimate(value, max(error.half_width for error in errors))


def mean_within(sample: Sample, margin: float) -> tuple[Estimate, float]:
    """Return the mean difference, and the p-value of the test that it is within ``margin``.

    Use the larger half width and the larger p-value of the two standard errors. The sample needs two or more eager runs.
    """
    steps = sample.graphed.shape[1]
    value, errors = _weighted_sum(sample, np.full(steps, 1 / steps))
    mean = Estimate(value, max(error.half_width for error in errors))
    return mean, max(error.p(margin - abs(value)) for error in errors)


def _weighted_sum(sample: Sample, weights: Floats) -> tuple[float, tuple[StandardError, ...]]:
    """Return the weighted sum of the mean difference, and its standard error between repeats and along the steps."""
    difference = sample.graphed.mean(axis=0) - sample.eager.mean(axis=0)
    return float(difference @ weights), (_between_repeats(sample, weights), _along_steps(difference, weights))


def _between_repeats(sample: Sample, weights: Floats) -> StandardError:
    """Return the standard error of the difference of two group means, from their pooled variance."""
    groups = [side @ weights for side in (sample.eager, sample.graphed)]
    degrees = sum(len(group) - 1 for group in groups)
    spread = math.hypot(*np.concatenate([group - group.mean() for group in groups]))
    return StandardError(spread * math.sqrt(sum(1 / len(group) for group in groups) / degrees), degrees)


def _along_steps(difference: Floats, weights: Floats) -> StandardError:
    """Return the standard error under an AR(1) model of ``difference``, shape (steps,).

    The autocorrelation and variance are those of the residuals of a line fit, so that a drift does not count as noise. Both
    are corrected for the bias of the line fit. The lag-one autocorrelation r of n steps is biased low by about
    (2 + 4 r) / n (by (1 + 3 r) / n if only a mean is removed: Kendall 1954, doi:10.1093/biomet/41.3-4.403). The variance is
    biased low by the share that the line absorbs. The degrees of freedom are n (1 - r^2) / (1 + r^2) - 2.
    """
    steps = len(difference)
    largest = float(np.abs(difference).max())
    if not largest:
        return StandardError(0.0, steps - 2)
    # Scale first: the square of a large difference can overflow.
    line, relative = _line(steps), difference / largest
    residuals = relative - line.T @ (line @ relative)
    squares = float(residuals @ residuals)
    if squares <= _ROUNDING**2 * steps:
        return StandardError(0.0, steps - 2)
    lag_one = float(residuals[1:] @ residuals[:-1]) / squares
    r = min(max((steps * lag_one + 2) / (steps - 4), 0.0), 1 - 1 / steps)
    absorbed = sum(_variance_factor(part, r) for part in line) / steps
    variance = squares / steps / (1 - min(absorbed, 0.5))
    degrees = max(1.0, math.floor(10 * (steps * (1 - r**2) / (1 + r**2) - 2)) / 10)
    return StandardError(largest * math.sqrt(variance * _variance_factor(weights, r)), degrees)


@lru_cache(maxsize=16)
def _line(steps: int) -> Floats:
    """Return an orthonormal basis of all lines over the steps, shape (2, steps)."""
    place = np.arange(steps) - (steps - 1) / 2
    return np.stack([np.full(steps, steps**-0.5), place / np.sqrt(place @ place)])


def _variance_factor(weights: Floats, r: float) -> float:
    """Return the variance of a weighted sum, relative to that of one step, if steps k apart have correlation r^k."""
    products = _lagged_products(weights.tobytes())
    return float(products[0] + 2 * (products[1:] @ r ** np.arange(1, len(products))))


@lru_cache(maxsize=16)
def _lagged_products(weights: bytes) -> Floats:
    """Return the sum over t of w(t) w(t + k) for each lag k from 0, shape (steps,). ``weights`` are the bytes of float64."""
    values = np.frombuffer(weights)
    spectrum = np.fft.rfft(values, 2 * len(values))
    products: Floats = np.fft.irfft(spectrum * spectrum.conj())[: len(values)]
    return products


def holm(p_values: Sequence[float]) -> tuple[bool, ...]:
    """Return which of several tests reject with Holm's correction (Holm 1979, jstor.org/stable/4615733).

    The family-wise error rate stays at alpha. The smallest of m p-values must be at most alpha / m, the next at most
    alpha / (m - 1), and so on.
    """
    holds = [False] * len(p_values)
    ascending = sorted(range(len(p_values)), key=lambda place: p_values[place] if p_values[place] <= 1 else math.inf)
    for rank, place in enumerate(ascending):
        if not p_values[place] <= ALPHA / (len(p_values) - rank):
            break
        holds[place] = True
    return tuple(holds)
