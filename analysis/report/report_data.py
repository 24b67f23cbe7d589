"""Everything that the files of a report are rendered from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.report.selection import Selection, select
from analysis.report.summary import Summary, summarise
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_sweep import SweepResults


@dataclass(frozen=True)
class ReportData:
    sweep: SweepResults
    summary: Summary
    selection: Selection
    plots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files by workload, relative to the report."""
    undrawn: Mapping[str, str] = field(default_factory=dict)
    """Why a plot cannot be drawn, by its file."""

    @property
    def ran(self) -> list[CellResult]:
        """The cells that ran or were to run, in the plan's order."""
        return [result for result in self.sweep.results if result.cell.state == "run"]

    @property
    def shown(self) -> tuple[CellResult, ...]:
        """The cells that tables hold."""
        return self.selection.shown


def report_data(sweep: SweepResults) -> ReportData:
    return ReportData(sweep, summarise(sweep.results), select(sweep.results))
