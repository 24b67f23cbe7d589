"""Rung 4: detect differences that grow at the end of the window, and would leave the margin after it.

The window is cut into blocks, and the level of a block is the median size of its differences: one spike does not move it. A
difference grows late if its level rises in the last block by more than that of any graphed run before, and by more than eager noise explains.
Its rise then forms a geometric series from block to block. The series is continued over as many steps again. Blocks of
several lengths are tried, from a third of the window to one step: a ramp over 60 steps and a difference that grows tenfold
in each look alike at none.

Training is chaotic: differences of the last bit grow from step to step, between eager runs as well. Where eager differences
grow, growth counts only far above them: two runs that leave a third one at the same rate may be far apart in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from analysis.records.steps import Floats
from analysis.statistics.along_steps import along_steps

QUARTERS = 4
"""A block begins at any of its four quarters; one of less than four steps begins at any step."""
LONGEST = 3
"""The longest blocks are a third of the window: one before the growth, one to compare with, one that grows."""
ACCELERATION = 1.5
"""The last rise exceeds all earlier rises, of any graphed run, by this factor."""
ABOVE_NOISE = 3.0
"""The last rise exceeds all rises of eager differences by this factor."""
SHORT = 2
"""Blocks of so many steps are many. They exceed the largest rise of all by chance as rarely as others exceed ``ABOVE_NOISE``."""
SHORT_RISE = 0.1
"""Their last rise exceeds this share of the margin as well: chaos of eager runs may be hidden in noise."""
ABOVE_SPREAD = 2.0
"""The last rise exceeds the median distance of a size from the level of its block by this factor."""
SURE = 3.0
"""The last rise of a long block, or a run's line, exceeds so many standard errors: there are many runs, and eager noise is a rough measure."""
CHAOTIC = 2.0
"""Eager differences grow if their mean in the last block is so many times that in the first third of the window."""
LEAST = 8
"""Fewer last steps do not show that eager differences grow: the mean of four is that large by chance."""
ABOVE_CHAOS = 30.0
"""Where eager differences grow, the last rise exceeds the largest of them in the last block by this factor."""


@dataclass(frozen=True)
class Growth:
    """Growth of a difference, or of its size, over the last ``steps`` steps, in the graphed run of index ``run``."""

    run: int
    steps: int
    before: float
    after: float


def late_growth(graphed: Floats, eager: Floats, margin: float) -> Growth | None:
    """Return the growth of a graphed difference that leaves ``margin`` within as many steps again; None without one.

    ``graphed`` has shape (graphed runs, steps), ``eager`` has shape (eager runs, steps): differences from the mean of the
    eager runs, and of each eager run from the others. All must be finite.
    """
    sizes = np.abs(graphed)
    found = (_growth(sizes, eager, length, stride, margin) for length, stride in _blocks(sizes.shape[1]))
    return next(filter(None, found), None)


def _blocks(steps: int) -> Iterator[tuple[int, int]]:
    """Yield the lengths of blocks, and how many steps lie between two that overlap, the longest first."""
    quarter = steps // (LONGEST * QUARTERS)
    while quarter:
        yield QUARTERS * quarter, quarter
        quarter //= 2
    yield from ((2, 1), (1, 1))


def _growth(sizes: Floats, eager: Floats, length: int, stride: int, margin: float) -> Growth | None:
    """Return the growth of the last block."""
    levels, rises = _levels(sizes, length, stride)
    last, earlier = rises[:, -1], rises[:, : -(length // stride)].max().clip(0)
    explained = np.maximum(_explained(eager, length, stride, margin), ABOVE_SPREAD * _spread(sizes, length))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = np.where(last > explained, last / earlier, 0.0)
        # The last level is that of the middle of its block.
        later = factor ** (sizes.shape[1] / length + 0.5)
        leaves = ~(levels[:, -1] + last * factor * (later - 1) / (factor - 1) <= margin)
    grows = leaves & (factor > ACCELERATION)
    if not grows.any():
        return None
    run = int(np.argmax(np.where(grows, last, 0.0)))
    return Growth(run, length, float(levels[run, -1] - last[run]), float(levels[run, -1]))


def _levels(sizes: Floats, length: int, stride: int) -> tuple[Floats, Floats]:
    """Return the median of each block, and its rise above the block that ends where it begins.

    Both have shape (runs, blocks), the rises fewer. The last block ends with the window.
    """
    blocks = sliding_window_view(sizes, length, axis=1)
    levels = np.median(blocks[:, (blocks.shape[1] - 1) % stride :: stride], axis=2)
    apart = length // stride
    return levels, levels[:, apart:] - levels[:, :-apart]


def _spread(sizes: Floats, length: int) -> Floats:
    """Return the median distance of a size from the level of its block, in the last two blocks, shape (runs,)."""
    blocks = sizes[:, -2 * length :].reshape(-1, 2, length)
    distances = np.median(np.abs(blocks - np.median(blocks, axis=2, keepdims=True)), axis=2)
    largest: Floats = distances.max(axis=1) * (length > SHORT)
    return largest


def _explained(eager: Floats, length: int, stride: int, margin: float) -> float:
    """Return the largest rise of a block that eager differences explain."""
    noise = np.abs(eager)
    rises = np.abs(_levels(noise, length, stride)[1]).max(axis=0)
    if length <= SHORT:
        chaos = rises[-1] >= rises.max()
        return (ABOVE_CHAOS if chaos else ACCELERATION) * float(rises.max()) + SHORT_RISE * margin
    # Few blocks of noise that changes slowly may rise little by chance.
    rise = np.repeat([0.0, -1 / length, 1 / length], [eager.shape[1] - 2 * length, length, length])
    error = max(along_steps(one, rise).size for one in eager)
    return max(explained_by_chaos(noise, length), ABOVE_NOISE * float(rises.max()), SURE * error)


def explained_by_chaos(noise: Floats, length: int) -> float:
    """Return the largest rise that growing eager differences explain, over the last ``length`` steps; 0 if none grows.

    ``noise`` are the sizes of eager differences, shape (eager runs, steps).
    """
    first, last = noise[:, : noise.shape[1] // LONGEST], noise[:, -max(length, LEAST) :]
    return ABOVE_CHAOS * float(last.max()) if last.mean() > CHAOTIC * first.mean() else 0.0
