"""Find the steps whose difference certainly exceeds its margin and is not noise.

Noise has rare spikes that the eager runs may not show, but two runs rarely have a spike at the same step. With several graphed
runs, a step counts if all of them exceed the margin there by ``SURE`` noise floors. One run alone must exceed it by
``SURE_ALONE`` noise floors, at many steps. If eager runs are bitwise equal, there is no noise, and a single step counts. A mean
difference counts if its confidence interval lies outside the margin. If the noise floor exceeds the margin (often because of
spikes), every graphed run must exceed the margin at many steps.

With margins of 0, any bit exceeds the margin. A kernel that is not deterministic may then change few runs, and eager runs agree by
luck (:func:`is_certain_to_the_bit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Booleans
from analysis.verdict.curve_difference import Estimate, Sample
from launch.contract.plan import Margins

SURE, SURE_ALONE = 3.0, 10.0
"""A step farther above the margin than this many noise floors is not noise: in all of several graphed runs, and in one run."""
LASTING, SHARE = 20, 10
"""The steps at which a run must exceed the margin; if the noise floor exceeds the margin, also at least one step in
``SHARE``."""


def exceeds_margin_surely(sample: Sample, margin: float, floor: float, mean: Estimate | None) -> Booleans:
    """Return which steps certainly exceed ``margin``, shape (steps,). ``mean`` is the mean difference, if it was tested.

    If only the mean certainly exceeds the margin, return all steps that exceed it by any amount.
    """
    size = np.abs(sample.graphed)
    alone: Booleans = size > margin + SURE_ALONE * floor
    surely: Booleans = size > margin + SURE * floor if len(size) > 1 else alone
    if not floor <= margin:
        many = surely.sum(axis=1) >= max(LASTING, surely.shape[1] // SHARE)
        return np.asarray(surely.any(axis=0) & many.all())
    lasting = alone.sum(axis=1) >= (LASTING if floor > 0 else 1)
    steps = np.asarray(alone[lasting].any(axis=0) | (surely.all(axis=0) & (len(size) > 1)))
    if not steps.any() and mean is not None and abs(mean.value) - mean.half_width > margin:
        return np.asarray(sample.largest > margin)
    return steps


def is_certain_to_the_bit(samples: Sequence[Sample], starts: Sequence[int], *, repeatable: bool) -> bool:
    """Return whether differences beyond margins of 0 come from graphs, and not from a kernel that is not deterministic.

    ``starts`` is the first step, in the window, at which each graphed run differs from every eager run. Such a kernel changes runs
    at any step, by rounding, and only some of them. A wrong graph is wrong in every run: at its first replay, by more than
    rounding, or from the same step on if runs of each side are ``repeatable`` to the bit.
    """
    if any(start == samples[0].graphed.shape[1] for start in starts):
        return False
    several = len(starts) > 1
    return repeatable or all(
        (several and start == 0) or any(_exceeds_rounding(sample, run, start) for sample in samples)
        for run, start in enumerate(starts)
    )


def _exceeds_rounding(sample: Sample, run: int, start: int) -> bool:
    """Return whether graphed ``run`` is farther from every eager run than the usual margin at its first step that differs."""
    with np.errstate(invalid="ignore"):
        nearest = float(np.abs(sample.graphed[run, start] - sample.eager[:, start]).min())
    return not nearest <= Margins().of(sample.metric)
