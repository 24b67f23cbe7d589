"""Judge whether graphed runs compute what eager runs compute, by a ladder of pure rules over curves by step.

Rung 0 (analysis.verdict.completeness): both sides have every step once, in order and finite, else INCOMPARABLE. A number
    after the capture that is finite in all eager runs, but not in a graphed run, is DIVERGED. analysis.pairing.pair checks
    the settings of both runs and the proof of replay.
Rung 1: after the capture, every graphed run equals every eager run bit for bit: BITWISE. If eager runs differ among
    themselves, equality with one of them proves little, and the ladder goes on.
Rung 2, the noise floor: the largest difference of an eager run from the others. It never widens a margin. With fewer than
    two eager runs, or a noise floor above the margin, the verdict is INCONCLUSIVE at best.
Rung 3: every graphed run is within the margin of the eager mean at every step, because a mean over steps hides
    alternating signs and single bad steps. The mean over the window is within the margin by two one-sided tests
    (analysis.verdict.equivalence_test).
Rung 4 (analysis.verdict.drift): the line fitted to the differences will not leave the margin, and the last steps do not
    blow up.

EQUIVALENT passes all rungs over ``MINIMUM_STEPS`` steps or more. The eager runs must also train: their loss moves by more
than the margin, and their gradients are not all 0. DIVERGED needs proof (analysis.verdict.divergence). Everything
in between is INCONCLUSIVE.

Every condition fails on NaN. The minimum length comes from a known failure: Megatron-LM issue 5966 (TE graphs over
attention) leaves the eager curve at step 81 and is NaN at step 91, so a check over 50 steps passes it. docs/verdicts.md has
the error rates of these rules, by simulation.
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
    """Return the index after the last capture step, from the phase of each step; None without a capture."""
    captures = [place for place, phase in enumerate(phases) if phase == "capture"]
    return captures[-1] + 1 if captures else None


def judge_exact(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric] = METRICS
) -> Verdict | None:
    """Return the verdict of rungs 0 and 1, which need no repeats; None if they do not decide.

    The window starts at ``expected[first]``. ``expected`` has shape (steps,).
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
    """Judge all graphed runs of one configuration against all eager runs of its workload, by the whole ladder.

    The window starts at ``expected[first]``. ``expected`` has shape (steps,).
    """
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
    """Apply rungs 0 and 1: return their verdict, or the measured differences if they do not decide."""
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
    """Run the tests of rungs 3 and 4, if there is a noise floor and the window is long enough."""
    floor = found.evidence.noise_floor
    if floor is None or found.evidence.steps < MINIMUM_STEPS:
        return ()
    finite = [sample for sample in samples if _is_finite(sample)]
    return tuple(_test(sample, margins.of(sample.metric), floor) for sample in finite)


def _is_finite(sample: Sample) -> bool:
    """Return whether all differences are finite. With a gradient norm of 0 there is no relative difference."""
    return bool(np.isfinite(sample.eager).all() and np.isfinite(sample.graphed).all())


def _test(sample: Sample, margin: float, floor: NoiseFloor) -> MetricTests:
    mean, p = mean_within(sample, margin)
    rise = estimate_of(sample, rise_of_line(sample.graphed.shape[1]))
    late = blows_up(sample, margin, floor.of(sample.metric))
    return MetricTests(sample.metric, mean, p, rise, leaves=leaves_margin(mean, rise, margin), late=late)
