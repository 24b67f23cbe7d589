"""When a difference is shown to be beyond its margin, and is no noise. What is merely likely is not shown.

Noise has spikes that two eager runs need not have had, but no two runs have them at the same step: a step counts where it
is beyond the margin by some floors in every graphed run, or by many in one. A mean counts where its interval lies beyond.
A floor that is itself beyond the margin is often made of spikes; no single step proves anything then, and many in every
graphed run do.
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Booleans
from analysis.verdict.curve_difference import Estimate, Sample

SURE, SURE_ALONE = 3.0, 10.0
"""How many floors beyond the margin a step is no noise in every graphed run (two at least), and in one alone."""
LASTING = 10
"""Where the floor is beyond the margin, one in so many steps has to be beyond, and so many at least."""


def exceeds_margin_surely(sample: Sample, margin: float, floor: float, mean: Estimate | None) -> Booleans:
    """The steps that are shown to be beyond ``margin``: shape (steps,). ``mean`` is the mean difference, where there is one.

    A mean that is shown to be beyond gives the steps that are, however little.
    """
    size = np.abs(sample.graphed)
    alone: Booleans = size > margin + SURE_ALONE * floor
    surely: Booleans = size > margin + SURE * floor if len(size) > 1 else alone
    if not floor <= margin:
        many = surely.sum(axis=1) >= max(LASTING, surely.shape[1] // LASTING)
        return np.asarray(surely.any(axis=0) & many.all())
    shown = np.asarray(surely.all(axis=0) | alone.any(axis=0))
    if not shown.any() and mean is not None and abs(mean.value) - mean.half_width > margin:
        return np.asarray(sample.largest > margin)
    return shown
