"""The course of a cell's loss, in as few numbers as tell whether two cells of one task train the same thing.

Layouts round otherwise, and training makes more of it with every step. So two bounds: a narrow one for the first steps,
which hardly any update has touched, and a wide one for the mean over the whole run, since rounding moves single steps by
much and the curve by little. Both let pass what a change of kernels alone did on an H200 (0.0011 and 0.072 nats, and 10.2
in a single step: docs/results/launch_bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.run import Attempt

FIRST_STEPS = 2
FIRST_BOUND = 0.01
"""Nats by which a loss of the first steps may differ: ten times the margin of a graphed run."""
MEAN_BOUND = 0.5
"""Nats by which the mean over the run may differ."""


@dataclass(frozen=True)
class LossTrajectory:
    """``first`` are the losses of the first steps, ``mean`` is over all ``steps``; in nats."""

    first: tuple[float, ...]
    mean: float
    steps: int


def loss_trajectory(attempts: Sequence[Attempt]) -> LossTrajectory | None:
    """Of the first run that ended with whole records; None where none has steps."""
    sound = (a.steps for a in attempts if a.outcome.results_intact and not a.problems and len(a.steps))
    steps = next(sound, None)
    if steps is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # a loss that is not finite is told of elsewhere
        return LossTrajectory(tuple(steps.loss[:FIRST_STEPS].tolist()), float(steps.loss.mean()), len(steps))


def describe_divergence(own: LossTrajectory, other: LossTrajectory) -> str:
    """How far ``own`` is from ``other`` where that is beyond what rounding does; empty where it is not."""
    apart = max((abs(a - b) for a, b in zip(own.first, other.first, strict=False)), default=0.0)
    if not apart <= FIRST_BOUND:
        return f"{apart:.3g} nats apart in the first {FIRST_STEPS} steps"
    if own.steps == other.steps and not abs(own.mean - other.mean) <= MEAN_BOUND:
        return f"{abs(own.mean - other.mean):.3g} nats apart in the mean over {own.steps} steps"
    return ""
