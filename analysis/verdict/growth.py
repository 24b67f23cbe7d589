"""Rung 4: detect differences that grow at the end of the window, and would leave the margin after it.

The window is cut into blocks, and the level of a block is the median size of its differences: one spike does not move it. A
difference grows late if its level rises in the last block by more than ever before, and by more than eager noise explains.
Its rise then forms a geometric series from block to block. The series is continued over as many steps again. Blocks of
several lengths are tried, since a ramp over 60 steps and a difference that doubles every other step look alike at none.

Training is chaotic: differences of the last bit grow from step to step, between eager runs as well. Where eager differences
grow, growth counts only far above them: two runs that leave a third one at the same rate may be far apart in size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from analysis.records.steps import Floats

QUARTERS = 4
"""A block has four quarters, and begins at any of them."""
LONGEST = 3
"""The longest blocks are a third of the window: one before the growth, one to compare with, one that grows."""
ACCELERATION = 1.5
"""The last rise exceeds all earlier rises by this factor."""
ABOVE_NOISE = 3.0
"""The last rise exceeds all rises of eager differences by this factor."""
ABOVE_SPREAD = 2.0
"""The last rise exceeds the median distance of a size from the level of its block by this factor."""
CHAOTIC = 2.5
"""Eager differences grow if their mean in the last block is so many times that in the first third of the window."""
LEAST = 8
"""Fewer last steps do not show that eager differences grow: the mean of four is that large by chance."""
ABOVE_CHAOS = 30.0
"""Where eager differences grow, the last rise exceeds the largest of them in the last block by this factor."""


@dataclass(frozen=True)
class Growth:
    """Growth of the size of a difference from one block of ``steps`` steps to the next, which is the last."""

    steps: int
    before: float
    after: float


def late_growth(graphed: Floats, eager: Floats, margin: float) -> Growth | None:
    """Return the growth of a graphed difference that leaves ``margin`` within as many steps again; None without one.

    ``graphed`` has shape (graphed runs, steps), ``eager`` has shape (eager runs, steps): differences from the mean of the
    eager runs, and of each eager run from the others. All must be finite.
    """
    quarter = graphed.shape[1] // (LONGEST * QUARTERS)
    sizes, noise = np.abs(graphed), np.abs(eager)
    while quarter:
        if found := _growth(sizes, noise, quarter, margin):
            return found
        quarter //= 2
    return None


def _growth(sizes: Floats, noise: Floats, quarter: int, margin: float) -> Growth | None:
    """Return the growth of the last block, of ``QUARTERS`` times ``quarter`` steps."""
    levels, spreads = _levels(sizes, quarter)
    rises = levels[:, QUARTERS:] - levels[:, :-QUARTERS]
    last, earlier = rises[:, -1], np.abs(rises[:, :-QUARTERS]).max(axis=1)
    explained = np.maximum(_explained(noise, quarter), ABOVE_SPREAD * spreads[:, [-1, -1 - QUARTERS]].max(axis=1))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = np.where(last > explained, last / earlier, 0.0)
        # The last level is that of the middle of its block.
        later = factor ** (sizes.shape[1] / (QUARTERS * quarter) + 0.5)
        leaves = ~(levels[:, -1] + last * factor * (later - 1) / (factor - 1) <= margin)
    grows = leaves & (factor > ACCELERATION)
    if not grows.any():
        return None
    run = int(np.argmax(np.where(grows, last, 0.0)))
    return Growth(QUARTERS * quarter, float(levels[run, -1 - QUARTERS]), float(levels[run, -1]))


def _levels(sizes: Floats, quarter: int) -> tuple[Floats, Floats]:
    """Return the median of each block, and the median distance from it. The last block ends with the window.

    Both have shape (runs, blocks). Blocks begin at any quarter, so they overlap.
    """
    blocks = sliding_window_view(sizes, QUARTERS * quarter, axis=1)
    blocks = blocks[:, (blocks.shape[1] - 1) % quarter :: quarter]
    levels = np.median(blocks, axis=2)
    return levels, np.median(np.abs(blocks - levels[..., None]), axis=2)


def _explained(noise: Floats, quarter: int) -> float:
    """Return the largest rise of a block that eager differences explain."""
    first, last = noise[:, : noise.shape[1] // LONGEST], noise[:, -max(QUARTERS * quarter, LEAST) :]
    if last.mean() > CHAOTIC * first.mean():
        return ABOVE_CHAOS * float(last.max())
    levels, _ = _levels(noise, quarter)
    return ABOVE_NOISE * float(np.abs(levels[:, QUARTERS:] - levels[:, :-QUARTERS]).max())
