"""Draw the charts of a workload as PNG: loss and gradient norm with their differences, step times, memory by phase.

The same records give the same bytes: the files contain no date or software version, and ignore the user's matplotlib settings.
The colours are Okabe and Ito's (jfly.uni-koeln.de/color), which people with colour blindness can distinguish.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from analysis.records.steps import Floats
from analysis.report.charts import EAGER, Chart, CurveChart, Line, MemoryChart, SpeedChart, TimeChart
from launch.contract.records.step_metrics import Metric

COLOURS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b2182b")
"""The colour of eager cells, then those of graphed cells. The last one marks faults."""
BAD_COLOUR = COLOURS[-1]
TITLES: dict[Metric, str] = {"loss": "Loss", "grad_norm": "Gradient norm"}
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    # A fixed height. To find it, matplotlib would measure all labels, which takes a third of the time.
    "axes.titley": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
PALETTE = 64
"""Enough for the colours of ``COLOURS`` with soft edges."""
WIDTH, LEGEND_ROW = 8.5, 0.175
"""Inches."""


def draw(chart: Chart) -> bytes:
    """Return ``chart`` as a PNG file of ``PALETTE`` colours, a third as large as one of all colours."""
    pixels, content = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(), np.errstate(over="ignore", invalid="ignore"):
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        _figure_of(chart).savefig(pixels, format="png", pil_kwargs={"compress_level": 0})
    Image.open(pixels).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(content, "png")
    return content.getvalue()


def _figure_of(chart: Chart) -> Figure:
    if isinstance(chart, CurveChart):
        return _curves(chart)
    if isinstance(chart, SpeedChart):
        return _speeds(chart)
    return _times(chart) if isinstance(chart, TimeChart) else _memory(chart)


# --- curves ---------------------------------------------------------------------------------------------------------


def _curves(chart: CurveChart) -> Figure:
    figure = _figure(6.2, 0.11, 0.55, 1)
    curves, difference = figure.subplots(2, sharex=True, height_ratios=(3, 2), gridspec_kw={"hspace": 0.28})
    cells = len({line.colour for line in chart.curves})
    for line in chart.curves:
        _draw_curve(curves, line, cells)
    for line in chart.differences:
        _draw_difference(difference, line)
    _draw_margin_and_floor(difference, chart)
    _mark_capture(chart, curves, difference)
    curves.set_ylabel(chart.axes[0])
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.curves])
    curves.set_ylim(bottom=min(0.0, float(values.min(initial=0.0))))
    _legend(curves, f"{TITLES[chart.metric]}: eager and graphed, repeat by repeat")
    difference.set_ylabel(chart.axes[1])
    difference.set_xlabel("step")
    return figure


def _figure(height: float, left: float, bottom: float, legend_rows: int = 0) -> Figure:
    """Return an empty figure. ``height`` and ``bottom`` are inches, without the legend; ``left`` is a share of the width."""
    legend = LEGEND_ROW * legend_rows
    figure = Figure(figsize=(WIDTH, height + legend))
    top = 1 - (0.4 + legend) / (height + legend)
    figure.subplots_adjust(left=left, right=0.98, top=top, bottom=bottom / (height + legend))
    return figure


def _legend(axes: Axes, title: str) -> None:
    """Place the legend between the title and the axes, where it hides nothing."""
    axes.set_title(title, pad=8 + LEGEND_ROW * 72)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        list(unique.values()), list(unique), loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderaxespad=0.1,
        ncols=len(unique),
    )  # fmt: skip


def _draw_curve(axes: Axes, line: Line, cells: int) -> None:
    # Dashes start at a different offset for each cell, so equal curves all show.
    graphed = line.colour != EAGER
    axes.plot(
        line.step,
        _finite(line.y),
        color=COLOURS[line.colour],
        linewidth=1.3 if graphed else 3.2,
        linestyle=(8 * line.colour / cells, (5, 3)) if graphed else "-",
        alpha=1.0 if graphed else 0.45,
        label=line.label,
    )


def _finite(y: Floats) -> Floats:
    return np.where(np.isfinite(y), y, np.nan)


def _draw_difference(axes: Axes, line: Line) -> None:
    finite = np.isfinite(line.y)
    axes.plot(line.step, _finite(line.y), color=COLOURS[line.colour], linewidth=1.1)
    if not finite.all():
        # A cross at the upper edge marks a step where a side is not finite.
        edge = np.full(int((~finite).sum()), 0.97)
        place = axes.get_xaxis_transform()
        axes.plot(line.step[~finite], edge, "x", color=BAD_COLOUR, transform=place, label="not finite", markersize=6)


def _mark_capture(chart: CurveChart, curves: Axes, difference: Axes) -> None:
    if chart.capture is None:
        return
    for axes in (curves, difference):
        axes.axvline(chart.capture, color="#999999", linewidth=1, linestyle=":")
    curves.annotate("capture", (chart.capture, 0.02), xycoords=("data", "axes fraction"), color="#666666", fontsize=9,
                    xytext=(4, 0), textcoords="offset points")  # fmt: skip


def _draw_margin_and_floor(axes: Axes, chart: CurveChart) -> None:
    if chart.noise_floor is not None:
        floor = chart.noise_floor
        axes.plot(floor.step, _finite(floor.y), color=COLOURS[EAGER], linewidth=3, alpha=0.35, label=floor.label)
    values = np.concatenate([*(line.y for line in chart.differences), np.array([chart.margin])])
    values = values[np.isfinite(values) & (values > 0)]
    smallest, largest = (float(values.min()), float(values.max())) if len(values) else (1e-3, 1e-3)
    threshold = 10.0 ** np.floor(np.log10(min(smallest, largest / 1e3)))
    axes.axhline(chart.margin, color=BAD_COLOUR, linewidth=1.2, linestyle="--", label=f"margin {chart.margin:g}")
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
    axes.set_ylim(-0.2 * threshold, 10.0 ** np.ceil(np.log10(largest * 2)))
    axes.set_yticks(_decades(threshold, largest))
    # Do not typeset powers of ten: it would take a tenth of the drawing time.
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes, "Difference, pair by pair")


def _decades(threshold: float, largest: float) -> list[float]:
    first, last = int(np.log10(threshold)), int(np.ceil(np.log10(largest * 2)))
    stride = max(1, (last - first) // 5)
    return [0.0] + [10.0**power for power in range(first, last + 1, stride)]


# --- speed-ups, step times, memory ----------------------------------------------------------------------------------


def _speeds(chart: SpeedChart) -> Figure:
    figure = _figure(1.2 + 0.26 * len(chart.bars), 0.07, 0.55, 1)
    axes = figure.subplots()
    rows = list(zip(reversed(range(len(chart.bars))), chart.bars, strict=True))
    for place, bar in rows:
        colour = COLOURS[bar.colour]
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color=colour, linewidth=2)
            if bar.high > chart.right:
                axes.plot(chart.right, place, ">", color=colour, clip_on=False)
        axes.plot(bar.ratio, place, "o", color=colour, label=bar.label)
    # The legend has the verdicts first, from top to bottom.
    for place, bar in rows:
        if bar.bound is not None:
            axes.plot(bar.bound, place, "k|", markersize=11, label="upper bound")
    axes.axvline(1, color="#999999", linewidth=1)
    axes.set_xlim(chart.left, chart.right)
    _name_rows(axes, [bar.name for bar in chart.bars])
    axes.set_xlabel(chart.unit)
    _legend(axes, "Speed-up and its interval")
    return figure


def _times(chart: TimeChart) -> Figure:
    figure = _figure(1.5 + 0.55 * len(chart.boxes), 0.07, 0.6)
    axes = figure.subplots()
    for place, box in enumerate(reversed(chart.boxes)):
        low, first, middle, third, high = box.percentiles
        colour = COLOURS[box.colour]
        axes.plot([low, high], [place, place], color=colour, linewidth=1.5, zorder=2)
        axes.barh(place, third - first, left=first, height=0.44, color=colour, alpha=0.35, edgecolor=colour, zorder=3)
        axes.plot([middle, middle], [place - 0.22, place + 0.22], color=colour, linewidth=2.5, zorder=4)
        axes.annotate(f"{middle:.3f}", (middle, place + 0.24), ha="center", va="bottom", fontsize=8, color=colour)
    _name_rows(axes, [box.label for box in chart.boxes])
    axes.set_xlim(left=0)
    axes.set_title("Step time over the measured steps of the repeats")
    axes.set_xlabel(f"{chart.unit}; line: median, box: middle half, whiskers: 5 to 95%")
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of ``axes`` from the top. The last one is at height 0."""
    axes.set_yticks(range(len(names)), [*reversed(names)])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", visible=False)


def _memory(chart: MemoryChart) -> Figure:
    rows, cells = len(chart.bars), range(len(chart.columns))
    figure = _figure(3.6, 0.09, 0.6, 1)
    axes = figure.subplots()
    width = 0.8 / rows
    for index, bars in enumerate(chart.bars):
        places = [place + (index - (rows - 1) / 2) * width for place in cells]
        heights = [found or 0.0 for found in bars.heights]
        axes.bar(places, heights, width * 0.92, bottom=bars.floors, color=COLOURS[bars.colour], label=bars.label,
                 alpha=0.55 if bars.colour == EAGER else 0.85)  # fmt: skip
    axes.set_xticks(cells, chart.columns)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("GiB")
    axes.set_xlabel(chart.unit)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    _legend(axes, "Memory")
    return figure
