"""The figures that the recipe quotes from others, next to those of this sweep."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult


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
        speed = result.speed.speedup
        if result.passes and speed and not result.speed.timing_doubt:
            yield f"this sweep: {result.name}, eager", f"{speed.eager_ms:.4g} ms"
            yield f"this sweep: {result.name}, graphed ({_verdicts(result)})", f"{speed.graphed_ms:.4g} ms"


def _verdicts(result: CellResult) -> str:
    assert result.verdict is not None and result.speed.speedup is not None
    return f"{result.verdict.verdict}, {result.speed.speedup.verdict}"
