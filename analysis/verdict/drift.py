"""Rung 4: detect a difference that drifts: it is still within its margin, but will leave it.

A drift shows in the line fitted to the differences. If the line rises significantly, its extrapolation over as many steps
again must stay within the margin. A late onset is in too few steps to move the line: analysis.verdict.growth detects it.
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Floats
from analysis.verdict.curve_difference import Estimate


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
