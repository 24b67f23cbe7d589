"""What a run is doing, told from what stands on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Optional, Union

from launch.files import RecordError
from launch.lock import holder
from launch.record import AttemptPaths, BundlePaths, Expectation, Outcome, OutcomeName, Plan, SweepPaths, read_outcome
from orchestrator.store import bundles, read_order

StateName = Union[OutcomeName, Literal["PLANNED", "QUEUED", "RUNNING", "INTERRUPTED"]]


@dataclass(frozen=True)
class RunState:
    """One run's state. ``steps_done`` is of the latest attempt; ``alive`` is whether it runs, or somebody lives who is
    about to begin it."""

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
    """The state of every run of ``plan``, in its order.

    Raises:
        SystemFault: an order on disk is damaged.
    """
    expectations = {run_id: cell.expect for cell in plan.cells for run_id in cell.run_ids}
    queue_lives = holder(sweep.queue_lock) is not None
    states: dict[str, RunState] = {}
    for bundle in plan.bundles:
        supervision = _Supervision(sweep.bundle(bundle.bundle_id), queue_lives)
        for run_id in bundle.run_ids:
            states[run_id] = _state(sweep, run_id, expectations[run_id], supervision)
    return states


def live_runs(sweep: SweepPaths) -> Iterator[tuple[BundlePaths, list[str]]]:
    """Runs that run or wait, by bundle; bundles that only an earlier plan knew are among them."""
    queue_lives = holder(sweep.queue_lock) is not None
    for paths in bundles(sweep):
        supervision = _Supervision(paths, queue_lives)
        states = (_state(sweep, run_id, Expectation(), supervision) for run_id in supervision.ordered)
        alive = [state.run_id for state in states if state.alive]
        if alive:
            yield paths, alive


def newest_change(sweep: SweepPaths, states: Iterable[RunState]) -> float:
    """When something of ``states`` last changed on disk, in seconds since the epoch."""
    return max((_changed(sweep, state) for state in states), default=0.0)


def _changed(sweep: SweepPaths, state: RunState) -> float:
    if state.outcome is not None:
        metrics = sweep.run(state.run_id).attempt(state.next_attempt - 1).metrics
        return max(state.outcome.ended, metrics.stat().st_mtime if metrics.exists() else 0.0)
    return _begun_at(sweep, state.run_id) / 1e9 if state.next_attempt > 1 else 0.0


@dataclass(frozen=True)
class _Supervision:
    """What is known of a run's bundle; of most bundles in a large store little is asked, and no more is read."""

    bundle: BundlePaths
    queue_lives: bool

    @cached_property
    def since(self) -> Optional[int]:
        """When the living supervisor took the bundle, in ns since the epoch; None where none lives."""
        return self.bundle.lock.stat().st_mtime_ns if holder(self.bundle.lock) is not None else None

    @cached_property
    def cancelled(self) -> bool:
        return self.bundle.cancel.exists()

    @cached_property
    def ordered(self) -> Mapping[str, int]:
        """The attempt that is ordered, by run."""
        order = read_order(self.bundle)
        return dict(order.schedule) if order else {}

    def waits(self, run_id: str, begun: int) -> bool:
        """Whether an attempt after ``begun`` has been ordered and somebody lives who will begin it."""
        lives = self.queue_lives or self.since is not None
        return lives and not self.cancelled and self.ordered.get(run_id, 0) > begun


def _state(sweep: SweepPaths, run_id: str, expect: Expectation, supervision: _Supervision) -> RunState:
    latest = _latest_attempt(sweep, run_id)
    begun = latest[0] if latest else 0
    if supervision.waits(run_id, begun):
        return RunState(run_id, "QUEUED", begun + 1, alive=True)
    if latest is None:
        return RunState(run_id, "CANCELLED" if supervision.cancelled else "PLANNED", 1)
    attempt = latest[1]
    outcome = readable_outcome(attempt)
    if outcome is not None:
        # Where it completed, the plan knows how many steps there are; nothing need be counted.
        steps = 0 if outcome.results_intact else _steps_done(attempt)
        return RunState(run_id, outcome.outcome, begun + 1, False, outcome, outcome.meets(expect), steps)
    # A supervisor that lives works on what it began itself, and not on what one before it left behind.
    alive = supervision.since is not None and _begun_at(sweep, run_id) >= supervision.since
    return RunState(run_id, "RUNNING" if alive else "INTERRUPTED", begun + 1, alive, steps_done=_steps_done(attempt))


def _latest_attempt(sweep: SweepPaths, run_id: str) -> Optional[tuple[int, AttemptPaths]]:
    run = sweep.run(run_id)
    try:
        numbers = [int(name) for name in os.listdir(run.root / "attempts") if name.isdigit()]
    except FileNotFoundError:
        return None
    return (max(numbers), run.attempt(max(numbers))) if numbers else None


def _begun_at(sweep: SweepPaths, run_id: str) -> int:
    """When the latest attempt was begun, in ns since the epoch: the folder of attempts changes then and only then."""
    return (sweep.run(run_id).root / "attempts").stat().st_mtime_ns


def readable_outcome(attempt: AttemptPaths) -> Optional[Outcome]:
    """How the attempt ended; None where it has not, or its record is damaged."""
    try:
        return read_outcome(attempt)
    except (RecordError, TypeError):
        return None  # The report counts such an attempt as not ended too, and it can be made again.


def _steps_done(attempt: AttemptPaths) -> int:
    try:
        return attempt.metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
