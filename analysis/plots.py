"""Pictures of a workload: loss curves with their difference, step times, memory by phase.

The same records give the same bytes: no date, no software version, no setting of the reader's own matplotlib.
Colours are Okabe and Ito's (jfly.uni-koeln.de/color), which all kinds of colour vision tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.compare import CellResult
from analysis.deviation import absolute_loss_difference
from analysis.load import attempts_of
from analysis.memory import KIND_WORDS
from analysis.steps import Floats, Integers, Steps
from launch.record import PHASES, Margins

MAXIMUM_CELLS = 6
"""Graphed cells in one picture; more would hide one another."""
EAGER_COLOUR = "#4d4d4d"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BAD_COLOUR = "#b2182b"
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Series:
    """One cell of a workload, as it is drawn."""

    result: CellResult
    label: str
    colour: str

    @property
    def curves(self) -> list[Steps]:
        """Its repeats' steps, without runs that left none."""
        return [attempt.steps for attempt in attempts_of(self.result.runs) if len(attempt.steps)]


def draw(results: Sequence[CellResult], margins: Margins) -> dict[str, bytes]:
    """PNG files by kind ("loss", "step_time", "memory") for one workload; a kind that has no data is left out.

    ``results`` holds the eager cell and at most :data:`MAXIMUM_CELLS` graphed ones.
    """
    with _style():
        series = _series(results)
        pictures = {"loss": _loss(series, margins), "step_time": _step_time(series), "memory": _memory(series)}
        return {kind: _png(figure) for kind, figure in pictures.items() if figure is not None}


@contextmanager
def _style() -> Iterator[None]:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _series(results: Sequence[CellResult]) -> list[Series]:
    eager = [Series(r, r.cell.label, EAGER_COLOUR) for r in results if not r.cell.graphed]
    graphed = [r for r in results if r.cell.graphed]
    return eager + [Series(r, r.cell.label, colour) for r, colour in zip(graphed, COLOURS, strict=False)]


def _figure(rows: int, height: float, ratios: Sequence[float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8.5, height))
    grid = figure.add_gridspec(rows, 1, height_ratios=ratios, hspace=0.28)
    axes: list[Axes] = []
    for row in range(rows):
        axes.append(figure.add_subplot(grid[row], sharex=axes[0] if axes else None))
    return figure, axes


# --- loss -----------------------------------------------------------------------------------------------------------


def _loss(series: Sequence[Series], margins: Margins) -> Figure | None:
    drawn = [item for item in series if item.curves]
    if not drawn:
        return None
    figure, (curves, difference) = _figure(2, 6.4, (3, 2))
    figure.subplots_adjust(left=0.11, right=0.98, top=0.94, bottom=0.09)
    for item in drawn:
        _draw_curves(curves, item)
    for item in drawn:
        if item.result.cell.graphed:
            _draw_difference(difference, item)
    _draw_floor(difference, series)
    _mark_capture(curves, difference, drawn)
    curves.set_title("Loss: eager and graphed, all repeats")
    curves.set_ylabel("loss (nats a token)")
    curves.legend(loc="upper right")
    curves.tick_params(labelbottom=False)
    _finish_difference(difference, drawn, margins)
    return figure


def _draw_curves(axes: Axes, item: Series) -> None:
    graphed = item.result.cell.graphed
    for index, steps in enumerate(item.curves):
        axes.plot(
            steps.step,
            np.where(np.isfinite(steps.loss), steps.loss, np.nan),
            color=item.colour,
            linewidth=1.3 if graphed else 3.2,
            linestyle=(0, (5, 3)) if graphed else "-",
            alpha=1.0 if graphed else 0.45,
            label=item.label if index == 0 else None,
        )


def _differences(item: Series) -> Iterator[tuple[Integers, Floats]]:
    """Steps and |graphed - eager| for each pair of a graphed cell."""
    for pair in item.result.pairs:
        if pair.eager and pair.eager.attempt and pair.graphed.attempt:
            yield absolute_loss_difference(pair.eager.attempt.steps, pair.graphed.attempt.steps)


def _draw_difference(axes: Axes, item: Series) -> None:
    """A step where a side is not finite is a cross at the upper edge."""
    for step, difference in _differences(item):
        finite = np.isfinite(difference)
        axes.plot(step, np.where(finite, difference, np.nan), color=item.colour, linewidth=1.1)
        if not finite.all():
            edge = np.full(int((~finite).sum()), 0.97)
            place = axes.get_xaxis_transform()
            axes.plot(step[~finite], edge, "x", color=BAD_COLOUR, transform=place, label="not finite", markersize=6)


def _draw_floor(axes: Axes, series: Sequence[Series]) -> None:
    """The largest difference between eager repeats, by step."""
    for item in series:
        if item.result.cell.graphed or len(item.curves) < 2 or len({len(curve) for curve in item.curves}) > 1:
            continue
        losses = np.stack([curve.loss for curve in item.curves])
        with np.errstate(invalid="ignore"):
            spread = losses.max(axis=0) - losses.min(axis=0)
        spread[~np.isfinite(spread)] = np.nan
        axes.plot(item.curves[0].step, spread, color=EAGER_COLOUR, linewidth=3, alpha=0.35, label="eager against eager")


def _mark_capture(curves: Axes, difference: Axes, series: Sequence[Series]) -> None:
    captures = {int(s) for item in series for curve in item.curves for s in curve.step[curve.phase == "capture"]}
    for step in sorted(captures)[:1]:
        for axes in (curves, difference):
            axes.axvline(step, color="#999999", linewidth=1, linestyle=":")
        curves.annotate("capture", (step, 0.02), xycoords=("data", "axes fraction"), color="#666666", fontsize=9,
                        xytext=(4, 0), textcoords="offset points")  # fmt: skip


def _finish_difference(axes: Axes, series: Sequence[Series], margins: Margins) -> None:
    found = [difference for item in series for _, difference in _differences(item)]
    values = np.concatenate([*found, np.array([margins.loss])])
    values = values[np.isfinite(values) & (values > 0)]
    smallest, largest = (float(values.min()), float(values.max())) if len(values) else (1e-3, 1e-3)
    threshold = 10.0 ** np.floor(np.log10(min(smallest, largest / 1e3)))
    axes.axhline(margins.loss, color=BAD_COLOUR, linewidth=1.2, linestyle="--", label=f"margin {margins.loss:g}")
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
    axes.set_ylim(-0.2 * threshold, 10.0 ** np.ceil(np.log10(largest * 2)))
    axes.set_yticks(_decades(threshold, largest))
    axes.minorticks_off()
    axes.set_title("Difference, pair by pair")
    axes.set_ylabel("|loss difference| (nats)")
    axes.set_xlabel("step")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(list(unique.values()), list(unique), loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(unique))


def _decades(threshold: float, largest: float) -> list[float]:
    first, last = int(np.log10(threshold)), int(np.ceil(np.log10(largest * 2)))
    stride = max(1, (last - first) // 5)
    return [0.0] + [10.0**power for power in range(first, last + 1, stride)]


# --- step time ------------------------------------------------------------------------------------------------------


def _step_time(series: Sequence[Series]) -> Figure | None:
    rows = [(item, _measured_times(item)) for item in series]
    rows = [(item, times) for item, times in rows if len(times)]
    eager = [times for item, times in rows if not item.result.cell.graphed]
    if not eager:
        return None
    on_gpu = rows[0][0].result.spec.placement.device == "cuda"
    unit, unit_name = (1.0, "ms") if on_gpu else (float(np.median(eager[0])), "CPU time over eager's median")
    height = 1.5 + 0.55 * len(rows)
    figure, (axes,) = _figure(1, height, (1,))
    figure.subplots_adjust(left=0.3, right=0.97, top=1 - 0.4 / height, bottom=0.6 / height)
    for place, (item, times) in enumerate(rows):
        _draw_times(axes, len(rows) - 1 - place, times / unit, item.colour)
    axes.set_yticks([len(rows) - 1 - place for place in range(len(rows))], [_wrapped(item.label) for item, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_title("Step time over the measured steps of all repeats")
    axes.set_xlabel(f"{unit_name}; line: median, box: half, whiskers: 5-95%")
    return figure


def _measured_times(item: Series) -> Floats:
    parts = [curve.step_time_ms[curve.phase == "measure"] for curve in item.curves]
    times = np.concatenate(parts) if parts else np.empty(0)
    return times[np.isfinite(times) & (times > 0)]


def _draw_times(axes: Axes, place: float, times: Floats, colour: str) -> None:
    low, first, middle, third, high = np.percentile(times, [5, 25, 50, 75, 95])
    axes.plot([low, high], [place, place], color=colour, linewidth=1.5, zorder=2)
    axes.barh(place, third - first, left=first, height=0.44, color=colour, alpha=0.35, edgecolor=colour, zorder=3)
    axes.plot([middle, middle], [place - 0.22, place + 0.22], color=colour, linewidth=2.5, zorder=4)
    axes.annotate(f"{middle:.3f}", (middle, place + 0.24), ha="center", va="bottom", fontsize=8, color=colour)


def _wrapped(label: str, width: int = 28) -> str:
    lines = [""]
    for word in label.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(series: Sequence[Series]) -> Figure | None:
    drawn = [(item, item.result.memory) for item in series if item.result.memory is not None]
    if not drawn:
        return None
    kind = drawn[0][1].kind
    phases = [phase for phase in PHASES if any(p.phase == phase for _, memory in drawn for p in memory.phases)]
    figure, (axes,) = _figure(1, 3.6, (1,))
    figure.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.12)
    width = 0.8 / len(drawn)
    for index, (item, memory) in enumerate(drawn):
        peaks = {peak.phase: peak.peak / 2**30 for peak in memory.phases}
        places = [place + (index - (len(drawn) - 1) / 2) * width for place in range(len(phases))]
        heights = [peaks.get(phase, 0.0) for phase in phases]
        axes.bar(places, heights, width * 0.92, color=item.colour, alpha=0.85 if item.result.cell.graphed else 0.55)
    axes.set_xticks(range(len(phases)), phases)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("GiB")
    axes.set_title(f"Peak {KIND_WORDS[kind]} by phase: the largest of ranks and repeats")
    axes.set_ylim(0, axes.get_ylim()[1] * (1.1 + 0.07 * len(drawn)))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    patches = [Patch(color=item.colour, label=item.label, alpha=0.85) for item, _ in drawn]
    axes.legend(handles=patches, loc="upper left", ncols=1 if len(drawn) < 4 else 2)
    return figure
