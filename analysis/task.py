"""Eager cells of one task beside each other: layouts, engines and ways to run a step that should train the same.

No verdict is drawn: sums in another order round otherwise, and how far that may go is not calibrated across workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from analysis.compare import CellResult
from analysis.load import Attempt


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


def trained_alike(results: Sequence[CellResult]) -> tuple[tuple[Trained, ...], ...]:
    """Of each task that more than one eager cell has run, these cells in the plan's order."""
    tasks: dict[str, list[tuple[str, Attempt]]] = {}
    for result in results:
        attempt = next((run.attempt for run in result.runs if run.attempt), None)
        if not result.cell.graphed and attempt is not None and len(attempt.steps):
            tasks.setdefault(result.cell.task_id, []).append((result.cell.label, attempt))
    compared = (
        tuple(found for label, attempt in cells if (found := _trained(label, attempt, cells[0][1])))
        for cells in tasks.values()
        if len(cells) > 1
    )
    return tuple(task for task in compared if len(task) > 1)


def _trained(label: str, attempt: Attempt, first: Attempt) -> Optional[Trained]:
    _, own, other = np.intersect1d(attempt.steps.step, first.steps.step, return_indices=True)
    if not own.size:
        return None
    steps, reference = attempt.steps.take(own), first.steps.take(other)
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
