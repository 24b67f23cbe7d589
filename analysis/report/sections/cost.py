"""The cost of the sweep: the time of its runs on all ranks."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.sweep.cell_results import CellResult


def render(report: ReportData) -> list[str]:
    eager, graphed = (
        sum(result.seconds * _ranks(result) for result in report.ran if result.cell.graphed == side) / 3600
        for side in (False, True)
    )
    if not eager + graphed:
        return []
    unit = "GPU hours" if any(result.on_gpu for result in report.ran) else "hours of CPU ranks"
    others = sum(_other_seconds(result) * _ranks(result) for result in report.ran) / 3600
    return [
        "## What this cost",
        f"The attempts that count took {eager + graphed:.3g} {unit}: {eager:.3g} eager, {graphed:.3g} graphed."
        + (f" Other attempts took {others:.3g} {unit}." if others else ""),
    ]


def _ranks(result: CellResult) -> int:
    return result.spec.parallelism.world_size


def _other_seconds(result: CellResult) -> float:
    outcomes = [one.outcome for run in result.runs for one in run.partial if one.outcome]
    return sum(max(0.0, outcome.ended - outcome.started) for outcome in outcomes)
