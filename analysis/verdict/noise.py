"""The noise of eager runs: the floor, which is how far runs of one workload differ, and the scale of a single step's noise.

The scale is that of the difference between two runs that compute the same with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.steps import Floats, Steps
from analysis.statistics.along_steps import variance_factor
from analysis.statistics.standard_error import StandardError, Variance, welch
from analysis.verdict.curve_difference import Sample, sample_of
from launch.contract.records.step_metrics import METRICS, Metric

LARGEST = 4.5
"""The largest of about a hundred normally distributed differences from their median, in units of the median difference."""
LARGEST_CORRELATED = 11.0
"""The same, in units of the median difference between neighbouring steps, at an autocorrelation of 0.98."""
LOUD = 3.5
"""A part of a window is loud if chance explains its variance as rarely as a normal deviate of this size: in one of 4,000 parts."""


@dataclass(frozen=True)
class NoiseFloor:
    """The noise floor: the largest difference, over all compared steps, between one eager repeat and the mean of the others.

    A perturbed run counts by its difference from the mean of the repeats. ``loss`` is absolute (nats), ``grad_norm`` is
    relative to the mean of all repeats.
    """

    repeats: int
    loss: float
    grad_norm: float
    perturbed: bool = False
    """Whether there is a perturbed run."""

    @property
    def source(self) -> str:
        """The runs whose differences the noise floor measures, in words."""
        if self.perturbed:
            return "eager repeats and the perturbed run" if self.repeats > 1 else "the eager and the perturbed run"
        return "eager repeats"

    def of(self, metric: Metric) -> float:
        return self.loss if metric == "loss" else self.grad_norm


def noise_floor(repeats: Sequence[Steps], window: slice, perturbed: Steps | None = None) -> NoiseFloor | None:
    """Return the noise floor of complete eager ``repeats`` of one workload in ``window``, and of its ``perturbed`` run.

    Return None for a single run.
    """
    return noise_floor_of([sample_of(metric, repeats, repeats, window, perturbed) for metric in METRICS])


def noise_floor_of(samples: Sequence[Sample]) -> NoiseFloor | None:
    """Return the noise floor of ``samples``, which are in the order of ``METRICS``; None for a single run."""
    if not len(samples[0].eager_distances):
        return None
    loss, grad_norm = (float(np.abs(sample.eager_distances).max()) for sample in samples)
    return NoiseFloor(len(samples[0].eager), loss, grad_norm, perturbed=len(samples[0].perturbed) > 0)


@dataclass(frozen=True)
class NoiseScale:
    """The variance of one step of one run, for each side, in the squared unit of the differences.

    ``source`` names the runs that it was measured on. ``graphed`` None means the same variance as eager.
    """

    eager: Variance
    graphed: Variance | None
    source: str

    def within(self, part: NoiseScale) -> NoiseScale:
        """Return the noise in a part of the window: that of ``part`` on a side that is loud there, else that of the window."""
        own = _loud(part.graphed, self.graphed or self.eager) if part.graphed else None
        return NoiseScale(_loud(part.eager, self.eager) or self.eager, own or self.graphed, self.source)

    def of_group(self, group: int, graphed_runs: int, eager_runs: int) -> StandardError:
        """Return the standard error of the mean of a ``group`` of the graphed runs, minus the mean of all other runs."""
        others = graphed_runs + eager_runs - group
        eager, graphed = eager_runs / others**2, 1 / group + (graphed_runs - group) / others**2
        if self.graphed is None:
            return welch(self.eager * (eager + graphed))
        return welch(self.eager * eager, self.graphed * graphed)


def _loud(part: Variance, whole: Variance) -> Variance | None:
    """Return the variance of a ``part`` of a window if it is loud, else None.

    The quantile of the chi-squared distribution is that of Wilson and Hilferty 1931 (doi:10.1073/pnas.17.12.684).
    """
    spread = 2 / (9 * part.degrees)
    return part if part.size > whole.size * (1 - spread + LOUD * math.sqrt(spread)) ** 3 else None


def noise_scale(sample: Sample) -> NoiseScale:
    """Measure the noise of a step between repeats. The sample needs two or more eager runs.

    A perturbed run counts if it is farther from the eager runs than they are from each other.
    """
    eager, runs, source = _variance(sample.eager, len(sample.eager) - 1), len(sample.eager), "eager repeats"
    if len(sample.perturbed):
        # The perturbed run's distance is from the mean of the eager runs, which has noise as well.
        moved = _variance(sample.perturbed, 1) * (runs / (runs + 1))
        eager, source = (moved, "the perturbed run") if moved.size > eager.size else (eager, source)
    return NoiseScale(eager, _graphed_variance(sample, eager), source)


def noise_along_steps(sample: Sample) -> float:
    """Return a noise floor from graphed runs alone: the variation of differences along the steps, in the noisiest run.

    It is the smaller of two measures: about the run's median, and between neighbouring steps. So an offset or a jump does not
    count as noise.
    """
    graphed = np.where(np.isfinite(sample.graphed), sample.graphed, 0.0)
    about_median = np.median(np.abs(graphed - np.median(graphed, axis=1, keepdims=True)), axis=1)
    of_neighbours = np.median(np.abs(np.diff(graphed, axis=1)), axis=1)
    return float(np.minimum(LARGEST * about_median, LARGEST_CORRELATED * of_neighbours).max())


def _graphed_variance(sample: Sample, eager: Variance) -> Variance | None:
    """Return the variance of one step of a graphed run, or None for a single run that shows no more noise than ``eager``.

    A single run cannot show noise between repeats, but may show noise along its steps.
    """
    if len(sample.graphed) > 1:
        return _variance(sample.graphed - sample.graphed.mean(axis=0), len(sample.graphed) - 1)
    place = np.arange(sample.graphed.shape[1])
    line = np.polynomial.Polynomial.fit(place, sample.graphed[0], 1)
    along = _variance(sample.graphed - line(place), runs=1)
    own = Variance(max(along.size - eager.size / len(sample.eager), 0.0), along.degrees)
    return own if own.size > eager.size else None


def _variance(residuals: Floats, runs: int) -> Variance:
    """Return the variance of one step from ``residuals``, shape (any, steps), which count as ``runs`` independent runs.

    With lag-one autocorrelation r, the squares of steps k apart have correlation r^(2 k).
    """
    steps = residuals.shape[1]
    largest = float(np.abs(residuals).max())
    if not largest:
        return Variance(0.0, runs * steps)
    # Scale first: the square of a large difference can overflow.
    relative = residuals / largest
    squares = float(np.square(relative).sum())
    r = max(float((relative[:, 1:] * relative[:, :-1]).sum()) / squares, 0.0)
    degrees = runs / variance_factor(np.full(steps, 1 / steps), r**2)
    return Variance(largest * largest * squares / (runs * steps), degrees)
