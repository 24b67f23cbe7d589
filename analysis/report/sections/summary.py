"""The title, what came of the sweep in a few sentences, and the exit code."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape


def render(report: ReportData) -> list[str]:
    title = f"# Validation report: {escape(report.sweep.plan.name)}"
    return [title, escape(report.summary.text), f"Exit code {report.summary.exit_code}."]
