"""What a difference of rounded numbers proves. Digits that are left out hide small differences, and create others.

A number is off by less than its unit: by up to half of it if it was rounded, by up to all of it if it was cut off. So a true
difference is less than two units from that of the numbers. Numbers pass only if their differences are within the margin by two
units at every step. They are DIVERGED only by margins that are two units wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from analysis.records.steps import Floats
from analysis.verdict.completeness import Curves
from analysis.verdict.curve_difference import METRIC_NAMES, sample_of
from analysis.verdict.verdict import Verdict
from launch.contract.plan import MINIMUM_STEPS, Margins
from launch.contract.records.step_metrics import METRICS, Metric

_FINE, _QUANTILE = 0.2, 0.8
"""Two units are at most the first share of the margin at this share of the steps. Coarser numbers hide drift and noise."""

_MORE_DIGITS = "print nine digits (%.9g) of its value in float32, or log it to TensorBoard or W&B"

Units = Mapping[Metric, Floats]
"""The unit of each rounded number of a run, or 0 for a number with all its bits, shape (steps,)."""


def judge_rounded(
    judge: Callable[[Curves, Curves, Margins], Verdict],
    eager: Curves,
    graphed: Curves,
    units: Mapping[str, Units],
    first: int,
    margins: Margins,
) -> Verdict:
    """Return what ``judge`` finds on these curves, unless rounding may have caused it from index ``first`` on.

    ``units`` has those of each run by its name. A metric without units is not rounded.
    """
    verdict = judge(eager, graphed, margins)
    window = slice(first, min(len(steps) for steps in (*eager.values(), *graphed.values())))
    rounding = rounding_of(eager, units, window) if verdict.verdict != "INCOMPARABLE" else {}
    if not rounding:
        return verdict
    eager, graphed = _raise_norms(eager, units), _raise_norms(graphed, units)
    if verdict.verdict == "DIVERGED":
        surely = judge(eager, graphed, widen(margins, rounding))
        if surely.verdict == "DIVERGED":
            same = verdict.deviation and surely.deviation and verdict.deviation.step == surely.deviation.step
            return verdict if same else replace(surely, evidence=verdict.evidence)
    for metric, off in rounding.items():
        sample, margin = sample_of(metric, tuple(eager.values()), tuple(graphed.values()), window), margins.of(metric)
        fine = np.quantile(off, _QUANTILE, method="lower") <= _FINE * margin
        if fine and (sample.largest + off <= margin).all():
            continue
        if verdict.verdict != "INCONCLUSIVE" or not fine:
            at = first + int(np.argmax(sample.largest + off))
            name = max(units, key=lambda name: units[name][metric][at])
            reason = (
                f"the {METRIC_NAMES[metric]} is recorded in units of {units[name][metric][at]:.3g} ({name}, step "
                f"{next(iter(eager.values())).step[at]}), so rounding may hide or cause a difference beyond its margin of {margin:g}"
            )
            return Verdict("INCONCLUSIVE", reason, _MORE_DIGITS, verdict.evidence)
    return not_of_bits(verdict)


def rounding_of(eager: Curves, units: Mapping[str, Units], window: slice) -> dict[Metric, Floats]:
    """Return how far a difference may be off at each step of ``window``, for each metric with rounded numbers.

    Gradient norms are relative to eager, as their differences are.
    """
    found: dict[Metric, Floats] = {}
    for metric in METRICS:
        each = [of_run[metric][window] for of_run in units.values() if metric in of_run]
        if each and (off := 2 * np.max(each, axis=0)).any():
            norms = [steps.grad_norm[window] / len(eager) for steps in _raise_norms(eager, units).values()]
            with np.errstate(divide="ignore", invalid="ignore"):
                found[metric] = off if metric == "loss" else np.where(off > 0, off / np.sum(norms, axis=0), 0.0)
    return found


def _raise_norms(curves: Curves, units: Mapping[str, Units]) -> Curves:
    """Raise gradient norms to at least one unit. Relative to 0.000, a norm of 0.001 would be infinitely far off."""
    return {
        name: replace(steps, grad_norm=np.maximum(steps.grad_norm, units[name].get("grad_norm", 0.0)))
        for name, steps in curves.items()
    }


def widen(margins: Margins, rounding: Mapping[Metric, Floats]) -> Margins:
    """Return margins that a difference exceeds only if the true difference exceeds ``margins``."""
    loss, grad_norm = (margins.of(metric) + float(np.max(rounding.get(metric, 0.0), initial=0.0)) for metric in METRICS)
    return replace(margins, loss=loss, grad_norm=grad_norm)


def not_of_bits(verdict: Verdict) -> Verdict:
    """Return ``verdict``, or a weaker one instead of BITWISE, because the numbers may be rounded."""
    if verdict.verdict != "BITWISE":
        return verdict
    reason = "all printed digits are equal, but printed digits do not show equal bits"
    if verdict.evidence and verdict.evidence.steps >= MINIMUM_STEPS:
        return Verdict("EQUIVALENT", reason, evidence=verdict.evidence)
    return Verdict("INCONCLUSIVE", reason, "train for more steps", verdict.evidence)
