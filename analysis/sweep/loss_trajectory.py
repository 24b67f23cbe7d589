"""Summarize the loss of a cell, to check whether two cells of one task train the same model.

Layouts and engines round differently, and training amplifies the difference with every step. So there are three bounds: for the
first loss, which no update has touched; for the second, which shows the first update; and a wide one for the mean over the
whole run. Rounding can move single steps far, but moves the mean little. All bounds accept the effect of other kernels on
H200s. Elementwise compilation: 0.0011 nats in the first two steps and 0.072 in the mean, with 10.2 nats in a single step
(docs/results/launch_bound). Two engines on 24 layers of GPT-OSS: 0.0034 nats in the first step, and in the second 2% of the
first update (docs/results/gpt_oss_20b_2gpu_engines/steps.parquet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.run import Attempt

FIRST_BOUND = 0.01
"""The largest accepted difference of the first losses, in nats: ten times the default margin of a graphed run."""
UPDATE_SHARE = 0.05
"""The largest accepted difference of the second losses, as a share of what the first update changed, if more than
``FIRST_BOUND``. Optimizers like Adam amplify rounding: where a gradient is small, rounding decides the sign of its update."""
MEAN_BOUND = 0.5
"""The largest accepted difference of the mean loss over the run, in nats."""


@dataclass(frozen=True)
class LossTrajectory:
    """The losses of the ``first`` two steps, and the ``mean`` loss over all ``steps``, in nats."""

    first: tuple[float, ...]
    mean: float
    steps: int

    @property
    def update(self) -> float:
        """How far the first update moved the loss, in nats. A run of one step has no update."""
        return abs(self.first[1] - self.first[0]) if len(self.first) == 2 else 0.0


def loss_trajectory(attempts: Sequence[Attempt]) -> LossTrajectory | None:
    """Return the trajectory of the first run that ended well with complete records and steps, or None."""
    sound = (a.steps for a in attempts if a.outcome.results_intact and not a.problems and len(a.steps))
    steps = next(sound, None)
    if steps is None:
        return None
    # Other checks report a loss that is not finite. Divide before summing: the sum of losses can overflow.
    with np.errstate(invalid="ignore", over="ignore"):
        return LossTrajectory(tuple(steps.loss[:2].tolist()), float((steps.loss / len(steps)).sum()), len(steps))


def describe_divergence(own: LossTrajectory, other: LossTrajectory) -> str:
    """Describe a difference between ``own`` and ``other`` that rounding does not explain; return "" if there is none."""
    bounds = {"first": FIRST_BOUND, "second": max(FIRST_BOUND, UPDATE_SHARE * min(own.update, other.update))}
    for (step, bound), loss, wanted in zip(bounds.items(), own.first, other.first, strict=False):
        if not abs(loss - wanted) <= bound:
            return f"{abs(loss - wanted):.3g} nats apart in the {step} step, and the bound is {bound:.3g}"
    if own.steps == other.steps and not abs(own.mean - other.mean) <= MEAN_BOUND:
        return f"{abs(own.mean - other.mean):.3g} nats apart in the mean over {own.steps} steps, and the bound is {MEAN_BOUND:g}"
    return ""
