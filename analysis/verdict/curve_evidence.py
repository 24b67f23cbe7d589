"""The evidence behind a verdict: what is measured on the curves of a graphed cell and of its eager baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.records.steps import Steps
from analysis.verdict.curve_difference import Estimate, Sample, bitwise_equal, sample_of
from analysis.verdict.curve_tests.growth import Growth
from analysis.verdict.noise import NoiseFloor, noise_floor_of
from launch.contract.records.step_metrics import METRICS, Metric


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
        noise_floor=noise_floor_of(list(samples.values())),
        **maxima,
    )
    return Differences(samples, evidence)


def bitwise_prefix(eager: Sequence[Steps], graphed: Sequence[Steps], window: slice, metrics: Sequence[Metric]) -> int:
    """Count the leading steps of ``window`` at which every graphed run equals some eager run bit for bit."""
    return min(max(_equal_steps(one, other, window, metrics) for other in eager) for one in graphed)


def _equal_steps(one: Steps, other: Steps, window: slice, metrics: Sequence[Metric]) -> int:
    equal = np.all([bitwise_equal(one.of(m)[window], other.of(m)[window]) for m in metrics], axis=0)
    return len(equal) if equal.all() else int(np.argmin(equal))
