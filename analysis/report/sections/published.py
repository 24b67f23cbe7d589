"""The figures that the recipe quotes from others, next to those of this sweep."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table


def render(report: ReportData) -> list[str]:
    plan = report.sweep.plan
    if not plan.published:
        return []
    return [
        "## Published figures",
        "The recipe quotes figures that others published. Hardware, releases, data and settings may differ from this sweep's.",
        table(("figure", "step"), [*plan.published.items(), *_own(report)]),
    ]


def _own(report: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the step times of each passing graphed cell and of its eager baseline."""
    for result in report.ran:
        loss, speed = result.verdict, result.speed.speedup
        if loss and result.passes and speed and not result.speed.timing_doubt:
            yield f"this sweep: {result.name}, eager", f"{speed.eager_ms:.4g} ms"
            graphed = f"this sweep: {result.name}, graphed ({loss.verdict}, {speed.verdict})"
            yield graphed, f"{speed.graphed_ms:.4g} ms"
