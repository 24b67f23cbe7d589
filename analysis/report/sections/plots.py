"""The pictures of the selected workloads."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.charts import all_bitwise, drawn_repeats
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape
from analysis.report.selection import MAXIMUM_WORKLOADS, workload_label
from analysis.sweep.cell_results import CellResult
from launch.common.text import count, numbered

TITLES = {
    "loss": "Loss and its difference",
    "grad_norm": "Gradient norm and its difference",
    "step_time": "Step times",
    "memory": "Memory",
}


def render(report: ReportData) -> list[str]:
    selection = report.selection
    if not selection.drawn:
        return []
    blocks = ["## Plots"]
    for workload, results in selection.drawn.items():
        if not report.plots[workload]:
            continue
        letters = results[0].name.rstrip("0123456789")
        blocks.append(f"### {letters}: `{workload_label(results)}` (workload {workload})")
        blocks += [*_other_versions(results), *_equal_curves(results)]
        blocks += [f"![{TITLES[_kind(file)]}]({file})" for file in report.plots[workload]]
    blocks += [
        f"{TITLES[_kind(file)]}: {file} cannot be drawn ({escape(why)})." for file, why in report.undrawn.items()
    ]
    if selection.left_out_workloads:
        names = _names(selection.left_out_workloads)
        blocks.append(f"Plots show at most {MAXIMUM_WORKLOADS} workloads, worst news first. They leave out {names}.")
    if selection.left_out_cells:
        blocks.append(f"The plots of a workload leave out these cells: {_names(selection.left_out_cells)}.")
    return blocks if len(blocks) > 1 else []


def _other_versions(results: Sequence[CellResult]) -> list[str]:
    drawn = drawn_repeats(results)
    others = sorted({run.repeat for result in results for run in result.runs if run.attempt} - set(drawn))
    if not others:
        return []
    return [
        f"The plots leave out {numbered('repeat', others)}, because its code, libraries or data are unknown, or differ from those "
        f"of repeat {drawn[0]}."
    ]


def _equal_curves(results: Sequence[CellResult]) -> list[str]:
    if not all_bitwise(results):
        return []
    steps = min(result.compared_steps for result in results if result.cell.graphed)
    return [
        f"All pairs are BITWISE: losses and gradient norms are equal over {count('step', steps)}, so no curve is drawn."
    ]


def _kind(file: str) -> str:
    return file.rpartition("-")[2].removesuffix(".png")


def _names(labels: Sequence[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)
