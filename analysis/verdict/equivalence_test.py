"""Rung 3: two one-sided tests (TOST) that a mean difference lies within its margin, for autocorrelated noise.

The estimate d is the difference between the mean graphed and the mean eager curve, averaged over the steps. With standard
error s and margin M, both one-sided tests reject at level alpha if (M - |d|) / s exceeds Student's t quantile (Schuirmann
1987, doi:10.1007/BF01068419). The standard error is estimated in two ways, and the tests must reject with both:

- Between repeats: each run's mean is one observation. Welch's form gives the standard error of the difference of the group
  means. This is valid for any dependence between steps, but wide with few repeats.
- Along the steps: the differences are an autoregressive process of order one, AR(1). Its n steps are worth
  n (1 - r) / (1 + r) independent observations. This detects noise in a graphed run even if there is only one such run.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.standard_error import StandardError, Variance, welch
from analysis.verdict.curve_difference import Estimate, Sample

ALPHA = 0.05
"""The significance level: the largest probability with which a true difference at its margin may pass."""
_ROUNDING = 1e-12
"""Rounding error of the residuals of a line fit, relative to the largest difference."""


def estimate_of(sample: Sample, weights: Floats) -> Estimate:
    """Estimate the weighted sum of the difference over the steps, with its confidence interval.

    ``weights`` has shape (steps,). The sample needs two or more eager runs.
    """
    value, errors = _weighted_sum(sample, weights)
    return Estimate(value, max(error.exceeded_with(ALPHA) for error in errors))


def mean_within(sample: Sample, margin: float) -> tuple[Estimate, float]:
    """Return the mean difference, and the p-value of the test that it is within ``margin``.

    Use the larger half width and the larger p-value of the two standard errors. The sample needs two or more eager runs.
    """
    steps = sample.graphed.shape[1]
    value, errors = _weighted_sum(sample, np.full(steps, 1 / steps))
    mean = Estimate(value, max(error.exceeded_with(ALPHA) for error in errors))
    return mean, max(error.p(margin - abs(value)) for error in errors)


def _weighted_sum(sample: Sample, weights: Floats) -> tuple[float, tuple[StandardError, ...]]:
    """Return the weighted sum of the mean difference, and its standard error between repeats and along the steps."""
    difference = sample.graphed.mean(axis=0) - sample.eager.mean(axis=0)
    return float(difference @ weights), (_between_repeats(sample, weights), along_steps(difference, weights))


def _between_repeats(sample: Sample, weights: Floats) -> StandardError:
    """Return the standard error of the difference of two group means, by Welch's form.

    A single graphed run is taken to vary as the eager runs do.
    """
    eager, graphed = (_variance_of_runs(side @ weights) for side in (sample.eager, sample.graphed))
    of_eager, of_graphed = 1 / len(sample.eager), 1 / len(sample.graphed)
    assert eager is not None, "the sample has two or more eager runs"
    if graphed is None:
        return welch(eager * (of_eager + of_graphed))
    return welch(eager * of_eager, graphed * of_graphed)


def _variance_of_runs(values: Floats) -> Variance | None:
    """Return the variance of ``values``, shape (runs,), or None for a single run."""
    degrees, spread = len(values) - 1, math.hypot(*(values - values.mean()))
    return Variance(spread * spread / degrees, degrees) if degrees else None


def along_steps(difference: Floats, weights: Floats, *, white: bool = False) -> StandardError:
    """Return the standard error under an AR(1) model of ``difference``, shape (steps,); of ``white`` noise without correlation.

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
    r = 0.0 if white else min(max((steps * lag_one + 2) / (steps - 4), 0.0), 1 - 1 / steps)
    absorbed = sum(_variance_factor(part, r) for part in line) / steps
    variance = squares / steps / (1 - min(absorbed, 0.5))
    degrees = max(1.0, steps * (1 - r**2) / (1 + r**2) - 2)
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
