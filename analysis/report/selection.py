"""Select the workloads that a report shows and draws, the worst news first, so that the report of a large sweep is readable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.report.charts import MAXIMUM_CELLS
from analysis.sweep.cell_results import CellResult
from analysis.verdict.verdict import VERDICTS
from launch.common.grouped import grouped

MAXIMUM_WORKLOADS = 12
MAXIMUM_ROWS = 200
"""The most cells in a table. report.json has all cells."""


@dataclass(frozen=True)
class Selection:
    """The cells that a report shows.

    ``shown`` has the cells in tables, in the plan's order. ``drawn`` has the eager and the graphed cells to draw, by workload
    id. The other fields have the labels of workloads and cells that plots leave out.
    """

    shown: tuple[CellResult, ...]
    drawn: dict[str, tuple[CellResult, ...]]
    left_out_workloads: tuple[str, ...]
    left_out_cells: tuple[str, ...]


def select(results: Sequence[CellResult]) -> Selection:
    """Select the workloads with the worst verdicts and the largest loss differences first, then in the plan's order."""
    ran = [result for result in results if result.cell.state == "run"]
    shown = _first_cells(_by_severity(ran))
    workloads = _by_severity([result for result in ran if any(run.attempt for run in result.runs)])
    drawn, left_out = {}, []
    for workload, cells in list(workloads.items())[:MAXIMUM_WORKLOADS]:
        graphed = sorted((result for result in cells if result.cell.graphed), key=_severity)
        hidden = {result.cell.cell_id for result in graphed[MAXIMUM_CELLS:]}
        left_out += [result.cell.label for result in graphed[MAXIMUM_CELLS:]]
        eager_first = sorted(cells, key=lambda result: result.cell.graphed)
        drawn[workload] = tuple(result for result in eager_first if result.cell.cell_id not in hidden)
    return Selection(
        shown=tuple(result for result in ran if result.cell.cell_id in shown),
        drawn=drawn,
        left_out_workloads=tuple(workload_label(cells) for cells in list(workloads.values())[MAXIMUM_WORKLOADS:]),
        left_out_cells=tuple(left_out),
    )


def _by_severity(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Return the cells of each workload, the worst workload first."""
    workloads = grouped((result.cell.workload_id, result) for result in results)
    return dict(sorted(workloads.items(), key=lambda item: min(map(_severity, item[1]))))


def _first_cells(workloads: Mapping[str, Sequence[CellResult]]) -> set[str]:
    """Return the ids of the cells in a table: whole workloads, unless the first one alone is too large."""
    shown: list[str] = []
    for cells in workloads.values():
        if shown and len(shown) + len(cells) > MAXIMUM_ROWS:
            break
        shown += [result.cell.cell_id for result in cells[:MAXIMUM_ROWS]]
    return set(shown)


def workload_label(results: Sequence[CellResult]) -> str:
    """Return the label of the workload's eager cell, or of its first cell."""
    return next((r.cell.label for r in results if not r.cell.graphed), results[0].cell.label)


def _severity(result: CellResult) -> tuple[int, float]:
    """Return a key to sort by: smaller is worse news."""
    if result.verdict:
        severity = VERDICTS.index(result.verdict.verdict)
    else:
        severity = len(VERDICTS) if result.unexpected or result.integrity.unsound_records else -1
    difference = result.max_loss_difference or 0.0
    return -severity, -difference if math.isfinite(difference) else -math.inf
