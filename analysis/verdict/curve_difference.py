"""Measure the differences between graphed and eager curves, and among eager curves. This module decides nothing.

A difference is infinite where either side is not finite, so it fails every comparison with a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.records.steps import Booleans, Floats, Steps
from launch.contract.records.step_metrics import Metric

HUGE = 1e150
"""Sums and squares of differences below this size do not overflow."""
METRIC_NAMES: dict[Metric, str] = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Estimate:
    """A point estimate and the half width of its confidence interval (analysis.verdict.curve_tests.equivalence_test)."""

    value: float
    half_width: float


@dataclass(frozen=True)
class Deviation:
    """The first step at which a graphed run deviates from the eager baseline, and by how much."""

    step: int
    metric: Metric
    size: float


@dataclass(frozen=True)
class Sample:
    """The differences of one metric after the capture: each run minus the mean of the eager runs at the same step.

    ``eager`` has shape (eager runs, steps), ``graphed`` has shape (graphed runs, steps), ``perturbed`` has shape (0 or 1,
    steps). Losses are in nats. Gradient norms are relative to the eager mean.
    """

    metric: Metric
    eager: Floats
    graphed: Floats
    perturbed: Floats

    def part(self, steps: slice) -> Sample:
        """Return the differences at some ``steps`` of the window."""
        return Sample(self.metric, self.eager[:, steps], self.graphed[:, steps], self.perturbed[:, steps])

    @property
    def eager_distances(self) -> Floats:
        """Each eager run minus the mean of the others, and the perturbed run minus the mean of all, shape (runs, steps).

        A single eager run has no row.
        """
        # ``eager`` is relative to the mean of all runs.
        runs = len(self.eager)
        distances = self.eager * (runs / (runs - 1)) if runs > 1 else self.eager[:0]
        return np.concatenate((distances, self.perturbed))

    @property
    def is_finite(self) -> bool:
        """Whether all differences are finite, and sums of them too. If the eager gradient norm is 0, its relative difference is not
        finite."""
        return all((np.abs(side) < HUGE).all() for side in (self.eager, self.graphed, self.perturbed))

    @cached_property
    def largest(self) -> Floats:
        """The largest absolute difference of any graphed run at each step, shape (steps,)."""
        largest: Floats = np.abs(self.graphed).max(axis=0)
        return largest


def sample_of(
    metric: Metric, eager: Sequence[Steps], graphed: Sequence[Steps], window: slice, perturbed: Steps | None = None
) -> Sample:
    """Return the differences of ``metric`` in ``window``.

    All curves must have the same step numbers up to the end of ``window``.
    """
    before, after = (np.stack([steps.of(metric)[window] for steps in side]) for side in (eager, graphed))
    moved = perturbed.of(metric)[window][None] if perturbed else before[:0]
    with np.errstate(invalid="ignore", over="ignore"):
        # This form of the mean is exact if runs are equal bit for bit.
        mean = before[0] + (before - before[0]).mean(axis=0)
        # Divide before summing: the sum of norms can overflow even if their mean does not.
        scale = np.ones_like(mean) if metric == "loss" else (np.abs(before) / len(before)).sum(axis=0)
        return Sample(
            metric, *(_relative(side - mean, scale) for side in (before, after, moved.reshape(-1, len(mean))))
        )


def _relative(difference: Floats, scale: Floats) -> Floats:
    """Return ``difference / scale``, shape (runs, steps). ``scale`` has shape (steps,).

    The result is 0 for a difference of 0 even if the scale is 0. It is infinite if the quotient or the scale is not finite.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(difference == 0, 0.0, difference / scale)
    return np.where(np.isfinite(quotient) & np.isfinite(scale), quotient, np.inf)


def bitwise_equal(a: Floats, b: Floats) -> Booleans:
    """Return, element by element, whether two float64 arrays hold the same bits."""
    return np.equal(np.ascontiguousarray(a).view(np.int64), np.ascontiguousarray(b).view(np.int64))


def format_unequal(a: float, b: float) -> tuple[str, str]:
    """Format two numbers with 9 significant digits, or with 17 if they look equal with 9."""
    digits = 9 if f"{a:.9g}" != f"{b:.9g}" else 17
    return f"{a:.{digits}g}", f"{b:.{digits}g}"
