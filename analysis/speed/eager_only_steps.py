"""Steps that are long in every eager run of a cell, and in no graphed one.

An evaluation, a checkpoint or a log that only eager runs make there looks like a gain of graphs. Noise seldom makes the same steps
long in all runs of a side. Steps that are long in graphed runs alone may be an effect of graphs, so they always count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from analysis.records.steps import Booleans, Floats, Integers
from analysis.speed.steady_window import Window
from analysis.statistics.median import medians

AS_LONG = 2.0
"""How many times as much time as graphed runs an eager run must lose in such a step."""
MOST_OF_IT = 0.5
"""The share of the time that an eager run loses in long steps of any kind. Such steps must have at least this share."""


def eager_only_steps(windows: Sequence[Window]) -> Integers:
    """Return the numbers of the steps that are long in all eager runs alone. One pair does not show them."""
    shared = reduce(np.intersect1d, [window.steps for window in windows], windows[0].steps)
    at = [np.searchsorted(window.steps, shared) for window in windows]
    eager = np.stack([_lost(w.eager_ms, w.eager_off)[places] for w, places in zip(windows, at, strict=True)])
    graphed = np.stack([_lost(w.graphed_ms, w.graphed_off)[places] for w, places in zip(windows, at, strict=True)])
    alone = eager.min(axis=0) > AS_LONG * graphed.max(axis=0)
    by_noise = (eager[:, alone].sum(axis=1) < MOST_OF_IT * eager.sum(axis=1)).any()
    return shared[:0] if by_noise or len(windows) < 2 else shared[alone]


def _lost(times: Floats, off: Booleans) -> Floats:
    """Return the milliseconds that each step takes beyond the median, if it is ``off`` and longer, else 0."""
    lost: Floats = np.where(off, np.maximum(times - float(medians(times)), 0.0), 0.0)
    return lost
