"""The data of a workload's charts. analysis/report/plots.py draws them as PNG files, and page.js draws them in a browser."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.memory.parts import MemoryParts
from analysis.memory.peaks import KIND_WORDS
from analysis.records.run import Digests
from analysis.records.steps import Floats, Integers, Steps, shared_steps
from analysis.speed.steady_window import is_plausible
from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped
from launch.contract.plan import Margins
from launch.contract.records.events import PHASES
from launch.contract.records.step_metrics import Metric

Kind = Literal["loss", "grad_norm", "step_time", "memory"]
MAXIMUM_CELLS = 6
"""The most graphed cells in one picture. More would hide each other."""
MAXIMUM_POINTS = 2000
"""The most points of a line, approximately (see :func:`thin_out`)."""
MAXIMUM_BARS = 40
"""The most cells in the picture of speed-ups."""
SPEED_COLOURS = {"FASTER": 3, "NEUTRAL": 0, "INCONCLUSIVE": 5, "SLOWER": 2}
UNDECIDED, FAILING = 4, 7
"""The colours of cells that do not pass: with any other loss verdict, and with DIVERGED."""
PARTS = ("state", "activations", "graph pool", "outside", "in all")
PERCENTILES = (5, 25, 50, 75, 95)
EAGER = 0
"""The colour of eager cells. Graphed cells have 1 and above."""
AXES: dict[Metric, tuple[str, str]] = {
    "loss": ("loss (nats per token)", "|difference| (nats)"),
    "grad_norm": ("gradient norm", "|difference| / eager"),
}
"""The axis labels of the values and of their differences."""


@dataclass(frozen=True)
class Line:
    """One run's curve, or a difference, by step. Both arrays have shape (points,). ``y`` may contain NaN and infinity."""

    label: str
    colour: int
    repeat: int
    step: Integers
    y: Floats


@dataclass(frozen=True)
class CurveChart:
    """A metric of all runs of a workload, and |graphed - eager| of each pair.

    Differences are in nats for the loss, and relative to the eager value for the gradient norm. ``noise_floor`` is the largest
    difference of eager repeats from the first one. ``capture`` is the first step that captured. ``steps`` is the number of
    steps of the longest run.
    """

    metric: Metric
    axes: tuple[str, str]
    curves: tuple[Line, ...]
    differences: tuple[Line, ...]
    noise_floor: Line | None
    capture: int | None
    margin: float
    steps: int

    @property
    def thinned(self) -> bool:
        return self.steps > MAXIMUM_POINTS


@dataclass(frozen=True)
class Box:
    """The measured steps of all repeats of a cell, by ``PERCENTILES``."""

    label: str
    colour: int
    percentiles: tuple[float, ...]
    steps: int


@dataclass(frozen=True)
class TimeChart:
    unit: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Bars:
    """Memory of a cell by column, in GiB, None if not recorded. ``floors`` has the lower end of each bar."""

    label: str
    colour: int
    heights: tuple[float | None, ...]
    floors: tuple[float, ...]


@dataclass(frozen=True)
class MemoryChart:
    """The parts of the memory as a waterfall, or its peaks by phase if the parts are unknown."""

    unit: str
    columns: tuple[str, ...]
    bars: tuple[Bars, ...]


@dataclass(frozen=True)
class SpeedBar:
    """A cell's speed-up with its interval (None for one pair) and upper bound (None if unknown). ``label`` is its verdict.

    That is the speed verdict of a passing cell, else the loss verdict.
    """

    label: str
    colour: int
    name: str
    ratio: float
    low: float | None
    high: float | None
    bound: float | None


@dataclass(frozen=True)
class SpeedChart:
    """Speed-ups by cell. The axis begins at 0, or later if all are small. It ends at ``right``, which may cut off wide intervals."""

    unit: str
    bars: tuple[SpeedBar, ...]
    left: float
    right: float


Chart = CurveChart | TimeChart | MemoryChart | SpeedChart
Colours = dict[str, int]
"""Colours by cell id."""


def charts_of(results: Sequence[CellResult], margins: Margins) -> dict[Kind, Chart]:
    """Return the charts of one workload, without kinds that have no data. There are no curves if all pairs are BITWISE.

    ``results`` has the eager cell and the graphed cells, with their steps. At most :data:`MAXIMUM_CELLS` graphed cells are
    drawn.
    """
    results = _of_one_version(results)
    graphed = [result.cell.cell_id for result in results if result.cell.graphed][:MAXIMUM_CELLS]
    colours = {result.cell.cell_id: EAGER for result in results if not result.cell.graphed}
    colours |= {cell_id: colour for colour, cell_id in enumerate(graphed, start=1)}
    cells = sorted((r for r in results if r.cell.cell_id in colours), key=lambda r: colours[r.cell.cell_id])
    equal = all_bitwise(results)
    charts: dict[Kind, Chart | None] = {
        "loss": None if equal else _curves(cells, colours, "loss", margins.loss),
        "grad_norm": None if equal else _curves(cells, colours, "grad_norm", margins.grad_norm),
        "step_time": _times(cells, colours),
        "memory": _memory(cells, colours),
    }
    return {kind: chart for kind, chart in charts.items() if chart is not None}


def all_bitwise(results: Sequence[CellResult]) -> bool:
    """Return whether every graphed cell of a workload has pairs and all of them are BITWISE."""
    graphed = [result for result in results if result.cell.graphed]
    pairs = [pair for result in graphed for pair in result.pairs]
    return all(result.pairs for result in graphed) and {pair.verdict.verdict for pair in pairs} == {"BITWISE"}


def speed_chart(results: Sequence[CellResult]) -> SpeedChart | None:
    """Return the speed-ups of graphed cells, or None if none was timed. A cell that does not pass shows its loss verdict."""
    timed = [(result, result.speed.speedup) for result in results if result.speed.speedup and result.verdict]
    bars = []
    for result, speed in timed[:MAXIMUM_BARS]:
        assert speed and result.verdict
        loss = result.verdict.verdict
        label, colour = (
            (speed.verdict, SPEED_COLOURS[speed.verdict])
            if result.passes
            else (f"loss {loss}", FAILING if loss == "DIVERGED" else UNDECIDED)
        )
        bound = result.speed.bound.upper_bound if result.speed.bound else None
        bars.append(SpeedBar(label, colour, result.name, speed.ratio, speed.low, speed.high, bound))
    if not bars:
        return None
    shown = f"; the first {len(bars)} of {len(timed)} cells" if len(bars) < len(timed) else ""
    on_cpu = "" if any(result.on_gpu for result, _ in timed) else "; CPU times show nothing about CUDA graphs"
    most = 1.1 * max(max(1.0, bar.ratio, bar.bound or 0.0) for bar in bars)
    right = max(most, min(2 * most, 1.05 * max(bar.high or 0.0 for bar in bars)))
    least = 0.98 * min(1.0, *(bar.low or bar.ratio for bar in bars))
    left = least if least > 0.5 and right < 2 else 0.0
    return SpeedChart(f"eager over graphed step time{shown}{on_cpu}", tuple(bars), left, right)


def drawn_repeats(results: Sequence[CellResult]) -> Sequence[int]:
    """Return the largest set of repeats with the same code, libraries and data; of equally large sets, the last."""
    versions: dict[int, set[Digests]] = {}
    for run in (run for result in results for run in result.runs if run.attempt):
        versions.setdefault(run.repeat, set()).add(run.attempt.digests if run.attempt else ())
    repeats = grouped((frozenset(version), repeat) for repeat, version in sorted(versions.items()))
    return max(repeats.values(), key=lambda alike: (len(alike), alike[-1]), default=[])


def _of_one_version(results: Sequence[CellResult]) -> list[CellResult]:
    kept = drawn_repeats(results)
    return [
        replace(
            result,
            runs=tuple(run for run in result.runs if run.repeat in kept),
            pairs=tuple(pair for pair in result.pairs if pair.repeat in kept),
        )
        for result in results
    ]


def _steps(result: CellResult) -> list[tuple[int, Steps]]:
    """Return each repeat with its steps, without runs that have none."""
    ended = ((run.repeat, run.attempt.steps) for run in result.runs if run.attempt is not None and not run.perturbed)
    return [(repeat, steps) for repeat, steps in ended if len(steps)]


# --- curves ---------------------------------------------------------------------------------------------------------


def _curves(cells: Sequence[CellResult], colours: Colours, metric: Metric, margin: float) -> CurveChart | None:
    runs = [(result, repeat, steps) for result in cells for repeat, steps in _steps(result)]
    if not runs:
        return None
    captures = [int(step) for _, _, steps in runs for step in steps.step[steps.phase == "capture"]]
    return CurveChart(
        metric,
        AXES[metric],
        tuple(_line(result, colours, repeat, steps.step, steps.of(metric)) for result, repeat, steps in runs),
        tuple(line for result in cells for line in _differences(result, colours, metric)),
        _noise_floor(cells, metric),
        min(captures, default=None),
        margin,
        max(len(steps) for _, _, steps in runs),
    )


def _line(result: CellResult, colours: Colours, repeat: int, step: Integers, y: Floats) -> Line:
    return Line(result.name, colours[result.cell.cell_id], repeat, *thin_out(step, y))


def thin_out(step: Integers, y: Floats) -> tuple[Integers, Floats]:
    """Thin a curve out to about :data:`MAXIMUM_POINTS` points.

    Keep the first, smallest and largest value of each short interval, both ends, and each value that is not finite.
    """
    if len(y) <= MAXIMUM_POINTS:
        return step, y
    stretches = np.array_split(np.arange(len(y)), MAXIMUM_POINTS // 2)
    finite = np.isfinite(y)
    values = np.where(finite, y, 0.0)
    extremes = [index for s in stretches for index in (s[0], s[np.argmin(values[s])], s[np.argmax(values[s])])]
    kept = np.unique(np.concatenate([extremes, [len(y) - 1], np.flatnonzero(~finite)]).astype(np.int64))
    return step[kept], y[kept]


def _differences(result: CellResult, colours: Colours, metric: Metric) -> Iterator[Line]:
    for pair in result.pairs:
        if pair.eager and pair.eager.attempt and pair.graphed.attempt:
            step, difference = _difference(pair.eager.attempt.steps, pair.graphed.attempt.steps, metric)
            yield _line(result, colours, pair.repeat, step, difference)


def _difference(eager: Steps, graphed: Steps, metric: Metric) -> tuple[Integers, Floats]:
    """Return the steps that both runs recorded and their differences, infinite if a value is not finite."""
    step, left, right = shared_steps(eager.step, graphed.step)
    before, after = eager.of(metric)[left], graphed.of(metric)[right]
    with np.errstate(all="ignore"):
        difference = np.abs(after - before)
        if metric == "grad_norm":
            difference = np.where(difference == 0, 0.0, difference / np.abs(before))
    return step, np.where(np.isfinite(difference), difference, np.inf)


def _noise_floor(cells: Sequence[CellResult], metric: Metric) -> Line | None:
    """Return the largest difference of eager repeats from the first one, by step."""
    for runs in (_steps(result) for result in cells if not result.cell.graphed):
        if len(runs) < 2:
            continue
        first, *others = (steps for _, steps in runs)
        differences = [_difference(first, other, metric) for other in others]
        if all(np.array_equal(step, first.step) for step, _ in differences):
            largest = np.max([size for _, size in differences], axis=0)
            return Line("noise floor", EAGER, 0, *thin_out(first.step, largest))
    return None


# --- step times, memory ---------------------------------------------------------------------------------------------


def _times(cells: Sequence[CellResult], colours: Colours) -> TimeChart | None:
    timed = [(result, times) for result in cells if len(times := _measured_times(result))]
    eager = [times for result, times in timed if not result.cell.graphed]
    if not eager:
        return None
    on_gpu = timed[0][0].on_gpu
    unit = 1.0 if on_gpu else float(np.median(eager[0]))
    boxes = (
        Box(
            result.name,
            colours[result.cell.cell_id],
            tuple(np.percentile(times / unit, PERCENTILES).tolist()),
            len(times),
        )
        for result, times in timed
    )
    return TimeChart("ms" if on_gpu else "CPU time over eager's median", tuple(boxes))


def _measured_times(result: CellResult) -> Floats:
    times = np.concatenate([np.empty(0), *(s.step_time_ms[s.phase == "measure"] for _, s in _steps(result))])
    return times[is_plausible(times)]


def _memory(cells: Sequence[CellResult], colours: Colours) -> MemoryChart | None:
    recorded = [(result, result.memory) for result in cells if result.memory is not None]
    if not recorded:
        return None
    parts = [(result, memory.parts) for result, memory in recorded if memory.parts]
    if parts:
        # The state of a user's program is unknown.
        knows_state = any(each.state for _, each in parts)
        names = PARTS if knows_state else ("state and activations", *PARTS[2:])
        bars = [_waterfall(result, colours, each, len(names)) for result, each in parts]
        return MemoryChart("GPU memory of the fullest rank at its peak in phase measure", names, tuple(bars))
    peaks = [(result, {peak.phase: peak.peak / 2**30 for peak in memory.phases}) for result, memory in recorded]
    phases = tuple(phase for phase in PHASES if any(phase in heights for _, heights in peaks))
    bars = [
        Bars(result.name, colours[result.cell.cell_id], tuple(map(heights.get, phases)), (0.0,) * len(phases))
        for result, heights in peaks
    ]
    return MemoryChart(
        f"{KIND_WORDS[recorded[0][1].kind]}, peak of each phase, maximum over ranks and repeats", phases, tuple(bars)
    )


def _waterfall(result: CellResult, colours: Colours, parts: MemoryParts, number: int) -> Bars:
    """Return the last ``number`` bars of ``PARTS``. Each begins where the one before it ends, but the last one has the total."""
    heights = [size / 2**30 for size in (parts.state, parts.activations, parts.graph_pool, parts.outside)]
    *floors, total = itertools.accumulate(heights, initial=0.0)
    tops, bottoms = (*heights, total), (*floors, 0.0)
    return Bars(result.name, colours[result.cell.cell_id], tops[-number:], bottoms[-number:])
