"""Rounding that training amplifies: it begins small and grows smoothly. A wrong input or update is far larger at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from analysis.records.steps import Floats, Steps
from analysis.verdict.completeness import Curves
from analysis.verdict.rounding import Units

FEW_ROUNDINGS = 2.0**-20
"""The relative difference that a few operations in float32 explain: eight times the largest error of one."""
AMPLIFIED = 100.0
"""One step of training makes rounding larger by less than this factor."""


def may_be_amplified_rounding(eager: Steps, graphed: Curves, units: Mapping[str, Units], first: int) -> bool:
    """Return whether ``graphed`` runs first differ from ``eager`` by rounding, and no step makes that far larger at once.

    ``first`` is the index of the first compared step. Differences are relative to the largest number of the window. ``units`` has
    those of each graphed run.
    """
    return not any(_jumps(eager.take(slice(first, None)), run, units[name], first) for name, run in graphed.items())


def _jumps(eager: Steps, run: Steps, units: Units, first: int) -> bool:
    sizes = {metric: np.abs(eager.of(metric)).max() or 1.0 for metric in units}
    off = {metric: np.abs(run.of(metric)[first:] - eager.of(metric)) / size for metric, size in sizes.items()}
    # Digits do not show a difference of two units or less. It may have grown for long, and may double now.
    hidden = {metric: 2 * units[metric][first:] / size for metric, size in sizes.items()}
    seen: Floats = np.max([np.where(off[metric] > hidden[metric], off[metric], 0.0) for metric in units], axis=0)
    before = np.append(0.0, np.maximum.accumulate(seen)[:-1])
    limits = (np.maximum(FEW_ROUNDINGS + 2 * hidden[metric], AMPLIFIED * before) for metric in units)
    return any((off[metric] > limit).any() for metric, limit in zip(units, limits, strict=True))
