"""The precision of recorded loss curves. Digits that a file leaves out hide small differences, and create others.

A number is off by up to half its unit (analysis.curves.resolution), and a difference of two by up to a whole unit. If a unit is
not a small part of the margin, a difference within the margin proves nothing. A difference that exceeds the margin by more than
two units still counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from analysis.curves.curve import Curve
from analysis.curves.curve_files import CurveFiles
from analysis.records.steps import Floats, Metric
from analysis.verdict.curve_difference import METRIC_NAMES
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

MAXIMUM_UNIT = 0.1
"""The largest unit that is fine enough, as a share of the margin."""
_FULL_PRECISION = 1e-6
"""The largest unit of a number with seven digits, as a share of the number. float32 is as fine."""
_QUANTILE = 0.8
"""The unit of a column is this quantile of its steps' units. In full precision without trailing zeros, one number in ten
looks coarser."""

_MORE_DIGITS = "record it in float32, and print nine digits (%.9g)"


@dataclass(frozen=True)
class PrintPrecision:
    """How finely ``file`` records a metric.

    ``unit`` is the column's unit, and ``widest`` is the largest unit of any magnitude. Both are measured as the metric's differences
    are: gradient norms relative to eager.
    """

    unit: float
    widest: float
    file: str


def insufficient_precision(files: CurveFiles, first: int, margins: Margins) -> dict[Metric, PrintPrecision]:
    """Return the metrics whose unit is too large for their margin, from the ``first``-th step on.

    The curves must have the same steps.
    """
    precision = {metric: _coarsest(files, metric, first) for metric in files.metrics}
    return {metric: coarse for metric, coarse in precision.items() if coarse.unit > MAXIMUM_UNIT * margins.of(metric)}


def _coarsest(files: CurveFiles, metric: Metric, first: int) -> PrintPrecision:
    window = slice(first, min(len(curve.steps) for curve in files.curves.values()))
    units = {name: _units(curve, metric)[window] for name, curve in files.curves.items()}
    values = {name: curve.steps.of(metric)[window] for name, curve in files.curves.items()}
    widest = {name: _with_trailing_zeros(unit, values[name]) for name, unit in units.items()}
    if metric == "grad_norm":
        norms = {name: np.abs(steps.grad_norm[window]) for name, steps in files.sides[0].items()}
        sizes = [np.maximum(norm, units[name]) for name, norm in norms.items()]
        with np.errstate(all="ignore"):
            units, widest = (
                {name: np.nan_to_num(unit / np.mean(sizes, axis=0), nan=0.0) for name, unit in each.items()}
                for each in (units, widest)
            )
    of_column = {name: float(np.sort(unit)[int(_QUANTILE * (len(unit) - 1))]) for name, unit in units.items()}
    name = max(of_column, key=lambda name: of_column[name])
    return PrintPrecision(of_column[name], max(float(unit.max()) for unit in widest.values()), name)


def _with_trailing_zeros(units: Floats, values: Floats) -> Floats:
    """Return ``units`` without those that come from omitted zeros: 2.100 is often stored as 2.1. Shape (steps,).

    Numbers of one decimal and binary magnitude have one unit, in any format. A unit that few of them exceed is theirs.
    """
    with np.errstate(all="ignore"):
        magnitudes = np.stack([np.frexp(values)[1], np.nan_to_num(np.floor(np.log10(np.abs(values))), neginf=0.0)])
    units = units.copy()
    for magnitude in np.unique(magnitudes, axis=1).T:
        same = (magnitudes == magnitude[:, None]).all(axis=0)
        ordered = np.sort(units[same])
        units[same] = np.minimum(units[same], ordered[math.ceil(_QUANTILE * (len(ordered) - 1))])
    return units


def _units(curve: Curve, metric: Metric) -> Floats:
    """Return the units of a file's numbers, or 0 for a number in full precision. Shape (steps,)."""
    unit = curve.resolution[metric]
    return np.where(unit > _FULL_PRECISION * np.abs(curve.steps.of(metric)), unit, 0.0)


def widen_margins(margins: Margins, coarse: Mapping[Metric, PrintPrecision]) -> Margins:
    """Return margins that a printed difference exceeds only if the true difference exceeds ``margins``."""
    added = {metric: 2 * one.widest for metric, one in coarse.items()}
    loss, grad_norm = margins.loss + added.get("loss", 0.0), margins.grad_norm + added.get("grad_norm", 0.0)
    return replace(margins, loss=loss, grad_norm=grad_norm)


def drop_below_precision(files: CurveFiles, coarse: Mapping[Metric, PrintPrecision]) -> CurveFiles:
    """Raise coarse gradient norms to at least one unit. Relative to 0.000, a norm of 0.001 would be infinitely far off."""
    if "grad_norm" not in coarse:
        return files

    def raise_norms(curve: Curve) -> Curve:
        norms = np.maximum(curve.steps.grad_norm, _units(curve, "grad_norm"))
        return replace(curve, steps=replace(curve.steps, grad_norm=norms))

    eager, graphed, perturbed = (
        {name: raise_norms(curve) for name, curve in side.items()}
        for side in (files.eager, files.graphed, files.perturbed)
    )
    return replace(files, eager=eager, graphed=graphed, perturbed=perturbed)


def differences_below_precision(verdict: Verdict, coarse: Mapping[Metric, PrintPrecision], margins: Margins) -> Verdict:
    """Return INCONCLUSIVE with the evidence of ``verdict``, because metrics are recorded too coarsely."""
    metric, precision = next(iter(coarse.items()))
    relative = " of it" if metric == "grad_norm" else ""
    reason = (
        f"the {METRIC_NAMES[metric]} is recorded in units of {precision.unit:.3g}{relative} ({precision.file}), so a difference "
        f"within its margin of {margins.of(metric):g}{relative} does not show"
    )
    return Verdict("INCONCLUSIVE", reason, _MORE_DIGITS, verdict.evidence)
