"""Rung 4: detect a difference that is still within its margin, but will leave it.

Slow divergence shows in the line fitted to the differences. If the line rises significantly, its extrapolation over as many
steps again must stay within the margin. A late blow-up shows only in the last steps, which are too few to move the line
(Megatron-LM issue 5966: a gradient norm that is normal for 80 steps and explodes at step 91).
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Floats
from analysis.verdict.curve_difference import Estimate, Sample

TAIL = 10
"""The tail of a window is one in so many of its steps, at its end."""
GROWTH = 3.0
"""A blow-up exceeds all earlier differences, and the noise floor, by this factor."""


def rise_of_line(steps: int) -> Floats:
    """Return weights, shape (steps,), whose dot product with a series is the rise of its least-squares line.

    The rise is from the first step to the last.
    """
    place = np.arange(steps) - (steps - 1) / 2
    weights: Floats = place * (steps - 1) / (place @ place)
    return weights


def leaves_margin(mean: Estimate, rise: Estimate, margin: float) -> bool:
    """Return whether ``rise`` is significant and its line would leave ``margin`` within as many steps again.

    At its last step the line is half its rise above the mean, and as many steps later 1.5 times its rise.
    """
    return abs(rise.value) > rise.half_width and not abs(mean.value + 1.5 * rise.value) <= margin


def blows_up(sample: Sample, margin: float, floor: float) -> bool:
    """Return whether the tail exceeds half the margin, and exceeds all earlier differences and the noise floor by far."""
    largest = sample.largest
    tail = max(1, len(largest) // TAIL)
    before, late = float(largest[:-tail].max()), float(largest[-tail:].max())
    return late > margin / 2 and late > GROWTH * before and late > GROWTH * floor
