"""Judge whether graphed runs compute what eager runs compute, by a ladder of pure rules over curves by step.

Rung 0 (analysis.verdict.completeness): both sides have every step once, in order and finite, else INCOMPARABLE. A number
    after the capture that is finite in all eager runs, but not in a graphed run, is DIVERGED. analysis.pairing.pair checks
    the settings of both runs and the proof of replay.
Rung 1: the verdict is BITWISE if every graphed run equals every eager run bit for bit after the capture. If eager runs differ
    among themselves, equality with one of them proves little, and the ladder goes on.
Rung 2 is the noise floor: the largest difference between an eager or perturbed run and the other eager runs. It never widens a
    margin. With fewer than two eager runs, or a noise floor above the margin, the verdict is INCONCLUSIVE at best.
Rung 3: every graphed run must be within the margin of the eager mean at every step, because a mean over steps hides
    alternating signs and single bad steps. Two one-sided tests must show that the mean over the window is within the margin
    (curve_tests.equivalence_test). Noise must not be able to hide a difference of 1.25 margins at a step (curve_tests.step_test).
Rung 4: no line fitted to the differences or to their sizes may leave the margin (curve_tests.drift). No difference may
    grow so much at the end of the window that it will leave the margin (curve_tests.growth).

EQUIVALENT passes all rungs over ``MINIMUM_STEPS`` steps or more. The eager runs must also train: their loss must move by more
than the margin, and their gradients must not all be 0. Either digests of parameters must show that parameters change, or the
loss must fall by more than the margin beyond the variation between batches, which may depend on each other. DIVERGED needs
proof (curve_tests.divergence). Everything in between is INCONCLUSIVE.

Every condition fails on NaN. The minimum length comes from a known failure. In Megatron-LM issue 5966 (TE graphs over
attention), the graphed loss leaves the eager curve at step 81 and is NaN at step 91, so a check over 50 steps would pass.
docs/verdicts.md has the error rates of these rules, by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analysis.records.steps import Integers, Steps
from analysis.verdict.completeness import Curves, check_complete
from analysis.verdict.curve_difference import Sample, sample_of
from analysis.verdict.curve_evidence import Differences, MetricTests, measure_differences
from analysis.verdict.curve_tests.drift import drift_of_run, leaves_margin, rise_of_line
from analysis.verdict.curve_tests.equivalence_test import estimate_of, mean_within
from analysis.verdict.curve_tests.growth import late_growth
from analysis.verdict.learning import describe_untrained
from analysis.verdict.rungs import (
    SMALLER,
    ComparisonWindow,
    diverged,
    exceeds_margin,
    hides_difference,
    loss_unchanged,
    missing_floor,
    name_other_causes,
    not_equivalent,
    too_short,
)
from analysis.verdict.verdict import Verdict
from launch.contract.plan import MINIMUM_STEPS, Margins
from launch.contract.records.step_metrics import METRICS, Metric

_SINGLE = "shown by a single graphed run, and its repeats may differ more"


def first_compared(phases: NDArray[np.str_]) -> int | None:
    """Return the index after the last capture step, from the phase of each step; None without a capture."""
    captures = np.flatnonzero(phases == "capture")
    return int(captures[-1]) + 1 if len(captures) else None


def judge_exact(eager: Curves, graphed: Curves, expected: Integers, first: int) -> Verdict | None:
    """Return the verdict of rungs 0 and 1, which need no repeats; None if they do not decide.

    The window starts at ``expected[first]``. ``expected`` has shape (steps,).
    """
    found = _begin(eager, graphed, expected, first, METRICS)
    return found if isinstance(found, Verdict) else None


def judge_curves(
    eager: Curves,
    graphed: Curves,
    expected: Integers,
    first: int,
    margins: Margins,
    metrics: Sequence[Metric] = METRICS,
    perturbed: Steps | None = None,
    *,
    learnt: bool = False,
    looks: int = 1,
    unrepeatable: str = "",
) -> Verdict:
    """Judge all graphed runs of one configuration against all eager runs of its workload, by the whole ladder.

    A complete ``perturbed`` eager run shows how far harmless differences grow, and counts for the noise floor.
    The window starts at ``expected[first]``. ``expected`` has shape (steps,). ``learnt`` is whether all runs are known to
    change their parameters. Otherwise the eager loss must show it. ``looks`` looks, at growing numbers of runs, share the
    error. ``unrepeatable`` is what other records than curves say against repeatable runs.
    """
    found = _begin(eager, graphed, expected, first, metrics, perturbed)
    if isinstance(found, Verdict):
        return found
    different = _different(graphed, first, metrics) if any(margins.of(metric) > 0 for metric in metrics) else graphed
    samples = tuple(
        sample_of(metric, tuple(eager.values()), tuple(different.values()), slice(first, None), perturbed)
        for metric in metrics
    )
    evidence = replace(found.evidence, tested=_tested(found, samples, margins, looks))
    window = ComparisonWindow(
        eager, graphed, tuple(different), expected, first, margins, samples, evidence, learnt, looks, unrepeatable
    )
    verdict = (
        diverged(window)
        or missing_floor(window)
        or exceeds_margin(window)
        or too_short(window)
        or not_equivalent(window)
        or hides_difference(window)
        or loss_unchanged(window)
        or Verdict("EQUIVALENT", _SINGLE if len(graphed) == 1 else "", evidence=evidence)
    )
    return name_other_causes(window, verdict) if verdict.noisy else verdict


def _different(runs: Curves, first: int, metrics: Sequence[Metric]) -> Curves:
    """Return the first of each set of ``runs`` that are equal bit for bit from index ``first`` on.

    Equal runs have the same noise, so they show a difference as often as one run does.
    """
    found: dict[bytes, str] = {}
    for name, steps in runs.items():
        found.setdefault(b"".join(steps.of(metric)[first:].tobytes() for metric in metrics), name)
    return {name: runs[name] for name in found.values()}


def _begin(
    eager: Curves,
    graphed: Curves,
    expected: Integers,
    first: int,
    metrics: Sequence[Metric],
    perturbed: Steps | None = None,
) -> Verdict | Differences:
    """Apply rungs 0 and 1: return their verdict, or the measured differences if they do not decide."""
    before, after = tuple(eager.values()), tuple(graphed.values())
    fault = check_complete(eager, graphed, expected, first, metrics)
    if fault and fault.deviation:
        shared = slice(first, min(len(steps) for steps in (*before, *after)))
        evidence = measure_differences(before, after, shared, metrics).evidence
        return replace(fault, fix=SMALLER, evidence=evidence)
    if fault:
        return fault
    found = measure_differences(before, after, slice(first, None), metrics, perturbed)
    if not found.evidence.bitwise:
        return found
    still = describe_untrained(before, first, metrics, 0.0)
    return Verdict("BITWISE", f"{still}, so equality shows little" if still else "", evidence=found.evidence)


def _tested(found: Differences, samples: Sequence[Sample], margins: Margins, looks: int) -> tuple[MetricTests, ...]:
    """Run the tests of rungs 3 and 4, if there are two eager repeats and the window is long enough."""
    if found.evidence.eager_runs < 2 or found.evidence.steps < MINIMUM_STEPS:
        return ()
    return tuple(_test(sample, margins.of(sample.metric), looks) for sample in samples if sample.is_finite)


def _test(sample: Sample, margin: float, looks: int) -> MetricTests:
    mean, p = mean_within(sample, margin, looks)
    rise = estimate_of(sample, rise_of_line(sample.graphed.shape[1]))
    growth = late_growth(sample.graphed, sample.eager_distances, margin) or drift_of_run(sample, margin)
    return MetricTests(sample.metric, mean, p, rise, leaves_margin(mean, rise, margin), growth)
