"""Rung 4: detect a drift, a difference that is still within its margin but will leave it.

A line is fitted to the differences. If it rises significantly, its extrapolation over as many steps again must stay within the
margin. This rule applies to the mean of the graphed runs and to each of them. A growing oscillation shows no drift in such a
line, so a line is fitted to the sizes of differences as well. It extrapolates the largest size at the end of the window. A late
onset is in too few steps to move a line; growth.py detects it.
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.along_steps import along_steps
from analysis.verdict.curve_difference import Estimate, Sample
from analysis.verdict.curve_tests.growth import (
    ABOVE_CHAOS,
    ABOVE_NOISE,
    ACCELERATION,
    LONGEST,
    SURE,
    Growth,
    explained_by_chaos,
)

PEAK = 2.0
"""The largest size at the end is capped at this multiple of the fitted line. It is 1.6 times the line in a sine, far more in a
burst."""
PARTS, PEAK_ABOVE_NOISE = 4, 10.0
"""The number of parts of a window in which peaks are sought. The last peak must exceed all eager differences by this factor:
chaos has peaks too."""


def rise_of_line(steps: int) -> Floats:
    """Return weights, shape (steps,), whose dot product with a series is the rise of its least-squares line.

    The rise is from the first step to the last.
    """
    place = np.arange(steps) - (steps - 1) / 2
    weights: Floats = place * (steps - 1) / (place @ place)
    return weights


def leaves_margin(mean: Estimate, rise: Estimate, margin: float) -> bool:
    """Return whether ``rise`` is significant and its line would leave ``margin`` within as many steps again.

    The line is half its rise above the mean at the last step, and 1.5 times its rise above the mean as many steps later.
    """
    return abs(rise.value) > rise.half_width and not abs(mean.value + 1.5 * rise.value) <= margin


def drift_of_run(sample: Sample, margin: float) -> Growth | None:
    """Return the drift of a graphed run, or of the size of its differences, that will leave ``margin``; None without one.

    The sample needs two or more eager runs.
    """
    return _drift(sample, margin) or _drift(sample, margin, of_sizes=True) or _growth_of_peaks(sample, margin)


def _growth_of_peaks(sample: Sample, margin: float) -> Growth | None:
    """Return the growth of the largest sizes of each part of the window, which few steps may have; None without one.

    They grow from part to part, to twice the first and far beyond what eager runs differ by, and would leave ``margin``.
    """
    parts = np.array_split(np.abs(sample.graphed), PARTS, axis=1)
    peaks = np.stack([part.max(axis=1) for part in parts])
    first, last, rises = peaks[0], peaks[-1], np.diff(peaks, axis=0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = rises[-1] / rises[-2]
        geometric = np.where(factor > ACCELERATION, sum(factor**part for part in range(1, PARTS + 1)), 0.0)
        forecasts = last + np.fmax(PARTS * (last - first) / (PARTS - 1), rises[-1] * geometric)
    noise = [float(part.max()) for part in np.array_split(np.abs(sample.eager_distances), PARTS, axis=1)]
    least = max(noise) * (ABOVE_CHAOS if noise[-1] > 2 * max(noise[:2]) else PEAK_ABOVE_NOISE)
    grows = (rises > 0).all(axis=0) & (last >= 2 * first) & (last > least)
    for run in np.flatnonzero(grows & ~(forecasts <= margin)):
        return Growth(int(run), sample.graphed.shape[1], float(first[run]), float(last[run]))
    return None


def _drift(sample: Sample, margin: float, *, of_sizes: bool = False) -> Growth | None:
    """Return the first significant line through the differences of a run, or through their sizes, that leaves ``margin``."""
    runs, noise, steps = sample.graphed, sample.eager_distances, sample.graphed.shape[1]
    weights, chaos = rise_of_line(steps), explained_by_chaos(np.abs(noise), steps // LONGEST)
    least = max(chaos, ABOVE_NOISE * float(np.abs((np.abs(noise) if of_sizes else noise) @ weights).max()))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        runs = np.abs(runs) if of_sizes else runs
        means, rises = runs.mean(axis=1), runs @ weights
        ends, forecasts = means + rises / 2, means + 1.5 * rises
        if of_sizes:
            peaks = np.minimum(runs[:, -(steps // LONGEST) :].max(axis=1), PEAK * ends)
            forecasts = np.where(rises > 0, peaks * (forecasts / ends), 0.0)
    for run in np.flatnonzero(~(np.abs(forecasts) <= margin) & (np.abs(rises) > least)):
        # The noise of a size is that of its difference, times the sign. In an oscillation, slow noise then averages out.
        signs = np.where(sample.graphed[run] < 0, -1.0, 1.0) if of_sizes else 1.0
        errors = [along_steps(runs[run], weights, white=True), *(along_steps(one * signs, weights) for one in noise)]
        if abs(rises[run]) > SURE * max(error.size for error in errors):
            return Growth(int(run), steps, float(ends[run] - rises[run]), float(ends[run]))
    return None
