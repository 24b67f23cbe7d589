"""The precision of printed loss curves. Digits that a file leaves out hide small differences, and create others.

A printed number is off by up to half the unit of its last digit, a difference of two by up to a whole unit. Where a unit
is no small part of the margin, no difference within the margin counts. A difference that exceeds the margin by two units
more does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from analysis.curves.curve_files import CurveFiles
from analysis.records.steps import Floats, Metric, Steps
from analysis.verdict.curve_difference import METRIC_NAMES
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

MAXIMUM_UNIT = 0.1
"""The largest unit that is fine enough, as a share of the margin."""
_FULL_PRECISION = 1e-6
"""The largest unit of a number of seven digits, as a share of it: a float32 is as fine."""
_QUANTILE = 0.8
"""The unit of a column is this quantile of its steps' units. In full precision without trailing zeros, one number in ten
looks coarser."""


@dataclass(frozen=True)
class PrintPrecision:
    """How ``file`` prints a metric: ``unit`` is that of the column, ``widest`` the largest of any step. Both are in the
    metric's own measure of differences: gradient norms relative to eager."""

    unit: float
    widest: float
    file: str


def insufficient_precision(files: CurveFiles, first: int, margins: Margins) -> dict[Metric, PrintPrecision]:
    """Return the metrics whose unit is too large for their margin, from the ``first``-th step on. The curves agree in
    their steps."""
    precision = {metric: _coarsest(files, metric, first) for metric in files.metrics}
    return {metric: coarse for metric, coarse in precision.items() if coarse.unit > MAXIMUM_UNIT * margins.of(metric)}


def _coarsest(files: CurveFiles, metric: Metric, first: int) -> PrintPrecision:
    curves = {**files.eager, **files.graphed}
    window = slice(first, min(map(len, curves.values())))
    units = {name: _units(files, name, metric)[window] for name in curves}
    if metric == "grad_norm":
        sizes = [np.maximum(np.abs(steps.grad_norm[window]), units[name]) for name, steps in files.eager.items()]
        with np.errstate(all="ignore"):
            units = {name: np.nan_to_num(unit / np.mean(sizes, axis=0), nan=0.0) for name, unit in units.items()}
    of_column = {name: float(np.sort(unit)[int(_QUANTILE * (len(unit) - 1))]) for name, unit in units.items()}
    name = max(of_column, key=lambda name: of_column[name])
    return PrintPrecision(of_column[name], max(float(unit.max()) for unit in units.values()), name)


def _units(files: CurveFiles, name: str, metric: Metric) -> Floats:
    """Return the units of a file's numbers, shape (steps,); 0 where a number has full precision."""
    unit, steps = files.units[name][metric], {**files.eager, **files.graphed}[name]
    return np.where(unit > _FULL_PRECISION * np.abs(steps.of(metric)), unit, 0.0)


def widen_margins(margins: Margins, coarse: Mapping[Metric, PrintPrecision]) -> Margins:
    """Return margins that a printed difference exceeds only where the true one exceeds ``margins``."""
    return replace(margins, **{metric: margins.of(metric) + 2 * one.widest for metric, one in coarse.items()})


def drop_below_precision(files: CurveFiles, coarse: Mapping[Metric, PrintPrecision]) -> CurveFiles:
    """Raise coarse gradient norms to one unit at least: relative to 0.000, a norm of 0.001 is infinitely far off."""
    if "grad_norm" not in coarse:
        return files

    def raise_norms(side: Mapping[str, Steps]) -> dict[str, Steps]:
        units = {name: _units(files, name, "grad_norm") for name in side}
        return {
            name: replace(steps, grad_norm=np.maximum(steps.grad_norm, units[name])) for name, steps in side.items()
        }

    return replace(files, eager=raise_norms(files.eager), graphed=raise_norms(files.graphed))


def differences_below_precision(verdict: Verdict, coarse: Mapping[Metric, PrintPrecision], margins: Margins) -> Verdict:
    """Return INCONCLUSIVE with the evidence of ``verdict``: metrics are printed too coarsely."""
    metric, precision = next(iter(coarse.items()))
    relative = " of it" if metric == "grad_norm" else ""
    reason = (
        f"the {METRIC_NAMES[metric]} is printed to {precision.unit:.2g}{relative} ({precision.file}), and its margin is "
        f"{margins.of(metric):g}{relative}: a difference within the margin does not show"
    )
    if relative and precision.unit >= 1:
        reason = f"the gradient norm is printed as 0 ({precision.file}), so no difference shows"
    remedy = "print more digits, for instance nine (%.9g)"
    if relative:
        remedy += "; if the norm is really 0, nothing is trained"
    return Verdict("INCONCLUSIVE", reason, remedy, verdict.evidence)
