"""Write the report of a sweep: Markdown and HTML for people, JSON and a table of all steps for programs, pictures for both.

    python -m analysis.report sweeps/tiny_moe

It reads only records. The same records give the same bytes, because the report contains no date, host name or absolute path of
the reader. analysis/report/json_report.py describes report.json. Memory holds the steps of one workload at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.records.wandb_runs import wandb_runs
from analysis.report.charts import Chart, charts_of, speed_chart
from analysis.report.html import page
from analysis.report.json_report import report_to_json, summary_to_json
from analysis.report.report_data import SWEEP, ReportData, report_data
from analysis.report.sections import render_markdown
from analysis.report.steps_parquet import steps_writer
from analysis.sweep.judge_sweep import judge_sweep, judge_workload
from launch.common.atomic_files import atomic_open, iter_json_object, write_bytes, write_json, write_text
from launch.common.file_lock import Lock
from launch.contract.paths import SweepPaths
from launch.contract.plan import read_plan
from launch.contract.records.digest import digest_records

LOCK_SECONDS = 1800.0
"""How long to wait for another process that writes a report of the same sweep."""


@dataclass(frozen=True)
class Report:
    """What a report says in short, and the paths of its files."""

    exit_code: int
    summary: str
    markdown: Path
    json: Path


def write_report(sweep: SweepPaths) -> Report:
    """Write <sweep>/report/report.md, report.html, report.json, summary.json, steps.parquet and plots/*.png.

    Raises:
        FileNotFoundError: the folder has no plan.
        RecordError: its plan is damaged, or of another version.
        TimeoutError: another process has been writing the report for too long.
    """
    with Lock.acquire(sweep.report_lock, LOCK_SECONDS):
        return _write_files(sweep)


def _write_files(sweep: SweepPaths) -> Report:
    folder = sweep.report
    # Any change of the records from here on makes this report stale.
    records = digest_records(sweep, read_plan(sweep).cell_of_run())
    with atomic_open(folder / "steps.parquet") as file, steps_writer(file) as write_steps:
        data = report_data(judge_sweep(sweep, write_steps))
    charts = _charts(sweep, data)
    undrawn = _write_plots(folder, {file: chart for files in charts.values() for file, chart in files.items()})
    plots = {workload: [file for file in files if file not in undrawn] for workload, files in charts.items()}
    run_ids = [run.run_id for result in data.ran for run in result.runs if run.begun]
    data = replace(data, plots=plots, undrawn=undrawn, wandb=wandb_runs(sweep, run_ids))
    drawn = {file: charts[workload][file] for workload, files in plots.items() for file in files}
    text = render_markdown(data)
    write_text(folder / "report.md", text)
    write_text(folder / "report.html", page(text, drawn))
    with atomic_open(folder / "report.json") as file:
        file.writelines(piece.encode() for piece in iter_json_object(report_to_json(data)))
    write_json(folder / "summary.json", summary_to_json(data) | {"records": records})
    return Report(data.summary.exit_code, data.summary.text, folder / "report.md", folder / "report.json")


def _charts(sweep: SweepPaths, data: ReportData) -> dict[str, dict[str, Chart]]:
    """Return the charts of the sweep and of the selected cells, by workload and by file, relative to the report."""
    speeds, plan = speed_chart([result for result in data.shown if result.cell.graphed]), data.sweep.plan
    charts: dict[str, dict[str, Chart]] = {SWEEP: {"plots/speedups.png": speeds}} if speeds else {}
    for workload, selected in data.selection.drawn.items():
        whole = {result.cell.cell_id: result for result in judge_workload(sweep, plan, workload)}
        by_kind = charts_of([replace(whole[each.cell.cell_id], name=each.name) for each in selected], plan.margins)
        charts[workload] = {f"plots/{workload}-{kind}.png": chart for kind, chart in by_kind.items()}
    return charts


def _write_plots(folder: Path, charts: Mapping[str, Chart]) -> dict[str, str]:
    """Draw ``charts`` one at a time, and delete other plots. Return the reasons why charts could not be drawn, by file."""
    # Imported late: matplotlib takes memory that the judging needs.
    from analysis.report.plots import draw

    undrawn: dict[str, str] = {}
    # Judged cells need no collection, so keep the collector from scanning them after each picture.
    gc.freeze()
    for file, chart in charts.items():
        try:
            picture = draw(chart)
        # Matplotlib raises these for numbers that it cannot draw, such as a loss of 1e308.
        except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
            undrawn[file] = f"{type(error).__name__}: {error}"
        else:
            write_bytes(folder / file, picture)
        # A figure is part of a reference cycle, so only the collector frees it.
        gc.collect()
    gc.unfreeze()
    for path in sorted((folder / "plots").glob("*.png")):
        if f"plots/{path.name}" not in charts.keys() - undrawn.keys():
            path.unlink()
    return undrawn
