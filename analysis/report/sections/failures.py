"""Each failure once, with its runs, and the runs that have no outcome."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis.pairing.pair import RESUME, SUSPECT_GRAPHS, WHY_SKIPPED, only_graphs_end_early
from analysis.records.run import Run
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import escape
from analysis.sweep.cell_results import CellResult
from analysis.sweep.failure_modes import FailureMode, failure_modes, kind_of
from launch.common.grouped import grouped
from launch.common.text import first_names, numbered
from launch.contract.outcomes import Outcome

LONGEST_MESSAGE = 600
"""The number of characters that the report shows of a failure's message."""
MOST_NAMED = 12
"""The most cells that a failure names."""


class _Failed(NamedTuple):
    """An attempt that failed."""

    result: CellResult
    run: Run
    attempt: int
    outcome: Outcome

    @property
    def failure(self) -> tuple[object, ...]:
        """What attempts with the same failure share: their messages may differ in numbers, such as bytes and addresses."""
        outcome, message = self.outcome, re.sub(r"0x[0-9a-f]+|\d+", "0", self.outcome.message)
        return (
            *kind_of(outcome),
            outcome.matches(self.result.cell.expect),
            message,
            outcome.remedy,
            self.only_graphs_fail,
        )

    @property
    def only_graphs_fail(self) -> bool:
        """Whether it ended before its last step, and all eager runs of its workload took theirs."""
        eager = (pair.eager for pair in self.result.pairs if pair.eager)
        return self.result.cell.graphed and only_graphs_end_early(self.outcome, eager)


def render(report: ReportData) -> list[str]:
    modes = {(mode.name, mode.ending): mode for mode in failure_modes(report.sweep.results)}
    failed = grouped((one.failure, one) for result in report.shown for one in _failed(result))
    lines = [_failure(attempts, modes) for attempts in failed.values()]
    lines += [line for result in report.shown for line in (*_without_outcome(result), *_skipped(result))]
    return ["## Failures", "\n".join(lines)] if lines else []


def _failed(result: CellResult) -> Iterator[_Failed]:
    for run in result.runs:
        yield from (_Failed(result, run, number, outcome) for number, outcome in run.failed.items())
        if run.attempt is not None and run.status != "COMPLETED":
            yield _Failed(result, run, run.attempt.number, run.attempt.outcome)


def _failure(attempts: Sequence[_Failed], modes: Mapping[tuple[str, str], FailureMode]) -> str:
    """Describe a failure by its first attempt, and name all of its attempts."""
    result, _, _, outcome = attempts[0]
    expected = " (as expected)" if outcome.matches(result.cell.expect) else ""
    failure_class = f", class {outcome.failure_class}" if outcome.failure_class else ""
    message = escape(outcome.message.replace("`", "'"))
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "... (all of it is in report.json)"
    fix, mode = f"Fix: {outcome.remedy}" if outcome.remedy else "", modes.get(kind_of(outcome))
    said = (message, fix, _beside_eager(mode) if mode else "")
    if attempts[0].only_graphs_fail:
        said = (message, f"But {SUSPECT_GRAPHS}", f"Fix: {WHY_SKIPPED}")
    return escape(
        f"- **{outcome.outcome}**{expected} in phase {outcome.phase}{failure_class}; {_where(attempts)}: "
        f"{'. '.join(text.rstrip('.') for text in said if text)}."
    )


def _where(attempts: Sequence[_Failed]) -> str:
    """Return "A1, repeats 0, 1, attempt 1, rank 0; A2, repeat 0, attempt 1, rank 3"."""
    repeats = grouped(
        ((one.result.name, one.run.perturbed, one.attempt, one.outcome.rank), one.run.repeat) for one in attempts
    )
    names = [
        f"{name}, {_named(numbers, perturbed)}, attempt {attempt}{'' if rank is None else f', rank {rank}'}"
        for (name, perturbed, attempt, rank), numbers in repeats.items()
    ]
    return first_names(names, MOST_NAMED)


def _beside_eager(mode: FailureMode) -> str:
    """Say whether eager runs fail in this way too."""
    if not mode.eager:
        return "No eager run fails in this way"
    return f"{'Eager runs fail in the same way' if mode.graphed else 'Only eager runs fail in this way'}: graphs are not the cause"


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
    reason = "the last attempt was interrupted, still runs or has not begun" if run.begun else "no attempt has begun"
    return f"{reason}. Fix: {RESUME}"
