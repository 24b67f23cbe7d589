"""Compare the eager cells of one task: layouts, engines and dispatchers that should train the same model.

There is no verdict, because another order of sums rounds differently and no margin is calibrated across workloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.records.run import Run
from analysis.records.steps import Steps, no_steps
from launch.contract.plan import Cell


@dataclass(frozen=True)
class Trained:
    """The first run of an eager cell. Differences are from the task's first cell, over the ``steps`` steps that both have."""

    label: str
    first_loss: float
    last_loss: float
    steps: int
    loss_difference: float
    """The largest difference, in nats."""
    loss_step: int
    """The step of the largest loss difference."""
    grad_norm_difference: float
    """The largest difference, relative to the gradient norm of the first cell."""


class TaskComparison:
    """Compare the eager cells of each task with its first one.

    Callers add cells task by task, so that only the steps of one cell stay in memory.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, list[Trained]] = {}
        self._first: tuple[str, Steps] = "", no_steps()

    def add(self, cells: Iterable[tuple[Cell, Sequence[Run]]]) -> None:
        """Add ``cells`` with their runs, whose attempts must still contain their steps."""
        for cell, runs in cells:
            attempt = next((run.attempt for run in runs if run.attempt), None)
            if not cell.graphed and attempt is not None and len(attempt.steps):
                self._add(cell.task_id, cell.label, attempt.steps)

    def _add(self, task: str, label: str, steps: Steps) -> None:
        if self._first[0] != task:
            self._first = task, steps
        trained = _trained(label, steps, self._first[1])
        self._tasks.setdefault(task, []).extend([trained] if trained else [])

    @property
    def tasks(self) -> tuple[tuple[Trained, ...], ...]:
        """The eager cells that ran, for each task with more than one, in the order of ``add``."""
        return tuple(tuple(cells) for cells in self._tasks.values() if len(cells) > 1)


def _trained(label: str, recorded: Steps, first: Steps) -> Trained | None:
    """Compare the ``recorded`` steps of a cell with the ``first`` cell's; return None without a common step."""
    _, own, other = np.intersect1d(recorded.step, first.step, return_indices=True)
    if not own.size:
        return None
    steps, reference = recorded.take(own), first.take(other)
    with np.errstate(invalid="ignore", divide="ignore"):
        losses = np.abs(steps.loss - reference.loss)
        norms = np.abs(steps.grad_norm - reference.grad_norm) / np.abs(reference.grad_norm)
    worst = int(np.argmax(np.where(np.isnan(losses), np.inf, losses)))
    return Trained(
        label,
        float(steps.loss[0]),
        float(steps.loss[-1]),
        len(steps),
        float(losses[worst]),
        int(steps.step[worst]),
        float(np.max(np.where(reference.grad_norm == steps.grad_norm, 0.0, norms))),
    )
