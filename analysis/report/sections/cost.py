"""What the sweep cost: the time of its runs on all ranks, and in which phases it went."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult
from launch.contract.records.events import PHASES


def render(report: ReportData) -> list[str]:
    sides = [[result for result in report.ran if result.cell.graphed == graphed] for graphed in (False, True)]
    if not (total := sum(map(_hours, sides))):
        return []
    unit = "GPU-hours" if any(result.on_gpu for result in report.ran) else "hours of CPU ranks"
    eager, graphed = (f"{_hours(side):.3g}" for side in sides)
    found = [phase for phase in PHASES if any(phase in result.phase_seconds for result in report.ran)]
    rows = [[phase, *(f"{_seconds(side, phase):.1f} s" for side in sides)] for phase in found]
    return [
        "## What this cost",
        f"{total:.3g} {unit} in the attempts that count: {eager} eager, {graphed} graphed. The table has the seconds of rank 0.",
        *([table(("phase", "eager runs", "graphed runs"), rows)] if rows else []),
    ]


def _hours(results: Sequence[CellResult]) -> float:
    return sum(result.seconds * result.spec.parallelism.world_size for result in results) / 3600


def _seconds(results: Sequence[CellResult], phase: str) -> float:
    return sum(seconds for result in results for name, seconds in result.phase_seconds.items() if name == phase)
