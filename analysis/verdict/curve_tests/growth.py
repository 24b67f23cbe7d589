"""Rung 4: detect differences that grow at the end of the window and would leave the margin after it.

The window is cut into blocks. The level of a block is the median size of its differences, which one spike does not move. A
difference grows late if its level rises more in the last block than any graphed run's level rose before, and more than eager
noise explains. Its rises are then extrapolated as a geometric series, from block to block, over as many steps again. Several
block lengths are tried, from a third of the window to one step. No single length detects both a ramp over 60 steps and a
difference that grows tenfold at each step.

Training is chaotic: differences in the last bit grow from step to step, also between eager runs. If eager differences grow, a
graphed difference counts only far above them. Two runs may leave a third one at the same rate and still differ much in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from analysis.records.steps import Floats, Integers
from analysis.statistics.along_steps import along_steps
from analysis.statistics.median import medians

QUARTERS = 4
"""Blocks overlap: they begin a quarter of their length apart, or at every step if they are shorter than four steps."""
LONGEST = 3
"""The longest block is a third of the window. One block grows, one is compared with it, and one shows the rise before."""
ACCELERATION = 1.5
"""The last rise must exceed all earlier rises of all graphed runs by this factor."""
LEAST_RISE = 0.001
"""Earlier rises count as this share of the margin at least. From 0 to a unit in the last place of float32 is no growth."""
ABOVE_NOISE = 3.0
"""The last rise must exceed all rises of eager differences by this factor."""
SHORT = 2
"""Blocks of at most this many steps are short. There are many of them. So chance exceeds ``ACCELERATION`` times their largest
eager rise as rarely as it exceeds ``ABOVE_NOISE`` times that of longer blocks."""
SHORT_RISE = 0.1
"""The last rise of short blocks must also exceed this share of the margin, because noise may hide the chaos of eager runs."""
ABOVE_SPREAD = 2.0
"""The last rise must exceed the median distance between a size and its block's level by this factor."""
SURE = 3.0
"""The last rise of a long block, or the rise of a run's line, must exceed this many standard errors. The factor is high because
many runs are tested and eager noise measures the error only roughly."""
CHAOTIC = 2.0
"""Eager differences grow if their mean in the last block exceeds this multiple of their mean in the window's first third."""
LEAST = 8
"""The least number of last steps that can show growth of eager differences. The mean of four can be that large by chance."""
ABOVE_CHAOS = 30.0
"""If eager differences grow, the last rise must exceed the largest of them in the last block by this factor."""


@dataclass(frozen=True)
class Growth:
    """Growth of a difference, or of its size, over the last ``steps`` steps, in the graphed run of index ``run``."""

    run: int
    steps: int
    before: float
    after: float


def late_growth(graphed: Floats, eager: Floats, margin: float) -> Growth | None:
    """Return the growth of a graphed difference if it would leave ``margin`` in as many further steps, else None.

    ``graphed`` has the differences from the mean of the eager runs, shape (graphed runs, steps). ``eager`` has the differences
    of each eager run from the others, shape (eager runs, steps). All must be finite.
    """
    sizes = np.abs(graphed)
    found = (_growth(sizes, eager, length, stride, margin) for length, stride in _blocks(sizes.shape[1]))
    return next(filter(None, found), None)


def _blocks(steps: int) -> Iterator[tuple[int, int]]:
    """Yield the block lengths, the longest first, each with the distance in steps between the beginnings of two blocks."""
    quarter = steps // (LONGEST * QUARTERS)
    while quarter:
        yield QUARTERS * quarter, quarter
        quarter //= 2
    yield from ((2, 1), (1, 1))


def _growth(sizes: Floats, eager: Floats, length: int, stride: int, margin: float) -> Growth | None:
    """Return the growth in the last block of ``length`` steps, or None."""
    levels, rises = _levels(sizes, length, stride)
    last, earlier = rises[:, -1], rises[:, : -(length // stride)].max().clip(LEAST_RISE * margin)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = last / earlier
        # A level stands for the middle of its block.
        later = factor ** (sizes.shape[1] / length + 0.5)
        leaves = ~(levels[:, -1] + last * factor * (later - 1) / (factor - 1) <= margin)
    grows = leaves & (last > 0) & (factor > ACCELERATION)
    if grows.any():
        # This takes far longer than the code above.
        grows &= last > _explained(eager, length, stride, margin)
        grows &= last > ABOVE_SPREAD * _spread(sizes, length)
    if not grows.any():
        return None
    run = int(np.argmax(np.where(grows, last, 0.0)))
    return Growth(run, length, float(levels[run, -1] - last[run]), float(levels[run, -1]))


def _levels(sizes: Floats, length: int, stride: int) -> tuple[Floats, Floats]:
    """Return the median of each block, and its rise above the block that ends where it begins.

    Both have shape (runs, blocks), but the first blocks have no rise. The last block ends with the window.
    """
    levels = medians(sizes[:, _places(sizes.shape[1], length, stride)])
    apart = length // stride
    return levels, levels[:, apart:] - levels[:, :-apart]


@lru_cache(maxsize=64)
def _places(steps: int, length: int, stride: int) -> Integers:
    """Return the steps of each block, shape (blocks, length)."""
    return np.arange((steps - length) % stride, steps - length + 1, stride)[:, None] + np.arange(length)


def _spread(sizes: Floats, length: int) -> Floats:
    """Return the median distance between a size and its block's level, the larger of the last two blocks', shape (runs,).

    It is 0 for short blocks.
    """
    blocks = sizes[:, -2 * length :].reshape(-1, 2, length)
    distances = medians(np.abs(blocks - medians(blocks)[..., None]))
    largest: Floats = distances.max(axis=1) * (length > SHORT)
    return largest


def _explained(eager: Floats, length: int, stride: int, margin: float) -> float:
    """Return the largest rise of a block that eager differences explain."""
    noise = np.abs(eager)
    rises = np.abs(_levels(noise, length, stride)[1]).max(axis=0)
    if length <= SHORT:
        chaos = rises[-1] >= rises.max()
        return (ABOVE_CHAOS if chaos else ACCELERATION) * float(rises.max()) + SHORT_RISE * margin
    # Noise that changes slowly has few independent blocks, whose rises may be small by chance.
    rise = np.repeat([0.0, -1 / length, 1 / length], [eager.shape[1] - 2 * length, length, length])
    error = max(along_steps(one, rise).size for one in eager)
    return max(explained_by_chaos(noise, length), ABOVE_NOISE * float(rises.max()), SURE * error)


def explained_by_chaos(noise: Floats, length: int) -> float:
    """Return the largest rise over the last ``length`` steps that growing eager differences explain; 0 if they do not grow.

    ``noise`` has the sizes of eager differences, shape (eager runs, steps).
    """
    first, last = noise[:, : noise.shape[1] // LONGEST], noise[:, -max(length, LEAST) :]
    return ABOVE_CHAOS * float(last.max()) if last.mean() > CHAOTIC * first.mean() else 0.0
