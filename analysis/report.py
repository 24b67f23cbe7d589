"""Writes the report of a sweep: markdown for people, JSON and a table of all steps for programs, pictures for both.

It reads records and nothing else, and the same records give the same bytes: no date, no host name of the reader, no
absolute path. What report.json holds is said in analysis/content.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.compare import CellResult, compare
from analysis.content import content_of
from analysis.load import load
from analysis.markdown import render
from analysis.plots import draw
from analysis.selection import Selection, select
from analysis.summary import summarise
from analysis.table import parquet_of, steps_table
from analysis.task import trained_alike
from launch.files import dumps, write_bytes, write_text
from launch.paths import SweepPaths
from launch.record import Margins


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    results: tuple[CellResult, ...]
    exit_code: int
    summary: str
    markdown: Path
    json: Path


def write_report(sweep: SweepPaths) -> Report:
    """Write <sweep>/report/report.md, report.json, steps.parquet and plots/*.png.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    records = load(sweep)
    results = compare(records)
    summary, selection = summarise(results), select(results)
    trained = trained_alike(results)
    files = _write_plots(sweep.report, selection, records.plan.margins)
    markdown, json = sweep.report / "report.md", sweep.report / "report.json"
    write_bytes(sweep.report / "steps.parquet", parquet_of(steps_table(records)))
    write_text(markdown, render(records, results, summary, selection, trained, files))
    write_text(json, dumps(content_of(records, results, summary, selection, trained, files), indent=1) + "\n")
    return Report(results, summary.exit_code, summary.text, markdown, json)


def _write_plots(folder: Path, selection: Selection, margins: Margins) -> dict[str, list[str]]:
    """Draw what is selected; returns the files by workload, relative to the report. Plots of an earlier report go."""
    files: dict[str, list[str]] = {}
    for workload, results in selection.drawn.items():
        files[workload] = []
        for kind, content in draw(results, margins).items():
            file = f"plots/{workload}-{kind}.png"
            write_bytes(folder / file, content)
            files[workload].append(file)
    kept = {file for names in files.values() for file in names}
    for path in sorted((folder / "plots").glob("*.png")):
        if f"plots/{path.name}" not in kept:
            path.unlink()
    return files
