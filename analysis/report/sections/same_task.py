"""Eager cells that should train the same model, side by side."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import how_to_read, table
from analysis.sweep.task_agreement import Trained, trained_cells

HEADER = ("eager cell", "first loss", "last loss", "mean loss", "steps")
NOTE = (
    "Cells of one task compute the same model with different layouts, engines or implementations. Their losses give no verdict, "
    "because sums in a different order round differently. A cell whose losses differ by more than that is not ranked."
)


def render(report: ReportData) -> list[str]:
    tables = [table(HEADER, map(_row, task)) for task in trained_cells(report.sweep.results)]
    return ["## One task, several configurations", *tables, *how_to_read(NOTE)] if tables else []


def _row(cell: Trained) -> list[str]:
    return [
        f"`{cell.label}`",
        *(f"{loss:.6f}" for loss in (cell.first_loss, cell.last_loss, cell.mean_loss)),
        str(cell.steps),
    ]
