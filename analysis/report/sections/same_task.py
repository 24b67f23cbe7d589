"""Eager cells that should train the same model, side by side."""

from __future__ import annotations

import math

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import figure, how_to_read, table
from analysis.sweep.task_agreement import Trained

HEADER = (
    "eager cell",
    "first loss",
    "last loss",
    "largest loss difference, nats",
    "largest gradient norm difference, relative",
)
NOTE = (
    "Cells of one task compute the same model with different layouts, engines or implementations. Differences are from the "
    "first cell of each table, over all steps that both have. They give no verdict, because sums in a different order round "
    "differently."
)


def render(report: ReportData) -> list[str]:
    tables = [table(HEADER, map(_row, task)) for task in report.sweep.trained]
    return ["## One task, several configurations", *tables, *how_to_read(NOTE)] if tables else []


def _row(cell: Trained) -> list[str]:
    return [
        f"`{cell.label}`",
        f"{cell.first_loss:.6f}",
        f"{cell.last_loss:.6f}",
        f"{figure(cell.loss_difference)} at step {cell.loss_step} ({cell.steps} steps compared)",
        f"{cell.grad_norm_difference:.2g}" if math.isfinite(cell.grad_norm_difference) else "not finite",
    ]
