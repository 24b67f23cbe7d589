"""The losses of the eager cells of each task: layouts, engines and dispatchers that should train the same model.

There is no verdict, because another order of sums rounds differently and no margin is calibrated across workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped


@dataclass(frozen=True)
class Trained:
    """The losses of an eager cell, in nats: of its first and last step, and their mean over all ``steps``."""

    label: str
    first_loss: float
    last_loss: float
    mean_loss: float
    steps: int


def trained_cells(results: Sequence[CellResult]) -> tuple[tuple[Trained, ...], ...]:
    """Return the eager cells that ended well, for each task with more than one."""
    tasks = grouped(
        (result.cell.task_id, Trained(result.cell.label, losses.first[0], losses.last, losses.mean, losses.steps))
        for result in results
        if not result.cell.graphed and (losses := result.loss.trajectory)
    )
    return tuple(tuple(cells) for cells in tasks.values() if len(cells) > 1)
