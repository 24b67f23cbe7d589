"""The data of a workload's charts. analysis/report/plots.py draws them as PNG, page.js in a browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.memory.peaks import KIND_WORDS
from analysis.records.steps import Floats, Integers, Metric, Steps
from analysis.speed.steady_window import is_plausible
from analysis.sweep.cell_results import CellResult
from launch.contract.plan import Margins
from launch.contract.records.events import PHASES

Kind = Literal["loss", "grad_norm", "step_time", "memory"]
MAXIMUM_CELLS = 6
"""Graphed cells in one picture; more would hide one another."""
MAXIMUM_POINTS = 2000
"""Of a line: see :func:`thin_out`."""
EAGER = 0
"""The colour of eager cells; graphed ones have 1 and up."""
AXES: dict[Metric, tuple[str, str]] = {
    "loss": ("loss (nats per token)", "|difference| (nats)"),
    "grad_norm": ("gradient norm", "|difference| / eager"),
}
"""Labels of the values and of the differences."""


@dataclass(frozen=True)
class Line:
    """One run's curve, or a difference, by step; both arrays have shape (points,), and ``y`` may hold NaN and infinity."""

    label: str
    colour: int
    repeat: int
    step: Integers
    y: Floats


@dataclass(frozen=True)
class CurveChart:
    """A metric of all runs of a workload, and |graphed - eager| pair by pair: in nats for the loss, relative to eager's
    for the gradient norm. ``noise_floor`` is the largest difference between eager repeats, ``steps`` the number of steps
    of the longest run."""

    metric: Metric
    curves: tuple[Line, ...]
    differences: tuple[Line, ...]
    noise_floor: Line | None
    capture: int | None
    """The first step that captured."""
    margin: float
    steps: int


@dataclass(frozen=True)
class Box:
    """The measured steps of all repeats of a cell: percentiles 5, 25, 50, 75 and 95."""

    label: str
    colour: int
    percentiles: tuple[float, float, float, float, float]
    steps: int


@dataclass(frozen=True)
class TimeChart:
    unit: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Bars:
    """The peaks of a cell by phase, in GiB; None where it recorded none."""

    label: str
    colour: int
    heights: tuple[float | None, ...]


@dataclass(frozen=True)
class MemoryChart:
    unit: str
    phases: tuple[str, ...]
    bars: tuple[Bars, ...]


Chart = CurveChart | TimeChart | MemoryChart


@dataclass(frozen=True)
class _Cell:
    result: CellResult
    colour: int

    @property
    def label(self) -> str:
        return self.result.cell.label

    @property
    def graphed(self) -> bool:
        return self.result.cell.graphed

    @property
    def curves(self) -> list[tuple[int, Steps]]:
        """Its repeats' steps, without runs that left none."""
        ended = ((run.repeat, run.attempt.steps) for run in self.result.runs if run.attempt is not None)
        return [(repeat, steps) for repeat, steps in ended if len(steps)]


def charts_of(results: Sequence[CellResult], margins: Margins) -> dict[Kind, Chart]:
    """The charts of one workload; a kind that has no data is left out.

    ``results`` holds the eager cell and at most :data:`MAXIMUM_CELLS` graphed ones, whose steps have not been let go.
    """
    eager = [_Cell(result, EAGER) for result in results if not result.cell.graphed]
    graphed = [result for result in results if result.cell.graphed][:MAXIMUM_CELLS]
    cells = eager + [_Cell(result, colour) for colour, result in enumerate(graphed, start=1)]
    found: dict[Kind, Chart | None] = {
        "loss": _curves(cells, "loss", margins.loss),
        "grad_norm": _curves(cells, "grad_norm", margins.grad_norm),
        "step_time": _times(cells),
        "memory": _memory(cells),
    }
    return {kind: chart for kind, chart in found.items() if chart is not None}


# --- curves ---------------------------------------------------------------------------------------------------------


def _curves(cells: Sequence[_Cell], metric: Metric, margin: float) -> CurveChart | None:
    curves = tuple(
        Line(cell.label, cell.colour, repeat, *thin_out(steps.step, steps.of(metric)))
        for cell in cells
        for repeat, steps in cell.curves
    )
    if not curves:
        return None
    captured = [int(s) for cell in cells for _, steps in cell.curves for s in steps.step[steps.phase == "capture"]]
    differences = tuple(line for cell in cells if cell.graphed for line in _differences(cell, metric))
    longest = max(len(steps) for cell in cells for _, steps in cell.curves)
    return CurveChart(metric, curves, differences, _floor(cells, metric), min(captured, default=None), margin, longest)


def thin_out(step: Integers, y: Floats) -> tuple[Integers, Floats]:
    """Keep at most about :data:`MAXIMUM_POINTS` points of a curve: the smallest and largest value of each short interval, both
    ends, and each value that is not finite."""
    if len(y) <= MAXIMUM_POINTS:
        return step, y
    stretches = np.array_split(np.arange(len(y)), MAXIMUM_POINTS // 2)
    finite = np.isfinite(y)
    values = np.where(finite, y, 0.0)
    extremes = [index for s in stretches for index in (s[0], s[np.argmin(values[s])], s[np.argmax(values[s])])]
    kept = np.unique(np.concatenate([extremes, [len(y) - 1], np.flatnonzero(~finite)]).astype(np.int64))
    return step[kept], y[kept]


def _differences(cell: _Cell, metric: Metric) -> Iterator[Line]:
    for pair in cell.result.pairs:
        if pair.eager and pair.eager.attempt and pair.graphed.attempt:
            step, difference = _difference(pair.eager.attempt.steps, pair.graphed.attempt.steps, metric)
            yield Line(cell.label, cell.colour, pair.repeat, *thin_out(step, difference))


def _difference(eager: Steps, graphed: Steps, metric: Metric) -> tuple[Integers, Floats]:
    """Steps that both recorded and their difference; infinity where a side is not finite."""
    step, left, right = np.intersect1d(eager.step, graphed.step, return_indices=True)
    before, after = eager.of(metric)[left], graphed.of(metric)[right]
    with np.errstate(all="ignore"):
        difference = np.abs(after - before)
        if metric == "grad_norm":
            difference = np.where(difference == 0, 0.0, difference / np.abs(before))
    return step, np.where(np.isfinite(difference), difference, np.inf)


def _floor(cells: Sequence[_Cell], metric: Metric) -> Line | None:
    """The largest difference of eager repeats from the first of them, by step."""
    for cell in cells:
        if cell.graphed or len(cell.curves) < 2:
            continue
        first, *others = (steps for _, steps in cell.curves)
        found = [_difference(first, other, metric) for other in others]
        if all(np.array_equal(step, first.step) for step, _ in found):
            spread = np.max([size for _, size in found], axis=0)
            return Line("noise floor", EAGER, 0, *thin_out(first.step, spread))
    return None


# --- step times, memory ---------------------------------------------------------------------------------------------


def _times(cells: Sequence[_Cell]) -> TimeChart | None:
    timed = [(cell, _measured_times(cell)) for cell in cells]
    timed = [(cell, times) for cell, times in timed if len(times)]
    eager = [times for cell, times in timed if not cell.graphed]
    if not eager:
        return None
    on_gpu = timed[0][0].result.on_gpu
    unit = 1.0 if on_gpu else float(np.median(eager[0]))
    boxes = (Box(cell.label, cell.colour, _percentiles(times / unit), len(times)) for cell, times in timed)
    return TimeChart("ms" if on_gpu else "CPU time over eager's median", tuple(boxes))


def _measured_times(cell: _Cell) -> Floats:
    parts = [steps.step_time_ms[steps.phase == "measure"] for _, steps in cell.curves]
    times = np.concatenate(parts) if parts else np.empty(0)
    return times[is_plausible(times)]


def _percentiles(times: Floats) -> tuple[float, float, float, float, float]:
    low, first, middle, third, high = (float(value) for value in np.percentile(times, [5, 25, 50, 75, 95]))
    return low, first, middle, third, high


def _memory(cells: Sequence[_Cell]) -> MemoryChart | None:
    found = [(cell, cell.result.memory) for cell in cells if cell.result.memory is not None]
    if not found:
        return None
    peaks = [(cell, {peak.phase: peak.peak / 2**30 for peak in memory.phases}) for cell, memory in found]
    phases = tuple(phase for phase in PHASES if any(phase in heights for _, heights in peaks))
    bars = (Bars(cell.label, cell.colour, tuple(map(heights.get, phases))) for cell, heights in peaks)
    return MemoryChart(KIND_WORDS[found[0][1].kind], phases, tuple(bars))
