"""Writes the report of a sweep: markdown and HTML for people, JSON and a table of all steps for programs, pictures for both.

    python -m analysis.report sweeps/tiny_moe

It reads records and nothing else, and the same records give the same bytes: no date, no host name of the reader, no
absolute path. What report.json holds is said in analysis/report/json_report.py. However large a sweep is, the steps of
one workload at a time are in memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.report.charts import Chart, charts_of
from analysis.report.html import page
from analysis.report.json_report import content_of, summary_of
from analysis.report.sections.document import render
from analysis.report.selection import Selection, select
from analysis.report.steps_parquet import StepsFile
from analysis.report.summary import summarise
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_sweep import SweepResults, judge_sweep, judge_workload
from launch.common.atomic_files import RecordError, atomic_open, iter_json_object, write_bytes, write_json, write_text
from launch.contract.paths import SweepPaths


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    results: tuple[CellResult, ...]
    exit_code: int
    summary: str
    markdown: Path
    json: Path


def write_report(sweep: SweepPaths) -> Report:
    """Write <sweep>/report/report.md, report.html, report.json, summary.json, steps.parquet and plots/*.png.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    with atomic_open(sweep.report / "steps.parquet") as file, StepsFile(file) as steps:
        judged = judge_sweep(sweep, steps.write)
    plan, results, trained = judged.plan, judged.results, judged.trained
    summary, selection = summarise(results), select(results)
    charts = _charts(sweep, judged, selection)
    files = {workload: list(of) for workload, of in charts.items()}
    drawn = {file: chart for of in charts.values() for file, chart in of.items()}
    markdown, json = sweep.report / "report.md", sweep.report / "report.json"
    text = render(plan, results, summary, selection, trained, files)
    write_text(markdown, text)
    write_text(sweep.report / "report.html", page(text, drawn))
    with atomic_open(json) as file:
        content = content_of(plan, results, summary, selection, trained, files)
        file.writelines(piece.encode() for piece in iter_json_object(content))
    _write_plots(sweep.report, drawn)
    write_json(sweep.report / "summary.json", summary_of(plan, results, summary, selection))
    return Report(results, summary.exit_code, summary.text, markdown, json)


def _charts(sweep: SweepPaths, judged: SweepResults, selection: Selection) -> dict[str, dict[str, Chart]]:
    """The charts of what is selected, by workload and by file, relative to the report."""
    charts: dict[str, dict[str, Chart]] = {}
    for workload, selected in selection.drawn.items():
        whole = {result.cell.cell_id: result for result in judge_workload(sweep, judged.plan, workload)}
        found = charts_of([whole[result.cell.cell_id] for result in selected], judged.plan.margins)
        charts[workload] = {f"plots/{workload}-{kind}.png": chart for kind, chart in found.items()}
    return charts


def _write_plots(folder: Path, charts: Mapping[str, Chart]) -> None:
    """Draw them one at a time. Plots of an earlier report go."""
    from analysis.report.plots import draw  # only here: what draws takes memory that the parts before need more

    for file, chart in charts.items():
        write_bytes(folder / file, draw(chart))
        gc.collect()  # a figure refers to itself, and would stay
    for path in sorted((folder / "plots").glob("*.png")):
        if f"plots/{path.name}" not in charts:
            path.unlink()


def main(arguments: list[str]) -> int:
    """Write the report of the sweep in the folder that ``arguments`` names. The value is 1 where it could not be written,
    whatever the report says."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m analysis.report SWEEP_FOLDER\n")
        return 1
    try:
        write_report(SweepPaths(Path(arguments[0])))
    except (OSError, RecordError) as error:
        sys.stderr.write(f"{error.strerror if isinstance(error, OSError) else error}\n")
        return 1
    return 0
