"""Return only the text of a report. Drawing pictures would take a CPU second per report."""

from __future__ import annotations

from dataclasses import replace

from analysis.report.report_data import report_data
from analysis.report.sections import render_markdown
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.paths import SweepPaths


def report_text(sweep: SweepPaths) -> str:
    """Return what write_report writes to report.md, without links to pictures."""
    data = report_data(judge_sweep(sweep))
    return render_markdown(replace(data, plots={workload: [] for workload in data.selection.drawn}))
