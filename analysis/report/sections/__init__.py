"""The sections of report.md. A section is a file with one function ``render`` and a line in SECTIONS."""

from __future__ import annotations

from collections.abc import Callable

from analysis.report.report_data import ReportData
from analysis.report.sections import (
    cells,
    cost,
    evidence,
    expected_changes,
    failures,
    hardware_limit,
    memory,
    not_run,
    plots,
    provenance,
    published,
    ranking,
    speed,
    speedup_bound,
    step_checks,
    summary,
    wandb_runs,
)

Section = Callable[[ReportData], list[str]]
"""A function that returns blocks of Markdown, or none if there is nothing to show. It makes no decisions."""

SECTIONS: tuple[Section, ...] = (
    summary.render,
    cells.render,
    plots.render,
    step_checks.render,
    ranking.render,
    speed.render,
    published.render,
    speedup_bound.render,
    hardware_limit.render,
    memory.render,
    expected_changes.render,
    not_run.render,
    failures.render,
    evidence.render,
    cost.render,
    wandb_runs.render,
    provenance.render,
)


def render_markdown(report: ReportData) -> str:
    return "\n\n".join(block for render in SECTIONS for block in render(report)) + "\n"
