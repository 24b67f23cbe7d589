"""Each run that failed or has no outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.pairing.pair import RESUME
from analysis.records.run import Run
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape
from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped
from launch.common.text import numbered
from launch.contract.outcomes import Outcome

LONGEST_MESSAGE = 600
"""The number of characters that the report shows of a failure's message."""


def render(report: ReportData) -> list[str]:
    lines = [
        line for result in report.shown for line in (*_failed(result), *_without_outcome(result), *_skipped(result))
    ]
    return ["## Failures", "\n".join(lines)] if lines else []


def _failed(result: CellResult) -> Iterator[str]:
    for run in result.runs:
        for number, outcome in run.failed.items():
            yield _outcome(result, run, number, outcome)
        if run.attempt is not None and run.status != "COMPLETED":
            yield _outcome(result, run, run.attempt.number, run.attempt.outcome)


def _without_outcome(result: CellResult) -> Iterator[str]:
    """Yield a line for each reason why runs have no outcome. The runs of a sweep that was cancelled early share one."""
    runs = grouped(
        ((run.status, _reason(run), run.perturbed), run.repeat) for run in result.runs if run.attempt is None
    )
    for (status, reason, perturbed), repeats in runs.items():
        yield escape(f"- **{status}** {result.name}, {_named(repeats, perturbed)}: {reason}.")


def _skipped(result: CellResult) -> Iterator[str]:
    """Yield a line for each reason why repeats were not begun."""
    for reason, repeats in grouped((reason, repeat) for repeat, reason in result.skipped.items()).items():
        yield escape(
            f"- **SKIPPED** {result.name}, {numbered('repeat', repeats)}: {reason}; `resume` with `--failed` tries again."
        )


def _named(repeats: Sequence[int], perturbed: bool) -> str:
    return "the perturbed run" if perturbed else numbered("repeat", repeats)


def _reason(run: Run) -> str:
    if run.damaged:
        return "; ".join(run.damaged)
    reason = "the last attempt was interrupted or still runs" if run.begun else "no attempt has begun"
    return f"{reason}. Fix: {RESUME}"


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
        f"{_named([run.repeat], run.perturbed)}, attempt {attempt}: {'. '.join(text.rstrip('.') for text in (message, fix) if text)}."
    )
