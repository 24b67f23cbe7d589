"""The curves of eager and graphed runs from files, for `python -m analysis.loss`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from analysis.curves.curve import Curve, CurveError
from analysis.curves.run_file import file_of, read_run
from analysis.records.steps import Floats, Integers, Steps
from analysis.verdict.constant_norm import describe_constant
from analysis.verdict.rounding import Units
from launch.contract.records.step_metrics import METRICS, Metric


@dataclass(frozen=True)
class CurveFiles:
    """The curves of both sides and of the perturbed eager run, by file name in the order given.

    ``perturbed`` has at most one curve. ``metrics`` holds only the loss if files have no gradient norms.
    """

    eager: Mapping[str, Curve]
    graphed: Mapping[str, Curve]
    perturbed: Mapping[str, Curve]
    metrics: tuple[Metric, ...]

    @property
    def curves(self) -> dict[str, Curve]:
        return {**self.eager, **self.graphed, **self.perturbed}

    @property
    def copies(self) -> dict[str, str]:
        """Map each file with the same numbers as an earlier file to that file. It is a copy, or its run was equal."""
        return _find_copies(self.curves)

    def drop_copies(self) -> CurveFiles:
        """Return the files without those that have the same numbers as an earlier file of their side."""
        eager, graphed = (
            {name: curve for name, curve in side.items() if name not in _find_copies(side)}
            for side in (self.eager, self.graphed)
        )
        return replace(self, eager=eager, graphed=graphed)

    @property
    def sides(self) -> tuple[dict[str, Steps], dict[str, Steps]]:
        """Return the steps of the eager and of the graphed files."""
        eager, graphed = ({name: curve.steps for name, curve in side.items()} for side in (self.eager, self.graphed))
        return eager, graphed

    @property
    def units(self) -> dict[str, Units]:
        """The units of each file's rounded numbers."""
        rounded = {name: curve.rounded for name, curve in self.curves.items()}
        return {name: {metric: unit[metric] for metric in self.metrics} for name, unit in rounded.items()}

    @property
    def steps(self) -> Integers:
        """The steps that every file should have: those of any file.

        Raises:
            CurveError: they and the skipped ones are not evenly spaced, or those of the longest file are not in order.
        """
        name, curve = max(self.curves.items(), key=lambda item: len(item[1].steps))
        found = curve.steps.step
        if (back := np.flatnonzero(np.diff(found) <= 0)).size:
            fix = "keep one line of each step, of one rank, and number the steps of all epochs on"
            raise CurveError(f"{name}: step {found[back[0] + 1]} follows step {found[back[0]]}; {fix}")
        every: Integers = np.unique(np.concatenate([one.steps.step for one in self.curves.values()]))
        skipped = sorted(set[int]().union(*(one.skipped for one in self.curves.values())))
        step = np.union1d(every, np.array(skipped, every.dtype))
        strides = np.diff(step)
        if strides.size and (odd := np.flatnonzero(strides != np.median(strides))).size:
            text = f"step {step[odd[0] + 1]} follows step {step[odd[0]]}; steps must be evenly spaced"
            raise CurveError(f"{name}: {text}")
        return every

    def first_after(self, capture_step: int | None) -> int:
        """Return the index of the first step after ``capture_step``, or 0 if it is None.

        Raises:
            CurveError: no step is after it.
        """
        if capture_step is None:
            return 0
        if capture_step >= (last := self.steps[-1]):
            raise CurveError(f"--capture-step {capture_step}: no step is after {capture_step}; the last one is {last}")
        return int(np.searchsorted(self.steps, capture_step, side="right"))


def read_curves(eager: Sequence[Path], graphed: Sequence[Path], perturbed: Sequence[Path] = ()) -> CurveFiles:
    """Return the curves of the files.

    Raises:
        CurveError: a file cannot be read, holds no curve or is given twice; only some files have gradient norms; or the
            perturbed run has different steps than the eager ones.
    """
    paths = (*eager, *graphed, *perturbed)
    curves = {str(path): read_run(path) for path in paths}
    files = [file_of(path) for path in paths]
    for place, path in enumerate(paths):
        if any(files[place].samefile(earlier) for earlier in files[:place]):
            raise CurveError(f"{path}: given twice; comparing a run with itself proves nothing")
    with_norm = [name for name, curve in curves.items() if "grad_norm" in curve.units]
    without = [name for name in curves if name not in with_norm]
    if with_norm and without:
        raise CurveError(f"{without[0]}: no grad_norm, but {with_norm[0]} has it; leave it out of all files or of none")
    before, after, moved = ({str(path): curves[str(path)] for path in side} for side in (eager, graphed, perturbed))
    expected = next(iter(before.values())).steps.step
    for name, curve in moved.items():
        if not np.array_equal(curve.steps.step, expected):
            raise CurveError(f"{name}: its steps are not those of {eager[0]}; a perturbed run must be as long")
    return CurveFiles(before, after, moved, METRICS if with_norm else METRICS[:1])


def _find_copies(curves: Mapping[str, Curve]) -> dict[str, str]:
    pairs = combinations(curves, 2)
    return {later: earlier for earlier, later in reversed(list(pairs)) if _same_numbers(curves[earlier], curves[later])}


def _same_numbers(one: Curve, other: Curve) -> bool:
    """Return whether two curves are equal, or one is the other rounded in print, to float32 or to a coarser format.

    Other columns and line ends do not matter. Numbers of the same precision must be equal.
    """
    return np.array_equal(one.steps.step, other.steps.step) and all(
        _is_rounded(one.steps.of(metric), other.steps.of(metric), _rounding(one, other, metric)) for metric in one.units
    )


def _is_rounded(one: Floats, other: Floats, units: Floats) -> bool:
    """Return whether the numbers differ by at most half a unit, as by rounding.

    If all differences are to one side, as by truncation, a whole unit is allowed.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        larger = np.sign(np.abs(one) - np.abs(other))
        share = 1.0 if (larger >= 0).all() or (larger <= 0).all() else 0.5
        return np.allclose(one, other, 1e-15, share * units, equal_nan=True)


def _rounding(one: Curve, other: Curve, metric: Metric) -> Floats:
    """Return the larger unit of the two curves at each step, or 0 where their units are equal. Shape (steps,)."""
    rounding = np.zeros(len(one.steps))
    for a, b in ((one.units, other.units), (one.resolution, other.resolution)):
        rounding = np.maximum(rounding, np.where(a[metric] == b[metric], 0.0, np.maximum(a[metric], b[metric])))
    return rounding


def constant_norm(files: CurveFiles, first: int) -> str:
    """Describe a gradient norm that is constant from index ``first`` on; return "" without one."""
    curves = files.curves.items() if "grad_norm" in files.metrics else ()
    found = ((name, curve, describe_constant(curve.steps.grad_norm[first:])) for name, curve in curves)
    return next((f"{name}: {curve.columns[-1]} {said}" for name, curve, said in found if said), "")
