"""What a run is doing, told in this order from what stands on disk, from squeue, and from sacct."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from launch.common.atomic_files import RecordError
from launch.common.file_lock import holder
from launch.contract.outcomes import Expectation, Outcome, OutcomeName, read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.plan import Plan
from launch.failures.evidence import read_evidence
from launch.failures.job_outcome import outcome_of_job
from orchestrator.slurm.job_listing import Job
from orchestrator.sweeps.bundle_owner import Supervision, begun_at, handed_over
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.store import bundles, read_order
from orchestrator.sweeps.submissions import Submission, read_submissions

StateName = OutcomeName | Literal["PLANNED", "QUEUED", "RUNNING", "INTERRUPTED"]


@dataclass(frozen=True)
class RunState:
    """One run's state. ``steps_done`` is of the latest attempt; ``alive`` is whether it runs, or somebody lives who is
    about to begin it."""

    run_id: str
    name: StateName
    next_attempt: int
    alive: bool = False
    outcome: Outcome | None = None
    expected: bool = True
    """Whether the outcome is what the recipe expects; True where there is none yet."""
    steps_done: int = 0
    recorded: bool = True
    """Whether the outcome is on disk. One that is not was found out from Slurm (orchestrator/sweeps/close_attempts.py)."""
    job: Job | None = None
    """Of the bundle's latest submission to Slurm."""
    abandoned: bool = False
    """Whether its next attempt was ordered, and its job has ended without beginning it."""
    launches: int = 0
    """Of one that is abandoned: how often the bundle was handed to Slurm since any of its attempts was begun."""
    damaged: str = ""
    """Why the outcome of the latest attempt cannot be read; empty where it can, or there is none."""

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def failed(self) -> bool:
        return self.outcome is not None and not self.expected


def read_states(sweep: SweepPaths, plan: Plan, jobs: Jobs | None = None) -> dict[str, RunState]:
    """The state of every run of ``plan``, in its order. ``jobs`` is what Slurm says; None where nobody asked it.

    Raises:
        SystemFault: an order on disk is damaged.
    """
    expectations = {run_id: cell.expect for cell in plan.cells for run_id in cell.run_ids}
    queue_lives, handed = holder(sweep.queue_lock) is not None, handed_over(sweep, jobs)
    states: dict[str, RunState] = {}
    for bundle in plan.bundles:
        paths = sweep.bundle(bundle.bundle_id)
        supervision = Supervision(paths, queue_lives, handed.get(bundle.bundle_id), bundle.run_ids)
        for run_id in bundle.run_ids:
            states[run_id] = _state(sweep, run_id, expectations[run_id], supervision)
    return states


def read_state(bundle: BundlePaths, run_id: str, jobs: Jobs | None = None) -> RunState:
    """The state of one run of ``bundle``, but for what is expected of it."""
    sweep = bundle.sweep
    handed = handed_over(sweep, jobs).get(bundle.root.name)
    supervision = Supervision(bundle, holder(sweep.queue_lock) is not None, handed)
    return _state(sweep, run_id, Expectation(), supervision)


def live_runs(sweep: SweepPaths, jobs: Jobs | None = None) -> Iterator[tuple[BundlePaths, list[str]]]:
    """Runs that run or wait, by bundle; bundles that only an earlier plan knew are among them."""
    queue_lives, handed = holder(sweep.queue_lock) is not None, handed_over(sweep, jobs)
    for paths in bundles(sweep):
        supervision = Supervision(paths, queue_lives, handed.get(paths.root.name))
        states = (_state(sweep, run_id, Expectation(), supervision) for run_id in supervision.ordered)
        alive = [state.run_id for state in states if state.alive]
        if alive:
            yield paths, alive


def open_submissions(sweep: SweepPaths) -> list[Submission]:
    """Submissions of bundles of which an ordered attempt has no outcome: those whose jobs are worth asking about."""
    submissions = read_submissions(sweep)
    unsettled = {
        bundle
        for bundle in {bundle for submission in submissions for bundle in submission.bundles}
        if _is_unsettled(sweep, sweep.bundle(bundle))
    }
    return [submission for submission in submissions if not unsettled.isdisjoint(submission.bundles)]


def _is_unsettled(sweep: SweepPaths, bundle: BundlePaths) -> bool:
    order = read_order(bundle)
    return order is not None and not all(sweep.run(run).attempt(k).outcome.exists() for run, k in order.schedule)


def newest_change(sweep: SweepPaths, states: Iterable[RunState]) -> float:
    """When something of ``states`` last changed on disk, in seconds since the epoch."""
    return max((_changed(sweep, state) for state in states), default=0.0)


def _changed(sweep: SweepPaths, state: RunState) -> float:
    if state.next_attempt == 1:
        return 0.0
    attempt = sweep.run(state.run_id).attempt(state.next_attempt - 1)
    begun = begun_at(sweep, state.run_id) / 1e9  # or since then an attempt was moved away
    if state.outcome is not None:
        return max(begun, state.outcome.ended, attempt.metrics.stat().st_mtime if attempt.metrics.exists() else 0.0)
    return max(begun, attempt.outcome.stat().st_mtime) if state.damaged else begun


def _state(sweep: SweepPaths, run_id: str, expect: Expectation, supervision: Supervision) -> RunState:
    latest = _latest_attempt(sweep, run_id)
    begun = latest[0] if latest else 0
    job = supervision.job
    if supervision.waits(run_id, begun):
        return RunState(run_id, "QUEUED", begun + 1, alive=True, job=job)
    state = _of_attempt(sweep, run_id, latest, expect, supervision)
    if not supervision.has_abandoned(run_id, begun):
        return replace(state, job=job)
    return replace(state, job=job, abandoned=True, launches=supervision.launches)


def _of_attempt(
    sweep: SweepPaths,
    run_id: str,
    latest: tuple[int, AttemptPaths] | None,
    expect: Expectation,
    supervision: Supervision,
) -> RunState:
    if latest is None:
        return RunState(run_id, "CANCELLED" if supervision.cancelled(run_id) else "PLANNED", 1)
    number, attempt = latest
    try:
        outcome = read_outcome(attempt)
    except RecordError as error:
        # An outcome is written when the ranks have ended: whatever it said, nothing runs.
        return RunState(run_id, "INTERRUPTED", number + 1, steps_done=_steps_done(attempt), damaged=str(error))
    if outcome is None:
        return _of_open_attempt(sweep, run_id, number, attempt, expect, supervision)
    if supervision.handed is not None and outcome.is_infrastructure and supervision.cancelled(run_id):
        return RunState(run_id, "CANCELLED", number + 1)  # it would have been made again unasked
    # Where it completed, the plan knows how many steps there are; nothing need be counted.
    steps = 0 if outcome.results_intact else _steps_done(attempt)
    return RunState(run_id, outcome.outcome, number + 1, False, outcome, outcome.matches(expect), steps)


def _of_open_attempt(
    sweep: SweepPaths, run_id: str, number: int, attempt: AttemptPaths, expect: Expectation, supervision: Supervision
) -> RunState:
    """Of an attempt without an outcome."""
    begun, steps = begun_at(sweep, run_id), _steps_done(attempt)
    if not supervision.on_slurm or supervision.handed is None:
        # A supervisor that lives works on what it began itself, and not on what one before it left behind.
        alive = supervision.since is not None and begun >= supervision.since
        return RunState(run_id, "RUNNING" if alive else "INTERRUPTED", number + 1, alive, steps_done=steps)
    if supervision.ordered.get(run_id) != number:
        return RunState(run_id, "INTERRUPTED", number + 1, steps_done=steps)  # of a job before the latest
    taken_again = begun < supervision.taken
    if supervision.lives and not taken_again:
        return RunState(run_id, "RUNNING", number + 1, alive=True, steps_done=steps)
    job = supervision.handed.job
    evidence = replace(read_evidence(attempt, "job"), job_state="REQUEUED" if taken_again else job.state)
    outcome = outcome_of_job(evidence, job.nodes, supervision.allocation, begun / 1e9, time.time())
    return RunState(run_id, outcome.outcome, number + 1, False, outcome, outcome.matches(expect), steps, recorded=False)


def _latest_attempt(sweep: SweepPaths, run_id: str) -> tuple[int, AttemptPaths] | None:
    run = sweep.run(run_id)
    try:
        numbers = [int(name) for name in os.listdir(run.root / "attempts") if name.isdigit()]
    except FileNotFoundError:
        return None
    return (max(numbers), run.attempt(max(numbers))) if numbers else None


def _steps_done(attempt: AttemptPaths) -> int:
    try:
        return attempt.metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
