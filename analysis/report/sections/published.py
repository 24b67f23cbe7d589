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
    """Yield the step times of each graphed cell whose losses pass or are INCONCLUSIVE, with those of its eager baseline."""
    for result in report.ran:
        loss, speed = result.verdict, result.speed.speedup
        usable = loss and (result.passes or loss.verdict == "INCONCLUSIVE") and not result.speed.timing_doubt
        if loss and usable and speed:
            verdicts = f"{loss.verdict}, {speed.verdict}" if result.passes else loss.verdict
            figure = f"this sweep: {result.name} `{result.spec.cuda_graph.label}`, eager to graphed ({verdicts})"
            yield figure, f"{speed.eager_ms:.4g} to {speed.graphed_ms:.4g} ms"
