"""Collect the eager runs of a workload: the eager baseline of all its graphed cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.records.run import Attempt, Digests, Run, attempts_of
from analysis.records.steps import Steps
from analysis.verdict.completeness import incomplete
from analysis.verdict.curve_evidence import bitwise_prefix
from analysis.verdict.noise import NoiseFloor, noise_floor
from launch.contract.plan import Cell
from launch.contract.records.step_metrics import METRICS


@dataclass(frozen=True)
class MissingRun:
    """A planned perturbed run, and how to get its curve."""

    run_id: str
    fix: str


@dataclass(frozen=True)
class EagerBaseline:
    """The eager runs of a workload.

    ``repeats`` maps digests and repeat to the steps of complete runs. ``perturbed`` maps digests to the complete perturbed run.
    """

    runs: tuple[Run, ...]
    """The repeats, complete or not."""
    repeats: Mapping[Digests, Mapping[int, Steps]]
    perturbed: Mapping[Digests, Attempt] = field(default_factory=dict)
    missing: MissingRun | None = None
    """The planned perturbed run, for digests that lack its curve; None if none is planned."""

    @property
    def noise_floor(self) -> NoiseFloor | None:
        """The noise floor over whole runs, or None if no digests have two complete runs (a perturbed one included).

        If runs have different digests, it is the largest noise floor of any digests.
        """
        floors = (
            noise_floor(tuple(repeats.values()), slice(None), self.perturbed_steps(digests))
            for digests, repeats in self.repeats.items()
        )
        return max((floor for floor in floors if floor), key=lambda floor: (floor.loss, floor.grad_norm), default=None)

    def perturbed_steps(self, digests: Digests) -> Steps | None:
        return self.perturbed[digests].steps if digests in self.perturbed else None


def eager_side(runs: tuple[Run, ...], cell: Cell) -> EagerBaseline:
    """Collect the ``runs`` of the eager ``cell`` of a workload."""
    expected = np.arange(cell.run_spec.training.steps)
    complete: dict[Digests, dict[int, Steps]] = {}
    perturbed: dict[Digests, Attempt] = {}
    for run in runs:
        for attempt in attempts_of([run]):
            whole = not incomplete(attempt.steps, expected)
            if not (attempt.outcome.results_intact and not attempt.problems and whole):
                continue
            if run.perturbed:
                perturbed[attempt.digests] = attempt
            else:
                complete.setdefault(attempt.digests, {})[run.repeat] = attempt.steps
    repeats = tuple(run for run in runs if not run.perturbed)
    first = cell.run_spec.first_compared
    alike = {
        digests: attempt
        for digests, attempt in perturbed.items()
        if not _differs_before(first, attempt.steps, tuple(complete.get(digests, {}).values()))
    }
    return EagerBaseline(repeats, complete, alike, _missing_run(runs, cell) if cell.perturbed else None)


def _differs_before(first: int, perturbed: Steps, repeats: Sequence[Steps]) -> bool:
    """Return whether ``perturbed`` differs from equal eager ``repeats`` before it is perturbed, as on a different machine.

    Its distance from them then shows more than rounding, and would hide faults. Repeats that differ show such noise themselves.
    """
    before = slice(first)
    return bool(repeats) and (
        bitwise_prefix(repeats[:1], repeats, before, METRICS) == first
        and bitwise_prefix(repeats[:1], [perturbed], before, METRICS) < first
    )


def _missing_run(runs: Sequence[Run], cell: Cell) -> MissingRun:
    """Return the perturbed run of ``cell`` and how to get a curve of it that can be compared."""
    run_id = cell.run_ids[-1]
    ended = next(iter(attempts_of(run for run in runs if run.perturbed)), None)
    if ended is None:
        return MissingRun(run_id, "run `python -m orchestrator resume` on the sweep to start that run")
    status = (
        "has incomplete records, or other code, libraries or data than the eager repeats, or differs from them before it is perturbed"
        if ended.outcome.results_intact
        else f"ended {ended.outcome.outcome}"
    )
    return MissingRun(run_id, f"the perturbed run {status}: move its folder runs/{run_id} away and resume the sweep")
