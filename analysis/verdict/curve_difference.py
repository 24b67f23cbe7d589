"""Measure the differences between graphed and eager curves, and among eager curves. This module decides nothing.

A difference is infinite where either side is not finite, so it fails every comparison with a margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analysis.records.steps import Booleans, Floats, Metric, Steps
from analysis.verdict.growth import Growth

METRICS: tuple[Metric, ...] = ("loss", "grad_norm")
METRIC_NAMES: dict[Metric, str] = {"loss": "loss", "grad_norm": "gradient norm"}


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


@dataclass(frozen=True)
class Estimate:
    """A point estimate and the half width of its confidence interval (analysis.verdict.equivalence_test)."""

    value: float
    half_width: float


@dataclass(frozen=True)
class MetricTests:
    """The test results of rungs 3 and 4 for one metric.

    ``mean`` is the mean difference over the window. ``p`` is the p-value of the equivalence test: the probability of a mean
    this small if the true mean difference were at the margin. ``rise`` is the rise over the window of the line fitted to the
    differences. ``leaves`` is whether this line will leave the margin. ``growth`` is a drift of one run, or growth at the end
    of the window, that will leave it.
    """

    metric: Metric
    mean: Estimate
    p: float
    rise: Estimate
    leaves: bool
    growth: Growth | None


@dataclass(frozen=True)
class CurveEvidence:
    """The measurements behind a verdict.

    Each difference is the largest over all graphed runs, relative to the mean of the eager runs at the same step. It is
    infinite where either side is not finite.
    """

    first_step: int
    last_step: int
    steps: int
    eager_runs: int
    graphed_runs: int
    max_loss_difference: float
    max_loss_step: int
    max_grad_norm_difference: float
    """Relative to the eager gradient norm."""
    max_grad_norm_step: int
    bitwise_prefix: int
    """Leading steps after the capture at which every graphed run equals some eager run bit for bit in loss and gradient
    norm."""
    eager_prefix: int
    """Leading steps at which all eager runs are equal bit for bit. With one run, this is all steps."""
    noise_floor: NoiseFloor | None
    tested: tuple[MetricTests, ...] = ()
    """Tests by metric. Empty if an earlier rung decided, there is no noise floor, or the window is too short."""

    @property
    def bitwise(self) -> bool:
        """Whether every graphed run equals every eager run bit for bit at every step.

        If eager runs differ, equality with one of them may be chance and does not count.
        """
        return self.bitwise_prefix == self.eager_prefix == self.steps

    def largest(self, metric: Metric) -> tuple[float, int]:
        """Return the largest difference of ``metric`` and its step."""
        if metric == "loss":
            return self.max_loss_difference, self.max_loss_step
        return self.max_grad_norm_difference, self.max_grad_norm_step


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
        """Whether all differences are finite. If the eager gradient norm is 0, its relative difference is not finite."""
        return all(np.isfinite(side).all() for side in (self.eager, self.graphed, self.perturbed))

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


def noise_floor(repeats: Sequence[Steps], window: slice, perturbed: Steps | None = None) -> NoiseFloor | None:
    """Return the noise floor of complete eager ``repeats`` of one workload in ``window``, and of its ``perturbed`` run.

    Return None for a single run.
    """
    return _noise_floor([sample_of(metric, repeats, repeats, window, perturbed) for metric in METRICS])


def _noise_floor(samples: Sequence[Sample]) -> NoiseFloor | None:
    """Return the noise floor of ``samples``, which are in the order of ``METRICS``."""
    if not len(samples[0].eager_distances):
        return None
    loss, grad_norm = (float(np.abs(sample.eager_distances).max()) for sample in samples)
    return NoiseFloor(len(samples[0].eager), loss, grad_norm, perturbed=len(samples[0].perturbed) > 0)


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


def bitwise_prefix(eager: Sequence[Steps], graphed: Sequence[Steps], window: slice, metrics: Sequence[Metric]) -> int:
    """Count the leading steps of ``window`` at which every graphed run equals some eager run bit for bit."""
    return min(max(_equal_steps(one, other, window, metrics) for other in eager) for one in graphed)


def _equal_steps(one: Steps, other: Steps, window: slice, metrics: Sequence[Metric]) -> int:
    equal = np.all([bitwise_equal(one.of(m)[window], other.of(m)[window]) for m in metrics], axis=0)
    return len(equal) if equal.all() else int(np.argmin(equal))


@dataclass(frozen=True)
class Differences:
    """The differences after the capture: samples by metric, and the evidence measured on them."""

    samples: Mapping[Metric, Sample]
    evidence: CurveEvidence


def measure_differences(
    eager: Sequence[Steps],
    graphed: Sequence[Steps],
    window: slice,
    metrics: Sequence[Metric] = METRICS,
    perturbed: Steps | None = None,
) -> Differences:
    """Measure the differences between ``graphed`` and ``eager`` curves in ``window``, which must not be empty.

    All curves must have the same step numbers up to the end of ``window``.
    """
    steps = eager[0].step[window]
    samples = {metric: sample_of(metric, eager, graphed, window, perturbed) for metric in METRICS}
    maxima: dict[str, Any] = {}
    for metric, sample in samples.items():
        largest = sample.largest
        at = int(np.argmax(largest))
        maxima |= {f"max_{metric}_difference": float(largest[at]), f"max_{metric}_step": int(steps[at])}
    evidence = CurveEvidence(
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        steps=len(steps),
        eager_runs=len(eager),
        graphed_runs=len(graphed),
        bitwise_prefix=bitwise_prefix(eager, graphed, window, metrics),
        eager_prefix=bitwise_prefix(eager[:1], eager, window, metrics),
        noise_floor=_noise_floor(list(samples.values())),
        **maxima,
    )
    return Differences(samples, evidence)


def format_unequal(a: float, b: float) -> tuple[str, str]:
    """Format two numbers with 9 significant digits, or with 17 if they look equal with 9."""
    digits = 9 if f"{a:.9g}" != f"{b:.9g}" else 17
    return f"{a:.{digits}g}", f"{b:.{digits}g}"
