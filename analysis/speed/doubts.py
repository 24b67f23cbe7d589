"""Doubts about a speed-up: reasons why graphs may not cause it, or why it may not shorten training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from analysis.speed.pair_speed import PairSpeed
from analysis.speed.ratios import geometric_mean, ratios_of
from launch.common.grouped import grouped
from launch.common.text import numbered

LEAST_ON_THE_CLOCK = 0.5
"""The share of a gain (of the ratio's logarithm) that the host's clock must show at least."""
NOTICED = 0.05
"""The share of a speed-up by which the host's clock, or all steps, must show less, so that the report says it."""
LEAST_IN_OTHER_STEPS = 0.5
"""The share of a gain that steps must have that are not long in eager runs alone."""


def out_of_order(pairs: Sequence[PairSpeed]) -> str:
    """Return why the order of runs within pairs may explain a speed-up, or an empty text."""
    if len({pair.eager_began < pair.graphed_began for pair in pairs}) > 1:
        return ""
    return (
        f"the same side ran first in all {len(pairs)} timed pairs, so an advantage of running first or second looks like a "
        "speed-up; run the workload's cells again, with at least 2 repeats in an allocation"
    )


def not_alternating(pairs: Sequence[PairSpeed]) -> str:
    """Return why repeats of one allocation did not alternate, or an empty text."""
    spans = grouped((pair.allocation, sorted((pair.eager_began, pair.graphed_began))) for pair in pairs)
    for found in map(sorted, spans.values()):
        if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(found)):
            return (
                "another repeat began between the two runs of a pair, so a change of the machine in between looks like a "
                "speed-up; run the workload's cells again"
            )
    return ""


def not_on_the_clock(pairs: Sequence[PairSpeed]) -> str:
    """Return why the gain per step does not speed up training, or an empty text."""
    ratio, clock = _ratio_and_clock(pairs)
    return _describe_clock(ratio, clock) if math.log(clock) / math.log(ratio) < LEAST_ON_THE_CLOCK else ""


def describe_clock(pairs: Sequence[PairSpeed]) -> str:
    """Say what the host's clock leaves of a speed-up, or return an empty text if it shows hardly less."""
    ratio, clock = _ratio_and_clock(pairs)
    return _describe_clock(ratio, clock) if clock < ratio * (1 - NOTICED) else ""


def describe_outliers(pairs: Sequence[PairSpeed]) -> str:
    """Say what outliers leave of a speed-up, or return an empty text if they hardly change it."""
    ratio, moved = geometric_mean(ratios_of(pairs)), geometric_mean([pair.moved for pair in pairs])
    if moved >= 1 - NOTICED:
        return ""
    return f"the ratio is {ratio:.3f} without outliers, but {ratio * moved:.3f} over all measured steps; find what makes them long"


def _ratio_and_clock(pairs: Sequence[PairSpeed]) -> tuple[float, float]:
    ratio = geometric_mean(ratios_of(pairs))
    return ratio, ratio * geometric_mean([pair.clock for pair in pairs])


def _describe_clock(ratio: float, clock: float) -> str:
    return (
        f"the ratio is {ratio:.3f} by step times, but {clock:.3f} by the host's clock, which includes the time between steps; find "
        "what runs between steps"
    )


def describe_eager_only_steps(pairs: Sequence[PairSpeed], least: float = 0.0) -> str:
    """Say what steps that are long in eager runs alone contribute to a ratio, or return an empty text if it is less than ``least``."""
    steps, ratio, others = pairs[0].eager_only, geometric_mean(ratios_of(pairs)), _ratio_elsewhere(pairs)
    if not steps or others > ratio * (1 - least):
        return ""
    return (
        f"only eager runs take longer in {numbered('step', steps, 5)}, as for an evaluation or a checkpoint: without these steps "
        f"the ratio is {others:.3f}, not {ratio:.3f}; let both sides do the same in each step"
    )


def slow_in_eager_only(pairs: Sequence[PairSpeed]) -> str:
    """Return why graphs do not cause most of a gain, or an empty text."""
    share = math.log(_ratio_elsewhere(pairs)) / math.log(geometric_mean(ratios_of(pairs)))
    return describe_eager_only_steps(pairs) if share < LEAST_IN_OTHER_STEPS else ""


def _ratio_elsewhere(pairs: Sequence[PairSpeed]) -> float:
    """Return the ratio without the steps that are long in eager runs alone."""
    return geometric_mean(ratios_of(pairs)) * geometric_mean([pair.elsewhere for pair in pairs])
