"""How each metric changes from eager to graphed."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import UNCHANGED, how_to_read, percent_change, table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import layout_words, machine_words, model_words, precision_words
from analysis.sweep.metric_changes import (
    MEMORY_METRICS,
    CellChange,
    MemoryRisk,
    MetricChange,
    memory_risks,
    metric_changes,
)
from launch.common.text import count, first_names, size

HEADER = ("metric", "graphs", "change", "conditions", "measured")
NOTE = (
    "Changes are from eager to graphed, over the cells whose loss verdict passes or is INCONCLUSIVE. A change below "
    f"{UNCHANGED:.0%} counts as unchanged."
)


def render(report: ReportData) -> list[str]:
    results = report.sweep.results
    conditions = {result.cell.label: _conditions(result) for result in report.ran if result.cell.graphed}
    on_gpu = any(result.on_gpu for result in results)
    changes = [change for change in metric_changes(results) if on_gpu or change.metric != "model TFLOP/s/GPU"]
    rows = [_change_row(change, conditions, on_gpu) for change in changes]
    rows += [_risk_row(risk) for risk in memory_risks(results)] if on_gpu else []
    return ["## Expected metric changes", table(HEADER, rows), *how_to_read(NOTE)] if rows else []


def _conditions(result: CellResult) -> str:
    spec = result.spec
    parts = (model_words(spec), layout_words(spec.parallelism), precision_words(spec), machine_words(result))
    return ", ".join(filter(None, parts))


def _change_row(change: MetricChange, conditions: Mapping[str, str], on_gpu: bool) -> list[str]:
    return [
        change.metric,
        f"`{change.graphs}`",
        _range(*change.span) if change.span else "unknown, since losses or the speed-up are INCONCLUSIVE",
        first_names(list(dict.fromkeys(conditions[each.label] for each in change.changes))),
        first_names([_measured(change, each, on_gpu) for each in change.changes]),
    ]


def _range(least: float, most: float) -> str:
    low, high = percent_change(least), percent_change(most)
    if low == high:
        return low
    if (least < 0) == (most < 0) and "unchanged" not in (low, high):
        small, large = sorted((abs(least), abs(most)))
        return f"{small:.0%} to {large:.0%} {'down' if least < 0 else 'up'}"
    return f"{low} to {high}"


def _measured(change: MetricChange, each: CellChange, on_gpu: bool) -> str:
    if change.metric in MEMORY_METRICS:
        return f"{size(round(each.eager))} to {size(round(each.graphed))}"
    unit = "ms" if change.metric == "step time" else "TFLOP/s"
    values = f"{each.eager:.4g} to {each.graphed:.4g} {unit}" if on_gpu else percent_change(each.relative)
    return values if each.sure else f"{values} (INCONCLUSIVE)"


def _risk_row(risk: MemoryRisk) -> list[str]:
    change = f"{len(risk.out_of_memory) or 'none'} of {count('cell', risk.fitting)} out of memory"
    return ["out of memory", f"`{risk.graphs}`", change, "the eager baseline fits", first_names(risk.out_of_memory)]
