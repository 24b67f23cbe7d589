"""How far graphed runs are from eager ones, and eager ones from each other: measurements only, no rule.

Differences are infinite wherever a side is not finite, so that no comparison with a margin can let one through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analysis.records.steps import Booleans, Floats, Metric, Steps

METRICS: tuple[Metric, ...] = ("loss", "grad_norm")
METRIC_NAMES: dict[Metric, str] = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class NoiseFloor:
    """How far eager repeats are from each other: the largest difference, over the compared steps, of one of them from
    the mean of the others, as a graphed run is held against the mean of all.

    ``loss`` is absolute (nats), ``grad_norm`` relative to the mean of all.
    """

    repeats: int
    loss: float
    grad_norm: float

    def of(self, metric: Metric) -> float:
        return self.loss if metric == "loss" else self.grad_norm


@dataclass(frozen=True)
class Estimate:
    """``value`` with the half width of the interval that analysis.verdict.equivalence_test gives it."""

    value: float
    half_width: float


@dataclass(frozen=True)
class MetricTests:
    """What rungs 3 and 4 found for one metric. ``mean`` is the mean difference of the window, and ``p`` how likely so
    small a one would be if the true one were at the margin. ``rise`` is how far the line fitted to the differences rises
    over the window; it ``leaves`` where that would take it out of the margin. ``late`` is a blow-up at the end."""

    metric: Metric
    mean: Estimate
    p: float
    rise: Estimate
    leaves: bool
    late: bool


@dataclass(frozen=True)
class CurveEvidence:
    """What a verdict stands on. Differences are from the mean of the eager runs at each step, and infinite where a side
    is not finite; of several graphed runs the largest counts."""

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
    """Leading steps after the capture whose loss and gradient norm each graphed run has equal to the bit with an eager one."""
    eager_prefix: int
    """Leading steps that all eager runs have equal to the bit; all steps where there is one run."""
    noise_floor: NoiseFloor | None
    tested: tuple[MetricTests, ...] = ()
    """By metric; empty where a rung before them decided, or the window is too short for them."""

    @property
    def bitwise(self) -> bool:
        """Whether every graphed run equals every eager one at every step. Equal to one of several that differ is what chance
        makes, too."""
        return self.bitwise_prefix == self.eager_prefix == self.steps

    def largest(self, metric: Metric) -> tuple[float, int]:
        """The largest difference and its step."""
        if metric == "loss":
            return self.max_loss_difference, self.max_loss_step
        return self.max_grad_norm_difference, self.max_grad_norm_step


@dataclass(frozen=True)
class Deviation:
    """Where and by how much a graphed run first left its eager twin."""

    step: int
    metric: Metric
    size: float


@dataclass(frozen=True)
class Sample:
    """One metric after the capture, every run as it stands from the mean of the eager runs at each step.

    ``eager`` has shape (eager runs, steps), ``graphed`` (graphed runs, steps); losses in nats, gradient norms relative
    to that mean.
    """

    metric: Metric
    eager: Floats
    graphed: Floats

    @cached_property
    def largest(self) -> Floats:
        """The largest difference of any graphed run: shape (steps,)."""
        largest: Floats = np.abs(self.graphed).max(axis=0)
        return largest


def sample_of(metric: Metric, eager: Sequence[Steps], graphed: Sequence[Steps], window: slice) -> Sample:
    """Of curves that agree in their steps up to the end of ``window``."""
    before, after = (np.stack([steps.of(metric)[window] for steps in side]) for side in (eager, graphed))
    with np.errstate(invalid="ignore", over="ignore"):
        mean = before[0] + (before - before[0]).mean(axis=0)  # exact where runs are equal to the bit
        # Each run's share first: the sum of norms may overflow where their mean does not.
        scale = np.ones_like(mean) if metric == "loss" else (np.abs(before) / len(before)).sum(axis=0)
        return Sample(metric, _relative(before - mean, scale), _relative(after - mean, scale))


def noise_floor(repeats: Sequence[Steps], window: slice) -> NoiseFloor | None:
    """How far complete eager ``repeats`` of one workload are apart in ``window``; None for fewer than two."""
    return _noise_floor([sample_of(metric, repeats, repeats, window) for metric in METRICS])


def _noise_floor(samples: Sequence[Sample]) -> NoiseFloor | None:
    """Of samples in the order of ``METRICS``."""
    runs = len(samples[0].eager)
    if runs < 2:
        return None
    # The mean of the others lies as much further off as they are fewer than all.
    return NoiseFloor(runs, *(float(np.abs(sample.eager).max()) * runs / (runs - 1) for sample in samples))


def _relative(difference: Floats, scale: Floats) -> Floats:
    """``difference`` over ``scale``; no difference is 0 even over 0, and what is not finite is infinite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(difference == 0, 0.0, difference / scale)
    return np.where(np.isfinite(quotient) & np.isfinite(scale), quotient, np.inf)


def bitwise_equal(a: Floats, b: Floats) -> Booleans:
    """Element by element, whether two arrays hold the same bits."""
    return np.equal(np.ascontiguousarray(a).view(np.int64), np.ascontiguousarray(b).view(np.int64))


def bitwise_prefix(eager: Sequence[Steps], graphed: Sequence[Steps], window: slice, metrics: Sequence[Metric]) -> int:
    """How many leading steps of ``window`` every graphed run has equal to the bit with an eager one."""
    return min(max(_equal_steps(one, other, window, metrics) for other in eager) for one in graphed)


def _equal_steps(one: Steps, other: Steps, window: slice, metrics: Sequence[Metric]) -> int:
    equal = np.all([bitwise_equal(one.of(m)[window], other.of(m)[window]) for m in metrics], axis=0)
    return len(equal) if equal.all() else int(np.argmin(equal))


@dataclass(frozen=True)
class Differences:
    """Curves from the capture on: the samples by metric, and what they show."""

    samples: Mapping[Metric, Sample]
    evidence: CurveEvidence


def measure_differences(
    eager: Sequence[Steps], graphed: Sequence[Steps], window: slice, metrics: Sequence[Metric] = METRICS
) -> Differences:
    """Of curves that agree in their steps up to the end of ``window``, which is not empty."""
    steps = eager[0].step[window]
    samples = {metric: sample_of(metric, eager, graphed, window) for metric in METRICS}
    found: dict[str, Any] = {}
    for metric, sample in samples.items():
        largest = sample.largest
        at = int(np.argmax(largest))
        found |= {f"max_{metric}_difference": float(largest[at]), f"max_{metric}_step": int(steps[at])}
    evidence = CurveEvidence(
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        steps=len(steps),
        eager_runs=len(eager),
        graphed_runs=len(graphed),
        bitwise_prefix=bitwise_prefix(eager, graphed, window, metrics),
        eager_prefix=bitwise_prefix(eager[:1], eager, window, metrics),
        noise_floor=_noise_floor(list(samples.values())),
        **found,
    )
    return Differences(samples, evidence)


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Two numbers in nine digits, or in as many as tell any two apart where nine do not."""
    digits = 9 if f"{a:.9g}" != f"{b:.9g}" else 17
    return f"{a:.{digits}g}", f"{b:.{digits}g}"
