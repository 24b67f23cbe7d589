"""Whether a speed-up is steady within the windows of its pairs, and what it may become.

A run may begin in a state that it leaves slowly, such as cold caches, or change its state at once, such as its clocks. If one side
of every pair does so, every ratio is off alike, and no interval over pairs shows it. The steps themselves do.

A window is cut into blocks. Noise explains them, unless a straight line or another level in some stretch of blocks stands out from it,
in all pairs together or in one of them. Otherwise the speed-up may be that of the stretches, that of the other blocks, or what a
straight line through the second half leads to: most transients slow down. Each has its own uncertainty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.student_t import quantile

BLOCKS = 20
"""Parts of a window. Their means average out what neighbouring steps share."""
HORIZON = 3
"""How many windows ahead a verdict must hold."""
MISTAKEN = 0.1
"""The probability that noise looks like a change: equal shares for a line, the stretches of all pairs, and those of one."""
ALPHA = 0.05
"""The probability that a level, or what the ratio becomes, lies outside its interval."""
STRETCHES: Floats = np.array(
    [[first <= block < last for block in range(BLOCKS)] for first, last in itertools.combinations(range(BLOCKS), 2)],
    float,
)
"""Blocks in a row, shape (stretches, blocks). Those up to the last block are missing: the other blocks are such a stretch."""
LINE: Floats = np.arange(BLOCKS, dtype=float)[None]

Interval = tuple[float, float]
Profile = tuple[float, ...]
"""The logarithm of eager over graphed step times in each block of a window, less that of the whole window."""
FLAT: Profile = (0.0,) * BLOCKS


def profile_of(eager_ms: Floats, graphed_ms: Floats) -> Profile:
    """Return the profile of a window, both of shape (steps,). With fewer steps than blocks it is flat."""
    if len(eager_ms) < BLOCKS:
        return FLAT
    blocks = zip(np.array_split(eager_ms, BLOCKS), np.array_split(graphed_ms, BLOCKS), strict=True)
    whole = math.log(eager_ms.mean() / graphed_ms.mean())
    return tuple(math.log(eager.mean() / graphed.mean()) - whole for eager, graphed in blocks)


def later_ratios(profiles: Sequence[Profile]) -> Interval:
    """Return between which factors a cell's ratio may come to change: 1 and 1 if noise explains the ``profiles`` of its pairs."""
    blocks = np.array(profiles)
    if not any(_stands_out(each, STRETCHES, len(blocks)) for each in blocks[:, None]) and not (
        _stands_out(blocks, STRETCHES) or _stands_out(blocks, LINE)
    ):
        return 1.0, 1.0
    logs = [*_levels(blocks), *_ahead(blocks[:, BLOCKS // 2 :])]
    return math.exp(min(logs)), math.exp(max(logs))


def _stands_out(blocks: Floats, shapes: Floats, looks: int = 1) -> bool:
    """Return whether one of ``shapes`` is in the ``blocks`` of pairs, shape (pairs, blocks), as one of ``looks`` such tests."""
    size, left, degrees = _fit(blocks, shapes)
    found = np.abs(size.mean(axis=0)) * math.sqrt(len(blocks))
    return bool((found > quantile(1 - MISTAKEN / 6 / len(shapes) / looks, degrees) * left).any())


def _fit(blocks: Floats, shapes: Floats) -> tuple[Floats, Floats, int]:
    """Return the size of each of ``shapes`` in each pair, and the deviation of a block without it, with its degrees of freedom.

    Sizes have shape (pairs, shapes) and are those of shapes with mean 0 and length 1; deviations have shape (shapes,).
    """
    centred = shapes - shapes.mean(axis=1, keepdims=True)
    size: Floats = blocks @ (centred / np.linalg.norm(centred, axis=1, keepdims=True)).T
    degrees = blocks.size - 2 * len(blocks)
    whole = float(((blocks - blocks.mean(axis=1, keepdims=True)) ** 2).sum())
    left: Floats = np.sqrt(np.maximum(whole - (size**2).sum(axis=0), 0) / degrees)
    return size, left, degrees


def _levels(blocks: Floats) -> Interval:
    """Return the mean over pairs of the lower and of the higher level, in and outside of each pair's most different stretch.

    They are as uncertain as those of one pair: what a stretch does not describe may be alike in all pairs.
    """
    levels = np.array([_levels_of(each) for each in blocks[:, None]])
    return float(levels[:, 0].mean()), float(levels[:, 1].mean())


def _levels_of(blocks: Floats) -> Interval:
    size, left, degrees = _fit(blocks, STRETCHES)
    best = int(np.argmax(np.abs(size)))
    inside = STRETCHES[best].astype(bool)
    sides = blocks[0, inside], blocks[0, ~inside]
    half = quantile(1 - ALPHA / 2, degrees) * left[best] / math.sqrt(min(map(len, sides)))
    low, high = sorted(float(side.mean()) for side in sides)
    return low - half, high + half


def _ahead(late: Floats) -> Interval:
    """Return what the ratio may be ``HORIZON`` windows later, by a straight line through the ``late`` blocks of all pairs."""
    count = late.shape[1]
    size, left, degrees = _fit(late, LINE[:, :count])
    reach = (HORIZON * BLOCKS + count / 2) / math.sqrt((count**3 - count) / 12)
    half = quantile(1 - ALPHA / 2, degrees) * float(left[0]) * math.sqrt((1 / count + reach**2) / len(late))
    ahead = float(late.mean() + reach * size.mean())
    return ahead - half, ahead + half
