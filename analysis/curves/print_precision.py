"""How finely curves were printed: digits that a file leaves out hide small differences, and make some out of none.

A printed number is off by up to half the unit of its last digit, and so a difference of two by up to a whole one. Where
that is no small part of the margin, nothing within it is shown; what is beyond the margin by two units more is.
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

SHARE = 0.1
"""A unit above this share of the margin is too coarse for it."""
_WHOLE = 1e-6
"""The unit of a number of seven digits or more is at most this share of it: as fine as a float32 is."""
_PLAIN = 0.8
"""The share of a column whose units count. Full precision without trailing zeros makes one in ten look coarser."""


@dataclass(frozen=True)
class PrintPrecision:
    """A metric that ``file`` prints too coarsely, as differences are measured: gradient norms relative to eager.
    ``unit`` is what its column is printed to, ``widest`` the largest of a step."""

    unit: float
    widest: float
    file: str


def insufficient_precision(files: CurveFiles, first: int, margins: Margins) -> dict[Metric, PrintPrecision]:
    """Of curves that agree in their steps, from the ``first``-th on."""
    found = {metric: _coarsest(files, metric, first) for metric in files.metrics}
    allowed = {"loss": SHARE * margins.loss, "grad_norm": SHARE * margins.grad_norm}
    return {metric: coarse for metric, coarse in found.items() if coarse.unit > allowed[metric]}


def _coarsest(files: CurveFiles, metric: Metric, first: int) -> PrintPrecision:
    curves = {**files.eager, **files.graphed}
    window = slice(first, min(map(len, curves.values())))
    units = {name: _left_out(files, name, metric)[window] for name in curves}
    if metric == "grad_norm":
        sizes = [np.maximum(np.abs(steps.grad_norm[window]), units[name]) for name, steps in files.eager.items()]
        with np.errstate(all="ignore"):
            units = {name: np.nan_to_num(unit / np.mean(sizes, axis=0), nan=0.0) for name, unit in units.items()}
    plain = {name: float(np.sort(unit)[int(_PLAIN * (len(unit) - 1))]) for name, unit in units.items()}
    name = max(plain, key=lambda name: plain[name])
    return PrintPrecision(plain[name], max(float(unit.max()) for unit in units.values()), name)


def _left_out(files: CurveFiles, name: str, metric: Metric) -> Floats:
    """The units of a file's numbers, shape (steps,); 0 where a number is whole."""
    unit, steps = files.units[name][metric], {**files.eager, **files.graphed}[name]
    return np.where(unit > _WHOLE * np.abs(steps.of(metric)), unit, 0.0)


def widen_margins(margins: Margins, coarse: Mapping[Metric, PrintPrecision]) -> Margins:
    """Margins that a printed difference is beyond only where the true one is beyond ``margins``."""
    return replace(margins, **{metric: getattr(margins, metric) + 2 * one.widest for metric, one in coarse.items()})


def drop_below_precision(files: CurveFiles, coarse: Mapping[Metric, PrintPrecision]) -> CurveFiles:
    """With gradient norms of a unit at least where they are coarse: of 0.000 and 0.001, one is infinitely far off."""
    if "grad_norm" not in coarse:
        return files

    def raised(name: str, steps: Steps) -> Steps:
        return replace(steps, grad_norm=np.maximum(steps.grad_norm, _left_out(files, name, "grad_norm")))

    eager, graphed = (
        {name: raised(name, steps) for name, steps in side.items()} for side in (files.eager, files.graphed)
    )
    return replace(files, eager=eager, graphed=graphed)


def differences_below_precision(verdict: Verdict, coarse: Mapping[Metric, PrintPrecision], margins: Margins) -> Verdict:
    """INCONCLUSIVE, on the evidence of ``verdict``, since metrics are ``coarse``."""
    metric, found = next(iter(coarse.items()))
    of = " of it" if metric == "grad_norm" else ""
    reason = f"the {METRIC_NAMES[metric]} is printed to {found.unit:.2g}{of} ({found.file}), and its margin is "
    reason += f"{getattr(margins, metric):g}{of}: nothing within it is shown"
    if of and found.unit >= 1:
        reason = f"the gradient norm is printed as 0 ({found.file}), which shows nothing"
    remedy = "print more digits, nine for instance (%.9g)"
    return Verdict(
        "INCONCLUSIVE", reason, remedy + ("; if it is 0 indeed, nothing is trained" if of else ""), verdict.evidence
    )
