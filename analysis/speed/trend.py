"""Judge whether a speed-up is steady within the windows of its pairs, and bound what it may become.

A run may begin in a state that it leaves slowly, such as cold caches, or change its state suddenly, such as its clocks. If one
side of every pair does this, all ratios are wrong in the same way, and no interval over pairs shows it. The steps show it.

A window is cut into blocks. A straight line, one change of level, or a stretch of blocks with another level may stand out from the
noise, in all pairs together. Such a stretch may also do so in one pair. If nothing stands out, the speed-up is steady. Otherwise the
speed-up may be that of the stretches, that of the other blocks, or an extrapolation of a straight line. Each of these has its own
uncertainty. Of two lines, the one with the narrower interval counts: through the second half, because most transients slow down, or
through all blocks, where noise hides the slope of a half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.student_t import quantile

BLOCKS = 20
"""Parts of a window. A block's mean averages out the noise that neighbouring steps share."""
HORIZON = 3
"""The number of windows ahead for which a verdict must hold."""
MISTAKEN = 0.13
"""The probability that noise looks like a change. The line, one change, the stretches of all pairs and those of one pair have
equal shares."""
ALPHA = 0.05
"""The probability that a level or an extrapolated ratio is outside its interval."""


def _unit(shapes: Floats) -> Floats:
    """Return ``shapes``, shape (shapes, blocks), moved to mean 0 and scaled to length 1."""
    centred = shapes - shapes.mean(axis=1, keepdims=True)
    unit: Floats = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    return unit


STRETCHES = _unit(
    np.array(
        [
            [first <= block < last for block in range(BLOCKS)]
            for first, last in itertools.combinations(range(BLOCKS), 2)
        ],
        float,
    )
)
"""Consecutive blocks, shape (stretches, blocks). No stretch ends with the last block, because the other blocks then form one."""
CHANGES = _unit(np.tri(BLOCKS - 1, BLOCKS))
"""One change of level after any block, shape (changes, blocks). They are stretches too, but few, so that a smaller one stands
out."""
LINE = _unit(np.arange(BLOCKS, dtype=float)[None])
"""A straight line through all blocks, shape (1, blocks)."""
HALF_LINE = _unit(np.arange(BLOCKS // 2, dtype=float)[None])
"""A straight line through half the blocks."""

Interval = tuple[float, float]
Profile = tuple[float, ...]
"""For each block of a window, the logarithm of eager over graphed step times, minus that of the whole window."""
FLAT: Profile = (0.0,) * BLOCKS


def profile_of(eager_ms: Floats, graphed_ms: Floats) -> Profile:
    """Return the profile of a window. Both arrays have shape (steps,). With fewer steps than blocks the profile is flat."""
    if len(eager_ms) < BLOCKS:
        return FLAT
    ratios = _block_means(eager_ms) / _block_means(graphed_ms)
    whole = math.log(eager_ms.mean() / graphed_ms.mean())
    return tuple(math.log(ratio) - whole for ratio in ratios.tolist())


def _block_means(times: Floats) -> Floats:
    """Return the mean of each block, shape (blocks,). The first blocks are one step longer where the steps do not divide."""
    size, longer = divmod(len(times), BLOCKS)
    cut = longer * (size + 1)
    parts = times[:cut].reshape(longer, size + 1), times[cut:].reshape(-1, size)
    means: Floats = np.concatenate([part.sum(axis=1) / part.shape[1] for part in parts])
    return means


def later_ratios(profiles: Sequence[Profile]) -> Interval:
    """Return bounds on the factor by which a cell's ratio may change: 1 and 1 if noise explains its pairs' ``profiles``."""
    blocks = np.array(profiles)
    if not any(_stands_out(each, STRETCHES, len(blocks)) for each in blocks[:, None]) and not (
        any(_stands_out(blocks, shapes) for shapes in (STRETCHES, CHANGES, LINE))
    ):
        return 1.0, 1.0
    logs = [*_levels(blocks).flat, *_ahead(blocks)]
    return math.exp(min(logs)), math.exp(max(logs))


def _stands_out(blocks: Floats, shapes: Floats, looks: int = 1) -> bool:
    """Return whether one of ``shapes`` stands out in ``blocks``, shape (pairs, blocks). This is one of ``looks`` such tests."""
    size, left, degrees = _fit(blocks, shapes)
    found = np.abs(size.mean(axis=0)) * math.sqrt(len(blocks))
    return bool((found > quantile(1 - MISTAKEN / 8 / len(shapes) / looks, degrees) * left).any())


def _fit(blocks: Floats, shapes: Floats) -> tuple[Floats, Floats, int]:
    """Fit ``shapes`` of :func:`_unit` to ``blocks``: return sizes, residual standard deviations, and degrees of freedom.

    Sizes have shape (pairs, shapes). Deviations have shape (shapes,).
    """
    size: Floats = blocks @ shapes.T
    degrees = blocks.size - 2 * len(blocks)
    whole = float(((blocks - blocks.mean(axis=1, keepdims=True)) ** 2).sum())
    left: Floats = np.sqrt(np.maximum(whole - (size**2).sum(axis=0), 0) / degrees)
    return size, left, degrees


def _levels(blocks: Floats) -> Floats:
    """Return the lower and the higher level, inside and outside a stretch, twice: shape (2, 2).

    First, of the stretch that differs most in all pairs together. Second, the mean over pairs of the levels by each pair's own
    stretch. All are as uncertain as those of one pair, because all pairs may deviate from their stretch in the same way.
    """
    return np.array([_levels_of(blocks), np.mean([_levels_of(each) for each in blocks[:, None]], axis=0)])


def _levels_of(blocks: Floats) -> Interval:
    size, left, degrees = _fit(blocks, STRETCHES)
    best = int(np.argmax(np.abs(size.mean(axis=0))))
    inside = STRETCHES[best] > 0
    sides = blocks[:, inside], blocks[:, ~inside]
    half = quantile(1 - ALPHA / 2, degrees) * left[best] / math.sqrt(min(side.shape[1] for side in sides))
    low, high = sorted(float(side.mean()) for side in sides)
    return low - half, high + half


def _ahead(blocks: Floats) -> Interval:
    """Return the interval of the log ratio ``HORIZON`` windows later, by the line that determines it better."""
    lines = _extrapolate(blocks, LINE), _extrapolate(blocks[:, BLOCKS // 2 :], HALF_LINE)
    return min(lines, key=lambda found: found[1] - found[0])


def _extrapolate(blocks: Floats, line: Floats) -> Interval:
    """Return the interval of the log ratio ``HORIZON`` windows after the last of ``blocks``, by a ``line`` through all pairs."""
    count = blocks.shape[1]
    size, left, degrees = _fit(blocks, line)
    reach = (HORIZON * BLOCKS + count / 2) / math.sqrt((count**3 - count) / 12)
    half = quantile(1 - ALPHA / 2, degrees) * float(left[0]) * math.sqrt((1 / count + reach**2) / len(blocks))
    ahead = float(blocks.mean() + reach * size.mean())
    return ahead - half, ahead + half
