"""The data from which all files of a report are rendered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from analysis.records.wandb_runs import WandbRuns
from analysis.report.selection import Selection, select
from analysis.report.summary import Summary, summarise
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_sweep import SweepResults

SWEEP = "sweep"
"""The key of the plots of a whole sweep. Other plots have a workload's id."""


@dataclass(frozen=True)
class ReportData:
    sweep: SweepResults
    summary: Summary
    selection: Selection
    plots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files by workload, or by :data:`SWEEP`, relative to the report."""
    undrawn: Mapping[str, str] = field(default_factory=dict)
    """Why a plot cannot be drawn, by its file."""
    wandb: WandbRuns = field(default_factory=WandbRuns)

    @property
    def ran(self) -> list[CellResult]:
        """The cells that ran or were to run, in the plan's order."""
        return [result for result in self.sweep.results if result.cell.state == "run"]

    @property
    def shown(self) -> tuple[CellResult, ...]:
        """The cells that tables show."""
        return self.selection.shown


def report_data(sweep: SweepResults) -> ReportData:
    sweep = replace(sweep, results=_named(sweep.results))
    summary = summarise(sweep.results, sweep.plan.margins)
    return ReportData(sweep, summary, select(sweep.results))


def _named(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """Return the results with short names for the cells to run: a letter per workload, and a number, 0 for the eager cell."""
    numbers: dict[str, Iterator[int]] = {}
    named = []
    for result in results:
        if result.cell.state == "run":
            number = numbers.setdefault(result.cell.workload_id, itertools.count(1))
            letters = _letters(list(numbers).index(result.cell.workload_id))
            result = replace(result, name=f"{letters}{next(number) if result.cell.graphed else 0}")
        named.append(result)
    return tuple(named)


def _letters(number: int) -> str:
    """Return "A" for 0, "Z" for 25 and "AA" for 26, like the columns of a spreadsheet."""
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)
