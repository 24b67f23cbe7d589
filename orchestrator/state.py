"""What a run is doing, told from what stands on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Optional, Union

from launch.files import read_json
from launch.lock import holder
from launch.record import AttemptPaths, BundlePaths, Expectation, Outcome, OutcomeName, Plan, SweepPaths, read_outcome

StateName = Union[OutcomeName, Literal["PLANNED", "QUEUED", "RUNNING", "INTERRUPTED"]]


@dataclass(frozen=True)
class RunState:
    """One run's state. ``steps_done`` is of the latest attempt; ``alive`` is whether its bundle's supervisor lives or is
    about to."""

    run_id: str
    name: StateName
    next_attempt: int
    alive: bool = False
    outcome: Optional[Outcome] = None
    expected: bool = True
    """Whether the outcome is what the recipe expects; True where there is none yet."""
    steps_done: int = 0

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def failed(self) -> bool:
        return self.outcome is not None and not self.expected


def read_states(sweep: SweepPaths, plan: Plan) -> dict[str, RunState]:
    """The state of every run of ``plan``, in its order."""
    expectations = {run_id: cell.expect for cell in plan.cells for run_id in cell.run_ids}
    queue_lives = holder(sweep.queue_lock) is not None
    states: dict[str, RunState] = {}
    for bundle in plan.bundles:
        paths = sweep.bundle(bundle.bundle_id)
        supervision = _Supervision(
            alive=holder(paths.lock) is not None,
            queue_lives=queue_lives,
            cancelled=paths.cancel.exists(),
            ordered=_ordered_attempts(paths),
        )
        for run_id in bundle.run_ids:
            states[run_id] = _state(sweep, run_id, expectations[run_id], supervision)
    return states


@dataclass(frozen=True)
class _Supervision:
    """What is known of a run's bundle."""

    alive: bool
    queue_lives: bool
    cancelled: bool
    ordered: Mapping[str, int]

    def waits(self, run_id: str, begun: int) -> bool:
        """Whether an attempt after ``begun`` has been ordered and somebody lives who will begin it."""
        lives = self.alive or self.queue_lives
        return lives and not self.cancelled and self.ordered.get(run_id, 0) > begun


def _state(sweep: SweepPaths, run_id: str, expect: Expectation, supervision: _Supervision) -> RunState:
    latest = _latest_attempt(sweep, run_id)
    begun = latest.number if latest else 0
    if supervision.waits(run_id, begun):
        return RunState(run_id, "QUEUED", begun + 1, alive=True)
    if latest is None:
        return RunState(run_id, "CANCELLED" if supervision.cancelled else "PLANNED", 1)
    outcome = read_outcome(latest)
    if outcome is not None:
        # Where it completed, the plan knows how many steps there are; nothing need be counted.
        steps = 0 if outcome.results_intact else _steps_done(latest)
        return RunState(run_id, outcome.outcome, begun + 1, False, outcome, outcome.meets(expect), steps)
    name: StateName = "RUNNING" if supervision.alive else "INTERRUPTED"
    return RunState(run_id, name, begun + 1, supervision.alive, steps_done=_steps_done(latest))


def _ordered_attempts(bundle: BundlePaths) -> Mapping[str, int]:
    try:
        return dict(read_json(bundle.order)["schedule"])
    except FileNotFoundError:
        return {}


def _latest_attempt(sweep: SweepPaths, run_id: str) -> Optional[AttemptPaths]:
    run = sweep.run(run_id)
    try:
        numbers = [int(name) for name in os.listdir(run.root / "attempts") if name.isdigit()]
    except FileNotFoundError:
        return None
    return run.attempt(max(numbers)) if numbers else None


def _steps_done(attempt: AttemptPaths) -> int:
    try:
        return attempt.metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
