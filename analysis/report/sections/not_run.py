"""The reasons why cells did not run, each with its cells."""

from __future__ import annotations

from dataclasses import astuple

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.report.selection import MAXIMUM_ROWS
from launch.common.grouped import grouped
from launch.common.text import first_names
from launch.contract.plan import CellState

TITLES: dict[CellState, str] = {
    "not_runnable": "Cells that this host or cluster cannot run",
    "rejected": "Cells that no host can run",
}


def render(report: ReportData) -> list[str]:
    return [block for state, title in TITLES.items() for block in _cells(report, state, title)]


def _cells(report: ReportData, state: CellState, title: str) -> list[str]:
    found = grouped(
        (reason, f"`{result.cell.label}`")
        for result in report.sweep.results
        if result.cell.state == state
        for reason in result.cell.reasons
    )
    if not found:
        return []
    rows = [(first_names(cells), *astuple(reason)) for reason, cells in found.items()][:MAXIMUM_ROWS]
    left_out = f"The table shows {MAXIMUM_ROWS} of {len(found):,} reasons. report.json has all of them."
    return [
        f"## {title}",
        *([left_out] if len(found) > MAXIMUM_ROWS else []),
        table(("cells", "rule", "reason", "fix", "source"), rows),
    ]
