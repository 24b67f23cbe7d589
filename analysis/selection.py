"""Which workloads a report draws: plots stay bounded however large a sweep is, and the worst news is drawn first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.compare import CellResult
from analysis.loss import WORDS
from analysis.plots import MAXIMUM_CELLS

MAXIMUM_WORKLOADS = 12


@dataclass(frozen=True)
class Selection:
    """``drawn`` holds, by workload id, the eager cell and the graphed cells to draw; labels name what is left out."""

    drawn: dict[str, tuple[CellResult, ...]]
    left_out_workloads: tuple[str, ...]
    left_out_cells: tuple[str, ...]


def select(results: Sequence[CellResult]) -> Selection:
    """The workloads with the worst verdicts and the largest loss differences first, then in the plan's order."""
    workloads: dict[str, list[CellResult]] = {}
    for result in results:
        if any(run.attempt for run in result.runs):
            workloads.setdefault(result.cell.workload_id, []).append(result)
    ordered = sorted(workloads, key=lambda workload: min(_rank(result) for result in workloads[workload]))
    drawn, left_out = {}, []
    for workload in ordered[:MAXIMUM_WORKLOADS]:
        eager = [result for result in workloads[workload] if not result.cell.graphed]
        graphed = sorted((result for result in workloads[workload] if result.cell.graphed), key=_rank)
        drawn[workload] = (*eager, *graphed[:MAXIMUM_CELLS])
        left_out += [result.cell.label for result in graphed[MAXIMUM_CELLS:]]
    return Selection(drawn, tuple(workload_label(workloads[w]) for w in ordered[MAXIMUM_WORKLOADS:]), tuple(left_out))


def workload_label(results: Sequence[CellResult]) -> str:
    """A workload goes by the label of its eager cell."""
    return next((r.cell.label for r in results if not r.cell.graphed), results[0].cell.label)


def _rank(result: CellResult) -> tuple[int, float]:
    """Smaller is worse news."""
    severity = (
        WORDS.index(result.verdict.word)
        if result.verdict
        else len(WORDS)
        if result.unexpected or result.unsound
        else -1
    )
    difference = result.max_loss_difference or 0.0
    return -severity, -difference if math.isfinite(difference) else -math.inf
