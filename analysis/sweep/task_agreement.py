"""Eager cells of one task beside each other: layouts, engines and ways to run a step that should train the same.

No verdict is drawn: sums in another order round otherwise, and how far that may go is not calibrated across workloads.
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
    """One eager cell's first run. Differences are from the first cell of the task, over ``steps`` that both have."""

    label: str
    first_loss: float
    last_loss: float
    steps: int
    loss_difference: float
    """The largest, in nats."""
    loss_step: int
    """Where it is."""
    grad_norm_difference: float
    """The largest, relative to the first cell's."""


class TaskComparison:
    """Of each task the eager cells, each beside the first: results are added task by task, so that the steps of one cell
    are held and not those of all."""

    def __init__(self) -> None:
        self._tasks: dict[str, list[Trained]] = {}
        self._first: tuple[str, Steps] = "", no_steps()

    def add(self, cells: Iterable[tuple[Cell, Sequence[Run]]]) -> None:
        """Take in ``cells`` with their runs, whose attempts have not been let go."""
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
        """Of each task that more than one eager cell has run, these cells in the order of their coming."""
        return tuple(tuple(cells) for cells in self._tasks.values() if len(cells) > 1)


def _trained(label: str, found: Steps, first: Steps) -> Trained | None:
    _, own, other = np.intersect1d(found.step, first.step, return_indices=True)
    if not own.size:
        return None
    steps, reference = found.take(own), first.take(other)
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
