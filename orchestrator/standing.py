"""How a graphed cell stands by its records, for who looks for a failure: it fails, passes, or neither is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from analysis.compare import CellResult
from analysis.pair import PairResult
from launch.failures import is_infrastructure
from launch.record import OutcomeName
from orchestrator.bisection import Standing

_REFUSED: tuple[OutcomeName, ...] = ("CONFIG", "ENVIRONMENT")
"""Ends that say of settings or of the host that they cannot do what was asked, and nothing of what is captured."""


@dataclass(frozen=True)
class Stand:
    """How a set stands, and what became of its runs, in words."""

    standing: Standing
    words: str


def stand_of(result: CellResult, *, numbers: bool) -> Optional[Stand]:
    """How a graphed cell stands by its records; None while a run of it, or an eager one beside it, has no outcome.

    Fails: a run DIVERGED, or ended badly where its eager twin did not, though not for want of a setting or of what the host
    has; a failure of one repeat counts. Passes: every run passes. Where the failure looked for is an end (``numbers``
    False), it is enough that runs end well and replay is proven.
    """
    stands = [_of_pair(pair, numbers) for pair in result.pairs]
    known = [stand for stand in stands if stand is not None]
    if len(known) < len(stands) or not known:
        return None
    order: Sequence[Standing] = ("fails", "unclear", "passes")
    return min(known, key=lambda stand: order.index(stand.standing))


def _of_pair(pair: PairResult, numbers: bool) -> Optional[Stand]:
    eager = pair.eager.attempt if pair.eager is not None else None
    graphed = pair.graphed.attempt
    if eager is None or graphed is None:
        return None
    for outcome in (eager.outcome, graphed.outcome):
        if is_infrastructure(outcome) or outcome.outcome == "CANCELLED":
            return None
    if not eager.outcome.results_intact:
        ended = (
            f"the eager twin ended {eager.outcome.outcome} in {eager.outcome.phase}: graphs are not what it is about"
        )
        return Stand("unclear", ended)
    if not graphed.outcome.results_intact:
        said = f"{graphed.outcome.outcome} in {graphed.outcome.phase}"
        words = f"{said} ({graphed.outcome.message})" if graphed.outcome.message else said
        return Stand("unclear" if graphed.outcome.outcome in _REFUSED else "fails", words)
    verdict = pair.verdict
    words = f"{verdict.word}: {verdict.reason}" if verdict.reason else verdict.word
    if verdict.word == "DIVERGED":
        return Stand("fails", words)
    ended_well = not numbers and verdict.word == "INCONCLUSIVE"
    return Stand("passes" if verdict.passes or ended_well else "unclear", words)


def computed_something_else(result: CellResult) -> bool:
    ended = [run.attempt.outcome.outcome for run in result.runs if run.attempt is not None]
    return "NUMERIC" in ended or any(pair.verdict.word == "DIVERGED" for pair in result.pairs)


def of_cell(results: Sequence[CellResult], cell_id: str) -> CellResult:
    return next(result for result in results if result.cell.cell_id == cell_id)
