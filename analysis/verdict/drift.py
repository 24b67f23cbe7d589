"""Rung 4: a difference that is within its margin so far, and on its way out of it.

Slow divergence shows in the line fitted to the differences: where it rises by more than noise explains, it must not leave
the margin in as many steps again. A late blow-up shows in the last steps alone (Megatron-LM issue
5966: a gradient norm that is normal for 80 steps and explodes at 91), too few of them to move a line.
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Floats
from analysis.verdict.curve_difference import Estimate, Sample

TAIL = 10
"""The last steps of a window are its last tenth: one in so many."""
GROWTH = 3.0
"""A blow-up is so many times what there was before it, and what eager repeats differ by."""


def rise_of_line(steps: int) -> Floats:
    """Weights of shape (steps,): their product with a series is how far its least-squares line rises from its first step
    to its last."""
    place = np.arange(steps) - (steps - 1) / 2
    weights: Floats = place * (steps - 1) / (place @ place)
    return weights


def leaves_margin(mean: Estimate, rise: Estimate, margin: float) -> bool:
    """Whether a line rises beyond its interval, and would end beyond ``margin`` after as many steps again.

    At its last step it stands half its rise above the mean.
    """
    return abs(rise.value) > rise.half_width and not abs(mean.value + 1.5 * rise.value) <= margin


def blows_up(sample: Sample, margin: float, floor: float) -> bool:
    """Whether the differences of the last tenth rise above half the margin, and far above all before and the floor."""
    largest = sample.largest
    tail = max(1, len(largest) // TAIL)
    before, late = float(largest[:-tail].max()), float(largest[-tail:].max())
    return late > margin / 2 and late > GROWTH * before and late > GROWTH * floor
