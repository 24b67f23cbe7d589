"""Do graphed runs compute what eager ones compute? A ladder of rules over curves, keyed by step, pure.

Rung 0, analysis.verdict.completeness: every step is there, once, in order and finite, on both sides, else INCOMPARABLE.
A number after the capture that all eager runs have finite and a graphed one has not is DIVERGED. (What runs have to
share beside their steps, and that what was captured ran, is analysis.pairing.pair's to say.)
Rung 1: every graphed run equals every eager one to the bit after the capture: BITWISE. Where eager runs differ among each
other, equality with one of them shows little, and the ladder goes on.
Rung 2, the floor: how far an eager run is from the others at most. It never widens a margin. Without two of them, or
with a floor beyond the margin, a verdict is INCONCLUSIVE at best.
Rung 3: every graphed run is within the margin of the mean of the eager runs at every step, since a mean hides alternating
signs and single bad steps, and the mean over the window is shown to be within it by two one-sided tests
(analysis.verdict.equivalence_test).
Rung 4, analysis.verdict.drift: the line fitted to the differences is not on its way out of the margin, and the last
steps do not blow up.
EQUIVALENT is what passes all of them over ``MINIMUM_STEPS`` steps or more, where eager trained: its loss moved by more than
the margin, and it had gradients.

DIVERGED has to be shown (analysis.verdict.divergence). What is neither shown to be within nor beyond is INCONCLUSIVE.

Every gate is written so that NaN fails it. The length comes from a known failure: Megatron-LM issue 5966 (TE graphs over
attention) leaves the eager curve at step 81 and is NaN at 91, so that a check over 50 steps passes it. docs/verdicts.md
has how often the rules err, by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.records.steps import Integers, Metric
from analysis.verdict.completeness import Curves, check_complete
from analysis.verdict.curve_difference import METRICS, Differences, MetricTests, NoiseFloor, Sample, measure_differences
from analysis.verdict.drift import blows_up, leaves_margin, rise_of_line
from analysis.verdict.equivalence_test import estimate_of, mean_within
from analysis.verdict.rungs import (
    MINIMUM_STEPS,
    SMALLER,
    ComparisonWindow,
    describe_untrained,
    diverged,
    exceeds_margin,
    loss_unchanged,
    missing_floor,
    not_equivalent,
    too_short,
)
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins


def first_compared(phases: Sequence[str]) -> int | None:
    """The place after the last capture of a graphed run with these ``phases``, by step; None where it has none."""
    captures = [place for place, phase in enumerate(phases) if phase == "capture"]
    return captures[-1] + 1 if captures else None


def judge_exact(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric] = METRICS
) -> Verdict | None:
    """The verdict of rungs 0 and 1, which need no repeats; None where they leave it open.

    The window is from the ``first``-th of the ``expected`` steps on.
    """
    found = _begin(eager, graphed, expected, first, metrics)
    return found if isinstance(found, Verdict) else None


def judge_curves(
    eager: Curves,
    graphed: Curves,
    expected: Integers,
    first: int,
    margins: Margins,
    metrics: Sequence[Metric] = METRICS,
) -> Verdict:
    """The verdict on all graphed runs of one configuration against all eager ones of its workload, the whole ladder."""
    found = _begin(eager, graphed, expected, first, metrics)
    if isinstance(found, Verdict):
        return found
    samples = tuple(found.samples[metric] for metric in metrics)
    evidence = replace(found.evidence, tested=_tested(found, samples, margins))
    window = ComparisonWindow(eager, graphed, expected, first, margins, samples, evidence)
    return (
        diverged(window)
        or missing_floor(window)
        or exceeds_margin(window)
        or too_short(window)
        or not_equivalent(window)
        or loss_unchanged(window)
        or Verdict("EQUIVALENT", evidence=evidence)
    )


def _begin(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric]
) -> Verdict | Differences:
    """Rungs 0 and 1, and what was measured where they leave the verdict open."""
    before, after = tuple(eager.values()), tuple(graphed.values())
    fault = check_complete(eager, graphed, expected, first, metrics)
    if fault and fault.deviation:
        shared = slice(first, min(len(steps) for steps in (*before, *after)))
        evidence = measure_differences(before, after, shared, metrics).evidence
        return Verdict("DIVERGED", fault.reason, SMALLER, evidence, fault.deviation)
    if fault:
        return Verdict("INCOMPARABLE", fault.reason, fault.fix)
    found = measure_differences(before, after, slice(first, None), metrics)
    if not found.evidence.bitwise:
        return found
    still = describe_untrained(before, first, metrics, 0.0)
    return Verdict("BITWISE", f"{still}, so equality shows little" if still else "", evidence=found.evidence)


def _tested(found: Differences, samples: Sequence[Sample], margins: Margins) -> tuple[MetricTests, ...]:
    """What rungs 3 and 4 test, where there is a floor and the window is long enough for them."""
    floor = found.evidence.noise_floor
    if floor is None or found.evidence.steps < MINIMUM_STEPS:
        return ()
    finite = [sample for sample in samples if _is_finite(sample)]
    return tuple(_test(sample, margins.of(sample.metric), floor) for sample in finite)


def _is_finite(sample: Sample) -> bool:
    """A gradient norm of 0 leaves no relative difference to average."""
    return bool(np.isfinite(sample.eager).all() and np.isfinite(sample.graphed).all())


def _test(sample: Sample, margin: float, floor: NoiseFloor) -> MetricTests:
    mean, p = mean_within(sample, margin)
    rise = estimate_of(sample, rise_of_line(sample.graphed.shape[1]))
    late = blows_up(sample, margin, floor.of(sample.metric))
    return MetricTests(sample.metric, mean, p, rise, leaves=leaves_margin(mean, rise, margin), late=late)
