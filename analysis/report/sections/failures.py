"""Each run that failed or has no outcome."""

from __future__ import annotations

from analysis.records.run import Run
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape
from analysis.sweep.cell_results import CellResult
from launch.contract.outcomes import Outcome

LONGEST_MESSAGE = 600
"""The number of characters that the report shows of a failure's message."""


def render(report: ReportData) -> list[str]:
    lines = []
    for result in report.shown:
        for run in result.runs:
            lines += [_outcome(result, run, number, outcome) for number, outcome in run.failed.items()]
            lines += [_failure(result, run)] if run.status != "COMPLETED" else []
    return ["## Failures", "\n".join(lines)] if lines else []


def _failure(result: CellResult, run: Run) -> str:
    if run.attempt is not None:
        return _outcome(result, run, run.attempt.number, run.attempt.outcome)
    status = f"- **{run.status}** {result.name}, repeat {run.repeat}"
    if run.damaged:
        return escape(f"{status}: {'; '.join(run.damaged)}.")
    reason = "no attempt has an outcome; it was interrupted or is still running" if run.begun else "it has not started"
    return f"{status}: {reason}. Fix: `python -m orchestrator resume`."


def _outcome(result: CellResult, run: Run, attempt: int, outcome: Outcome) -> str:
    rank = "" if outcome.rank is None else f", rank {outcome.rank}"
    expected = " (as expected)" if outcome.matches(result.cell.expect) else ""
    failure_class = f", class {outcome.failure_class}" if outcome.failure_class else ""
    message = escape(outcome.message.replace("`", "'"))
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "... (all of it is in report.json)"
    fix = f"Fix: {outcome.remedy}" if outcome.remedy else ""
    return escape(
        f"- **{outcome.outcome}**{expected} in phase {outcome.phase}{rank}{failure_class}; {result.name}, "
        f"repeat {run.repeat}, attempt {attempt}: {'. '.join(text.rstrip('.') for text in (message, fix) if text)}."
    )
