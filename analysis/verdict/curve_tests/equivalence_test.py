"""Rung 3: two one-sided tests (TOST), valid for autocorrelated noise, that a mean difference is within its margin.

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

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.along_steps import along_steps
from analysis.statistics.standard_error import StandardError, Variance, welch
from analysis.verdict.curve_difference import Estimate, Sample

ALPHA = 0.05
"""The significance level: the largest probability that a true difference at the margin passes."""


def estimate_of(sample: Sample, weights: Floats) -> Estimate:
    """Estimate the weighted sum of the difference over the steps, with its confidence interval.

    ``weights`` has shape (steps,). The sample needs two or more eager runs.
    """
    value, errors = _weighted_sum(sample, weights)
    return Estimate(value, max(error.exceeded_with(ALPHA) for error in errors))


def mean_within(sample: Sample, margin: float, looks: int = 1) -> tuple[Estimate, float]:
    """Return the mean difference, and the p-value of the test that it is within ``margin``, at one of ``looks`` looks.

    Of the two standard errors, use the larger half width and the larger p-value. The sample needs two or more eager runs.
    """
    steps = sample.graphed.shape[1]
    value, errors = _weighted_sum(sample, np.full(steps, 1 / steps))
    mean = Estimate(value, max(error.exceeded_with(ALPHA / looks) for error in errors))
    return mean, min(1.0, looks * max(error.p(margin - abs(value)) for error in errors))


def _weighted_sum(sample: Sample, weights: Floats) -> tuple[float, tuple[StandardError, ...]]:
    """Return the weighted sum of the mean difference, and its standard error between repeats and along the steps."""
    difference = sample.graphed.mean(axis=0) - sample.eager.mean(axis=0)
    return float(difference @ weights), (_between_repeats(sample, weights), along_steps(difference, weights))


def _between_repeats(sample: Sample, weights: Floats) -> StandardError:
    """Return the standard error of the difference of two group means, by Welch's form.

    A single graphed run is assumed to vary as much as the eager runs.
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
