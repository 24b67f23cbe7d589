"""Cells that did not run, with the reasons."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.report.selection import MAXIMUM_ROWS
from launch.contract.plan import CellState

TITLES: dict[CellState, str] = {
    "not_runnable": "Cells that this host or cluster cannot run",
    "rejected": "Cells that no host can run",
}


def render(report: ReportData) -> list[str]:
    return [block for state, title in TITLES.items() for block in _cells(report, state, title)]


def _cells(report: ReportData, state: CellState, title: str) -> list[str]:
    rows = [
        (f"`{result.cell.label}`", reason.rule, reason.message, reason.remedy, reason.source)
        for result in report.sweep.results
        if result.cell.state == state
        for reason in result.cell.reasons
    ]
    if not rows:
        return []
    left_out = f"The table shows {MAXIMUM_ROWS} of {len(rows):,} reasons. report.json has all of them."
    return [
        f"## {title}",
        *([left_out] if len(rows) > MAXIMUM_ROWS else []),
        table(("cell", "rule", "reason", "fix", "source"), rows[:MAXIMUM_ROWS]),
    ]
