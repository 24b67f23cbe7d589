"""The noise floor: how far eager runs of one workload differ from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.steps import Metric, Steps
from analysis.verdict.curve_difference import METRICS, Sample, sample_of


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
