"""Summarize the loss of a cell, to check whether two cells of one task train the same model.

Layouts round differently, and training amplifies the difference with every step. So there are two bounds: a narrow one for the
first steps, before updates amplify rounding, and a wide one for the mean over the whole run. Rounding can move single steps
far, but moves the mean little. Both bounds accept the effect of other kernels on an H200: 0.0011 and 0.072 nats, with 10.2
nats in a single step (docs/results/launch_bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.run import Attempt

FIRST_STEPS = 2
FIRST_BOUND = 0.01
"""The largest accepted loss difference in the first steps, in nats: ten times the default margin of a graphed run."""
MEAN_BOUND = 0.5
"""The largest accepted difference of the mean loss over the run, in nats."""


@dataclass(frozen=True)
class LossTrajectory:
    """The losses of the ``first`` steps, and the ``mean`` loss over all ``steps``, in nats."""

    first: tuple[float, ...]
    mean: float
    steps: int


def loss_trajectory(attempts: Sequence[Attempt]) -> LossTrajectory | None:
    """Return the trajectory of the first run that ended well with complete records and steps, or None."""
    sound = (a.steps for a in attempts if a.outcome.results_intact and not a.problems and len(a.steps))
    steps = next(sound, None)
    if steps is None:
        return None
    # Other checks report a loss that is not finite. Divide before summing: the sum of losses can overflow.
    with np.errstate(invalid="ignore", over="ignore"):
        return LossTrajectory(
            tuple(steps.loss[:FIRST_STEPS].tolist()), float((steps.loss / len(steps)).sum()), len(steps)
        )


def describe_divergence(own: LossTrajectory, other: LossTrajectory) -> str:
    """Describe a difference between ``own`` and ``other`` that rounding does not explain; return "" if there is none."""
    difference = max((abs(a - b) for a, b in zip(own.first, other.first, strict=False)), default=0.0)
    if not difference <= FIRST_BOUND:
        return f"{difference:.3g} nats apart in the first {FIRST_STEPS} steps, and the bound is {FIRST_BOUND:g}"
    if own.steps == other.steps and not abs(own.mean - other.mean) <= MEAN_BOUND:
        return f"{abs(own.mean - other.mean):.3g} nats apart in the mean over {own.steps} steps, and the bound is {MEAN_BOUND:g}"
    return ""
