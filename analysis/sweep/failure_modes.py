"""Group the failures of a sweep by kind: cells that rules rejected before they ran, and failures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped
from launch.contract.outcomes import Outcome


@dataclass(frozen=True)
class FailureMode:
    """One kind of failure. ``name`` is a rule's id or a failure class.

    ``ending`` says how it ended, such as "CUDA_OOM in capture" or "rejected by a rule". ``graphed`` and ``eager`` are the
    labels of the affected cells. ``message`` and ``remedy`` are those of the first cell.
    """

    name: str
    ending: str
    message: str
    remedy: str
    graphed: tuple[str, ...]
    eager: tuple[str, ...]


def failure_modes(results: Sequence[CellResult]) -> tuple[FailureMode, ...]:
    """Return failures of runs, the most frequent first, then rejections. Equally frequent ones keep the plan's order."""
    failed = grouped(
        (key, (result, outcome.message, outcome.remedy)) for result in results for key, outcome in _failures(result)
    )
    rejected = grouped(
        ((reason.rule, "rejected by a rule"), (result, reason.message, reason.remedy))
        for result in results
        for reason in (result.cell.reasons if result.cell.state == "rejected" else ())
    )
    by_count = sorted(failed.items(), key=lambda item: -len(item[1]))
    return tuple(_mode(key, found) for key, found in (*by_count, *rejected.items()))


def _failures(result: CellResult) -> list[tuple[tuple[str, str], Outcome]]:
    """Return one outcome of each kind, so a cell that fails in the same way in several repeats counts once."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    for run in result.runs:
        if run.attempt is not None and not run.attempt.outcome.results_intact:
            outcome = run.attempt.outcome
            outcomes.setdefault(
                (outcome.failure_class or outcome.outcome, f"{outcome.outcome} in {outcome.phase}"), outcome
            )
    return list(outcomes.items())


def _mode(key: tuple[str, str], found: Sequence[tuple[CellResult, str, str]]) -> FailureMode:
    name, ending = key
    _, message, remedy = found[0]
    graphed = tuple(result.cell.label for result, _, _ in found if result.cell.graphed)
    eager = tuple(result.cell.label for result, _, _ in found if not result.cell.graphed)
    return FailureMode(name, ending, message, remedy, graphed, eager)
