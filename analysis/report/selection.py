"""Which workloads a report shows and draws: it stays readable however large a sweep is, and the worst news comes first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.report.charts import MAXIMUM_CELLS
from analysis.sweep.cell_results import CellResult
from analysis.verdict.verdict import VERDICTS

MAXIMUM_WORKLOADS = 12
MAXIMUM_ROWS = 200
"""Cells in a table; report.json holds all."""


@dataclass(frozen=True)
class Selection:
    """``drawn`` holds, by workload id, the eager cell and the graphed cells to draw; labels name what is left out.
    ``shown`` are the cells that tables hold, of those that ran or were to run, in the plan's order."""

    shown: tuple[CellResult, ...]
    drawn: dict[str, tuple[CellResult, ...]]
    left_out_workloads: tuple[str, ...]
    left_out_cells: tuple[str, ...]


def select(results: Sequence[CellResult]) -> Selection:
    """The workloads with the worst verdicts and the largest loss differences first, then in the plan's order."""
    ran = [result for result in results if result.cell.state == "run"]
    shown = _shown(_worst_first(ran))
    workloads = _worst_first([result for result in ran if any(run.attempt for run in result.runs)])
    ordered = list(workloads)
    drawn, left_out = {}, []
    for workload in ordered[:MAXIMUM_WORKLOADS]:
        eager = [result for result in workloads[workload] if not result.cell.graphed]
        graphed = sorted((result for result in workloads[workload] if result.cell.graphed), key=_rank)
        worst = {result.cell.cell_id for result in graphed[:MAXIMUM_CELLS]}
        drawn[workload] = (*eager, *(r for r in workloads[workload] if r.cell.cell_id in worst))
        left_out += [result.cell.label for result in graphed[MAXIMUM_CELLS:]]
    return Selection(
        shown=tuple(result for result in ran if result.cell.cell_id in shown),
        drawn=drawn,
        left_out_workloads=tuple(workload_label(workloads[w]) for w in ordered[MAXIMUM_WORKLOADS:]),
        left_out_cells=tuple(left_out),
    )


def _worst_first(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """The cells of each workload."""
    workloads: dict[str, list[CellResult]] = {}
    for result in results:
        workloads.setdefault(result.cell.workload_id, []).append(result)
    return dict(sorted(workloads.items(), key=lambda item: min(map(_rank, item[1]))))


def _shown(workloads: Mapping[str, Sequence[CellResult]]) -> set[str]:
    """Cells by id, no workload in part unless it alone is too large."""
    shown: list[str] = []
    for cells in workloads.values():
        if shown and len(shown) + len(cells) > MAXIMUM_ROWS:
            break
        shown += [result.cell.cell_id for result in cells[:MAXIMUM_ROWS]]
    return set(shown)


def workload_label(results: Sequence[CellResult]) -> str:
    """A workload goes by the label of its eager cell."""
    return next((r.cell.label for r in results if not r.cell.graphed), results[0].cell.label)


def _rank(result: CellResult) -> tuple[int, float]:
    """Smaller is worse news."""
    severity = (
        VERDICTS.index(result.verdict.verdict)
        if result.verdict
        else len(VERDICTS)
        if result.unexpected or result.integrity.unsound_records
        else -1
    )
    difference = result.max_loss_difference or 0.0
    return -severity, -difference if math.isfinite(difference) else -math.inf
