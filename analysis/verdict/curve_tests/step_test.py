"""Rung 3, step by step: show that no step hides a true difference of ``TOLERATED`` margins.

Noise can hide a difference: the true difference may be beyond the margin although the measured one is within it. So each step
has a limit: the margin, and a distance below ``TOLERATED`` margins. With this distance, noise hides a true difference of
``TOLERATED`` margins with a probability of only ``ALPHA``. If noise is below about a sixth of the margin, the limit is the
margin. The limit does not depend on the number of steps. Noise may be loud in some part of the window, such as its beginning,
so each part of ``PART`` steps or more in which it is has limits of its own.

A fault may be in one graphed run or in several. So for each group size, from one graphed run to all of them, the group that is
farthest out at a step is compared with all other runs, eager and graphed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from analysis.statistics.standard_error import welch
from analysis.verdict.curve_difference import Sample
from analysis.verdict.noise import NoiseScale, noise_scale

TOLERATED = 1.25
"""A true difference of this many margins does not pass. One between the margin and this may or may not pass."""
ALPHA = 0.04
"""The probability that noise hides a true difference of ``TOLERATED`` margins at a single step."""
PART = 20
"""The least number of steps of a part of the window."""
SPIKE = 0.01
"""The probability that a normal distribution with the noise of a step exceeds ``spike_limit`` anywhere in a window."""


@dataclass(frozen=True)
class HiddenStep:
    """The step whose difference is farthest beyond its limit. ``place`` is its index in the window."""

    place: int
    size: float
    limit: float
    noise: float


def find_hidden(sample: Sample, scale: NoiseScale, margin: float, looks: int = 1) -> HiddenStep | None:
    """Return the step that may hide a true difference of ``TOLERATED`` times ``margin``, or None. ``looks`` share ALPHA."""
    found = []
    for steps in np.array_split(np.arange(sample.graphed.shape[1]), max(sample.graphed.shape[1] // PART, 1)):
        part = sample.part(slice(int(steps[0]), int(steps[-1]) + 1))
        hidden = _find_hidden(part, scale.within(noise_scale(part)), margin, looks)
        found += [replace(step, place=step.place + int(steps[0])) for step in hidden]
    return max(found, key=lambda step: step.size - step.limit, default=None)


def _find_hidden(sample: Sample, scale: NoiseScale, margin: float, looks: int) -> list[HiddenStep]:
    """Return the farthest step beyond its limit, for each group size that has one."""
    runs, eager = len(sample.graphed), len(sample.eager)
    ascending = np.sort(sample.graphed, axis=0)
    found = []
    for group in range(1, runs + 1):
        error = scale.of_group(group, runs, eager)
        limit = min(margin, TOLERATED * margin - error.exceeded_with(ALPHA / looks))
        # Differences are relative to the eager mean, so the eager runs add 0 to the sum of all runs.
        farthest = np.array([ascending[:group].sum(axis=0), ascending[runs - group :].sum(axis=0)])
        others = ascending.sum(axis=0) - farthest
        sizes = np.abs(farthest / group - others / (runs + eager - group)).max(axis=0)
        place = int(np.argmax(sizes))
        if not sizes[place] <= limit:
            found.append(HiddenStep(place, float(sizes[place]), max(limit, 0.0), error.size))
    return found


def spike_limit(sample: Sample, scale: NoiseScale, margin: float) -> float:
    """Return the limit above which a difference of an eager or perturbed run from the others is a spike.

    It is ``margin`` or more. Acceptable noise also exceeds the margin at a few steps of a long window. A normal distribution
    with this noise may explain differences of up to ``TOLERATED`` margins, which are then no spikes.
    """
    runs, steps = sample.eager.shape
    from_others = welch(scale.eager * (1 + 1 / (runs - 1)))
    reach = from_others.exceeded_with(SPIKE / (2 * runs * steps))
    return min(max(margin, reach), TOLERATED * margin)
