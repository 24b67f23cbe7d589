"""How each metric changes from eager to graphed: a row for each finding, with the cells for which it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import UNCHANGED, how_to_read, percent_change, table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import layout_words, machine_words, model_words, precision_words
from analysis.sweep.metric_changes import memory_risks, metric_changes
from launch.common.grouped import grouped
from launch.common.text import first_names, listed

HEADER = ("metric", "change", "graphs", "cells", "conditions")
NOTES = (
    "Changes are from eager to graphed, over the cells whose loss verdict passes or is INCONCLUSIVE. A change below "
    f"{UNCHANGED:.0%} counts as unchanged.",
    "Sections Speed and Memory have the figures of each cell.",
)
MOST_NAMED = 12
UNSURE = "unknown, since losses or the speed-up are INCONCLUSIVE"


def render(report: ReportData) -> list[str]:
    cells = {result.cell.label: result for result in report.ran}
    rows = [_row(*finding, holds_for, cells) for finding, holds_for in grouped(_findings(report.sweep.results)).items()]
    return ["## Expected metric changes", table(HEADER, rows), *how_to_read(*NOTES)] if rows else []


def _findings(results: Sequence[CellResult]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield each metric and its change, with the graphs and the label of a cell; "" if it holds for no cell."""
    for change in metric_changes(results):
        # The rate of a step only says its time again.
        for each in change.changes if change.metric != "model TFLOP/s/GPU" else ():
            text = _range(*change.span) if change.span and each.sure else UNSURE
            yield (change.metric, text), (change.graphs, each.label)
    for risk in memory_risks(results) if any(result.on_gpu for result in results) else ():
        found = f"in {len(risk.out_of_memory)} of {risk.fitting} cells" if risk.out_of_memory else "in no cell"
        for label in risk.out_of_memory or ("",):
            yield ("out of memory", f"{found} whose eager baseline fits"), (risk.graphs, label)


def _range(least: float, most: float) -> str:
    low, high = percent_change(least), percent_change(most)
    if low == high:
        return low
    if (least < 0) == (most < 0) and "unchanged" not in (low, high):
        small, large = sorted((abs(least), abs(most)))
        return f"{small:.0%} to {large:.0%} {'down' if least < 0 else 'up'}"
    return f"{low} to {high}"


def _row(metric: str, change: str, holds_for: Sequence[tuple[str, str]], cells: Mapping[str, CellResult]) -> list[str]:
    graphs = dict.fromkeys(f"`{graphs}`" for graphs, _ in holds_for)
    found = [cells[label] for _, label in holds_for if label]
    conditions = dict.fromkeys(map(_conditions, found))
    names = listed([result.name for result in found], MOST_NAMED)
    return [metric, change, first_names([*graphs], MOST_NAMED), names, first_names([*conditions])]


def _conditions(result: CellResult) -> str:
    spec = result.spec
    parts = (model_words(spec), layout_words(spec.parallelism), precision_words(spec), machine_words(result))
    return ", ".join(filter(None, parts))
