"""How a graphed cell stands by its records, for who looks for a failure: it fails so, or otherwise, passes, or neither is
known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.sweep.cell_results import CellResult, PairResult
from analysis.verdict.verdict import Verdict
from launch.common.text import one_line
from launch.contract.outcomes import Outcome
from orchestrator.bisect.scope_candidates import Status

NUMBERS = "DIVERGED"
"""The failure of who computed something else, to the end (its verdict) or to the first NaN (NUMERIC)."""


@dataclass(frozen=True)
class FailureStatus:
    """How a set stands, and what became of its runs, in words. ``failure`` is what tells its failure from others: NUMBERS,
    or an outcome and its class; empty where it did not fail."""

    status: Status
    words: str
    failure: str = ""


def classify_failure(result: CellResult, sought: str | None = None) -> FailureStatus | None:
    """How a graphed cell stands by its records; None while a run of it, or an eager one beside it, has no outcome.

    Fails: a run failed as is ``sought`` (Stand.failure), or in any way where that is None, of which NUMBERS goes first; a
    failure of one repeat counts. A run fails that DIVERGED, or ended badly where its eager twin did not, though not for want
    of a setting or of what the host has. Passes: every run passes. Where an end is sought, and not NUMBERS, it is enough
    that runs end well and replay is proven.
    """
    stands = [_of_pair(pair, sought or NUMBERS) for pair in result.pairs]
    known = [_as_sought(stand, sought) for stand in stands if stand is not None]
    if len(known) < len(stands) or not known:
        return None
    order: Sequence[Status] = ("fails", "fails otherwise", "unclear", "passes")
    return min(known, key=lambda stand: (order.index(stand.status), stand.failure != NUMBERS))


def _as_sought(stand: FailureStatus, sought: str | None) -> FailureStatus:
    other = stand.status == "fails" and sought not in (None, stand.failure)
    return replace(stand, status="fails otherwise") if other else stand


def _of_pair(pair: PairResult, sought: str) -> FailureStatus | None:
    eager = pair.eager.attempt if pair.eager is not None else None
    graphed = pair.graphed.attempt
    if eager is None or graphed is None:
        return None
    if not (eager.outcome.is_informative and graphed.outcome.is_informative):
        return None
    if not eager.outcome.results_intact:
        ended = (
            f"the eager twin ended {eager.outcome.outcome} in {eager.outcome.phase}: graphs are not what it is about"
        )
        return FailureStatus("unclear", ended)
    if not graphed.outcome.results_intact:
        return _of_end(graphed.outcome, pair.verdict)
    verdict, words = pair.verdict, _said(pair.verdict)
    if verdict.verdict == "DIVERGED":
        return FailureStatus("fails", words, NUMBERS)
    ended_well = sought != NUMBERS and verdict.verdict == "INCONCLUSIVE" and not pair.graphed.failed
    return FailureStatus("passes" if verdict.passes or ended_well else "unclear", words)


def _of_end(outcome: Outcome, verdict: Verdict) -> FailureStatus:
    """Of a graphed run that left no whole curve, beside an eager one that did."""
    if outcome.outcome == "NUMERIC" and verdict.verdict != "DIVERGED":
        return FailureStatus("unclear", _said(verdict))  # as where another eager run has the NaN too
    said = f"{outcome.outcome} in {outcome.phase}"
    words = f"{said} ({one_line(outcome.message)})" if outcome.message else said
    return (
        FailureStatus("unclear", words)
        if outcome.row.cause == "setup"
        else FailureStatus("fails", words, _failure(outcome))
    )


def _said(verdict: Verdict) -> str:
    return one_line(f"{verdict.verdict}: {verdict.reason}" if verdict.reason else verdict.verdict)


def _failure(outcome: Outcome) -> str:
    return NUMBERS if outcome.outcome == "NUMERIC" else f"{outcome.outcome} ({outcome.failure_class or 'no class'})"


def find_result(results: Sequence[CellResult], cell_id: str) -> CellResult:
    return next(result for result in results if result.cell.cell_id == cell_id)
