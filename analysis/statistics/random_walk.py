"""Measure how far a series falls, and how far it could fall by chance if its values depend on each other.

A series whose values depend on each other may fall over a window by chance. A random walk moves farthest. Its scale is
estimated from the means of equal blocks: from their first differences, or from second differences, which a curved trend hardly
widens. Let v be the variance of a random walk's movement over one block. Then differences of means have variance 2/3 v and a
correlation of 1/4, second differences have variance v, and the difference between the first and the last of m blocks has
variance (m - 4/3) v. Values that depend less on each other move less far. For them the error is too large, never too small.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analysis.statistics.standard_error import Variance, welch

BLOCKS = ((8, 1), (10, 2), (20, 2))
"""For each estimate, the number of blocks and the order of differencing. Few blocks suit noise; many suit a trend that ends
early."""
SHORTEST = 5
"""The length of the shortest blocks, in steps."""
ALPHA = 0.022
"""The error probability of one estimate. Any of them errs in at most 5% of random walks, by simulation."""


def fall_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the fall of ``values``, shape (steps,), from the first block to the last, and the half width of its interval.

    Of several estimates, return the one with the largest fall beyond chance. It needs 20 steps or more.
    """
    found = []
    for blocks, order in (*BLOCKS, (len(values) // SHORTEST, 2)):
        means = np.array([block.mean() for block in np.array_split(values, blocks)])
        error = welch(_variance_of_walk(means, order) * (blocks - 4 / 3))
        found.append((float(means[0] - means[-1]), error.exceeded_with(ALPHA)))
    return max(found, key=lambda estimate: estimate[0] - estimate[1])


def _variance_of_walk(means: NDArray[np.float64], order: int) -> Variance:
    """Return the variance of the walk over one block. Its degrees of freedom allow for the correlation of the differences."""
    differences = np.diff(means, order)
    if order == 1:
        return Variance(3 / 2 * float(differences.var(ddof=1)), (len(means) - 1) / (9 / 8) - 1)
    return Variance(float(np.square(differences).mean()), len(differences) / (23 / 18))
