"""Classify how a graphed cell fails, by its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.sweep.cell_results import CellResult, PairResult
from analysis.sweep.judge_sweep import judge_workload
from analysis.verdict.verdict import Verdict
from launch.common.text import one_line
from launch.contract.outcomes import Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan
from orchestrator.bisect.scope_candidates import Status
from orchestrator.errors import InputError, input_error

DIVERGED = "DIVERGED"
"""The failure of a run with different results, which ended well (by its verdict) or at the first NaN (NUMERIC)."""
NO_OUTCOME = "a run has no outcome yet"
_SEVERITY: Sequence[Status] = ("fails", "fails otherwise", "unclear", "passes")


@dataclass(frozen=True)
class FailureStatus:
    """Whether a set of captured parts fails, and how its runs ended.

    ``failure`` is DIVERGED, or an outcome with its failure class. It is empty if the set did not fail.
    """

    status: Status
    description: str
    failure: str = ""


def classify_failure(result: CellResult, sought: str | None = None) -> FailureStatus | None:
    """Return the worst status of the cell's pairs, or None while a graphed run or its eager baseline has no outcome.

    It is "unclear" if no run was begun, because another run has failed.

    A graphed run fails if it DIVERGED. It also fails if it ended badly, its eager baseline did not, and the cause is neither a
    setting nor missing hardware. It passes if its verdict passes. If ``sought`` is a failure other than DIVERGED, a run that
    ended well passes with an INCONCLUSIVE verdict, too.

    Args:
        sought: the failure (FailureStatus.failure) that counts as "fails". None if every failure does, DIVERGED first.
    """
    if not result.runs and result.skipped:
        return FailureStatus("unclear", next(iter(result.skipped.values())))
    pairs = [_classify_pair(pair, sought or DIVERGED) for pair in result.pairs]
    known = [_compare_to_sought(status, sought) for status in pairs if status is not None]
    if len(known) < len(pairs) or not known:
        return None
    return min(known, key=lambda status: (_SEVERITY.index(status.status), status.failure != DIVERGED))


def _compare_to_sought(status: FailureStatus, sought: str | None) -> FailureStatus:
    differs = status.status == "fails" and sought not in (None, status.failure)
    return replace(status, status="fails otherwise") if differs else status


def _classify_pair(pair: PairResult, sought: str) -> FailureStatus | None:
    eager = pair.eager.attempt if pair.eager is not None else None
    graphed = pair.graphed.attempt
    if eager is None or graphed is None:
        return None
    if not (eager.outcome.is_informative and graphed.outcome.is_informative):
        return None
    if not eager.outcome.results_intact:
        ended = (
            f"the eager baseline ended {eager.outcome.outcome} in {eager.outcome.phase}, so graphs are not the cause"
        )
        return FailureStatus("unclear", ended)
    if not graphed.outcome.results_intact:
        return _classify_end(graphed.outcome, pair.verdict)
    verdict, description = pair.verdict, _describe(pair.verdict)
    if verdict.verdict == DIVERGED:
        return FailureStatus("fails", description, DIVERGED)
    ended_well = sought != DIVERGED and verdict.verdict == "INCONCLUSIVE" and not pair.graphed.failed
    return FailureStatus("passes" if verdict.passes or ended_well else "unclear", description)


def _classify_end(outcome: Outcome, verdict: Verdict) -> FailureStatus:
    """Classify a graphed run without a complete loss curve. Its eager baseline has one."""
    is_numeric = outcome.outcome == "NUMERIC"
    # Another eager run may have the NaN too.
    if is_numeric and verdict.verdict != DIVERGED:
        return FailureStatus("unclear", _describe(verdict))
    description = f"{outcome.outcome} in {outcome.phase}"
    if outcome.message:
        description += f" ({one_line(outcome.message)})"
    if outcome.row.cause == "setup":
        return FailureStatus("unclear", description)
    failure = DIVERGED if is_numeric else f"{outcome.outcome} ({outcome.failure_class or 'no class'})"
    return FailureStatus("fails", description, failure)


def _describe(verdict: Verdict) -> str:
    return one_line(f"{verdict.verdict}: {verdict.reason}" if verdict.reason else verdict.verdict)


def judge_cell(sweep: SweepPaths, plan: Plan, cell: Cell) -> CellResult:
    """Judge a graphed cell by the records of ``sweep``.

    Raises:
        InputError: the cell is eager.
    """
    if not cell.graphed:
        raise input_error(cell.cell_id, "is eager: it captures nothing", "name a run of a graphed cell")
    results = judge_workload(sweep, plan, cell.workload_id)
    return next(result for result in results if result.cell.cell_id == cell.cell_id)


def cause_unknown(plan: Plan, cell: Cell, status: FailureStatus | None, effect: str, fix: str) -> InputError:
    """Return the error for a cell if it is not known that its graphs have ``effect``."""
    description = status.description if status else NO_OUTCOME
    message = f"graphs are not known to {effect}: {description}"
    return input_error(cell.cell_id, message, fix if status else f"resume {plan.name}, then bisect")
