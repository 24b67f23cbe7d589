"""The state of a run: by the records on disk, then by squeue, then by sacct."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launch.common.atomic_files import RecordError
from launch.common.regular_file import read_regular
from launch.contract.bundle import runs_not_begun
from launch.contract.outcomes import Expectation, Outcome, OutcomeName, read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, RunPaths, SweepPaths
from launch.contract.plan import Plan, PlannedBundle, Precedents
from launch.contract.skipped_runs import why_skipped
from launch.failures.evidence import read_evidence
from launch.failures.job_outcome import outcome_of_job
from orchestrator.slurm.job_listing import Job
from orchestrator.sweeps.bundle_owner import BundleOwner, bundle_owners
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.store import bundles, read_order
from orchestrator.sweeps.submissions import Submission, read_submissions

StateName = OutcomeName | Literal["PLANNED", "QUEUED", "RUNNING", "INTERRUPTED", "NOT_NEEDED", "SKIPPED"]


@dataclass(frozen=True)
class RunState:
    """One run's state. ``steps_done`` counts the latest attempt's steps. ``alive``: it runs, or its owner will start it."""

    run_id: str
    name: StateName
    next_attempt: int
    alive: bool = False
    outcome: Outcome | None = None
    expected: bool = True
    """Whether the outcome is the one that the recipe expects; True if there is none yet."""
    steps_done: int = 0
    recorded: bool = True
    """Whether the outcome is on disk. If not, it follows from the job's end (orchestrator/sweeps/close_attempts.py)."""
    job: Job | None = None
    """The job of the bundle's latest submission to Slurm (BundleOwner.job)."""
    abandoned: bool = False
    """Whether the job, or this host's queue, has ended without starting the ordered attempt. False if that was cancelled and the
    run has an outcome."""
    launches: int = 0
    """For an abandoned run: how often its bundle was submitted to Slurm without starting any attempt."""
    why_unbegun: str = ""
    """Why nobody begins a run that is NOT_NEEDED or SKIPPED."""
    damaged: str = ""
    """Why the outcome of the latest attempt cannot be read; empty if it can be read or there is none."""

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def failed(self) -> bool:
        return self.outcome is not None and not self.expected

    @property
    def has_results(self) -> bool:
        return self.outcome is not None and self.outcome.results_intact

    @property
    def ended_by_itself(self) -> bool:
        """Whether the run has ended, and not because of its infrastructure."""
        return self.outcome is not None and not self.outcome.is_infrastructure

    @property
    def has_job(self) -> bool:
        return self.job is not None and not self.job.ended


def read_states(sweep: SweepPaths, plan: Plan, jobs: Jobs | None = None) -> dict[str, RunState]:
    """Return the state of every run of ``plan``, in its order. ``jobs`` is Slurm's answer, or None if it was not asked.

    A run that begins only if a verdict needs it has no state before it is ordered.

    Raises:
        SystemFault: an order on disk is damaged.
    """
    cells, precedents = plan.cell_of_run(), plan.precedents
    wanted = (*plan.bundles, *(bundle for bundle in plan.bundles_if_needed if _was_needed(sweep, bundle)))
    owners = bundle_owners(sweep, jobs, {sweep.bundle(bundle.bundle_id): bundle.run_ids for bundle in wanted})
    return {
        run_id: _state(owner, run_id, cells[run_id].expect, precedents) for owner in owners for run_id in owner.planned
    }


def _was_needed(sweep: SweepPaths, bundle: PlannedBundle) -> bool:
    """Return whether the bundle was ordered, or began by an order that somebody has deleted."""
    return sweep.bundle(bundle.bundle_id).order.exists() or any(sweep.run(r).attempts() for r in bundle.run_ids)


def read_state(bundle: BundlePaths, run_id: str, jobs: Jobs | None) -> RunState:
    """Return the state of one run of ``bundle``, as if the recipe expected COMPLETED."""
    (owner,) = bundle_owners(bundle.sweep, jobs, {bundle: ()})
    return _state(owner, run_id, Expectation())


def live_runs(sweep: SweepPaths, jobs: Jobs | None = None) -> Iterator[tuple[BundlePaths, list[str]]]:
    """Yield each bundle with its runs that run or wait, including bundles of earlier plans."""
    for owner in bundle_owners(sweep, jobs, dict.fromkeys(bundles(sweep), ())):
        alive = [run_id for run_id in owner.ordered if _state(owner, run_id, Expectation()).alive]
        if alive:
            yield owner.bundle, alive


def runs_without_job(sweep: SweepPaths, jobs: Jobs) -> Iterator[tuple[BundlePaths, list[str]]]:
    """Yield each bundle on Slurm with its ordered runs that no job will start, and that ``cancel`` does not cover."""
    for owner in bundle_owners(sweep, jobs, dict.fromkeys(bundles(sweep), ())):
        left = [r for r in owner.ordered if owner.lacks_job(r, max(sweep.run(r).attempt_numbers(), default=0))]
        if left:
            yield owner.bundle, left


def open_submissions(sweep: SweepPaths) -> list[Submission]:
    """Return the submissions of bundles in which an ordered attempt has no outcome. Slurm is asked about their jobs."""
    submissions = read_submissions(sweep)
    unsettled = {
        bundle
        for bundle in {bundle for submission in submissions for bundle in submission.bundles}
        if _is_unsettled(sweep, sweep.bundle(bundle))
    }
    return [submission for submission in submissions if not unsettled.isdisjoint(submission.bundles)]


def idle_submissions(sweep: SweepPaths) -> list[tuple[Submission, str]]:
    """Return each submission of a bundle that has begun no run and will begin none, with that bundle. Its job may still wait."""
    return [
        (submission, bundle)
        for submission in read_submissions(sweep)
        for bundle in submission.bundles
        if submission.job_of(bundle) and (schedule := submission.schedule_of(bundle))
        and not any(sweep.run(run_id).attempt(number).root.exists() for run_id, number in schedule)
        and not _is_unsettled(sweep, sweep.bundle(bundle))
    ]  # fmt: skip


def _is_unsettled(sweep: SweepPaths, bundle: BundlePaths) -> bool:
    order = read_order(bundle)
    if order is None:
        return False
    latest = {run: sweep.run(run).attempt(max((k, *sweep.run(run).attempt_numbers()))) for run, k in order.schedule}
    unended = {run for run, attempt in latest.items() if not attempt.has_ended}
    return bool(unended and unended - runs_not_begun(bundle, order))


def _state(
    owner: BundleOwner, run_id: str, expect: Expectation, precedents: Mapping[str, Precedents] | None = None
) -> RunState:
    """Return the state of a run. ``precedents`` None means those of the bundle's order."""
    run = owner.sweep.run(run_id)
    number = max(run.attempt_numbers(), default=0)
    if owner.waits(run_id, number):
        return RunState(run_id, "QUEUED", number + 1, alive=True, job=owner.job)
    if precedents is None:
        precedents = owner.order.precedents if owner.order else {}
    state = _state_of_attempt(owner, run, number, expect, precedents)
    if owner.job is not None:
        state = replace(state, job=owner.job)
    # On a host, a run with results is ordered again only as a partner. Its order is not read, which saves a file per bundle.
    is_settled = state.has_results and not state.failed and not owner.on_slurm
    if is_settled or not owner.has_abandoned(run_id, number) or (state.finished and owner.cancelled(run_id)):
        return state
    return replace(state, abandoned=True, launches=owner.launches)


def _state_of_attempt(
    owner: BundleOwner, run: RunPaths, number: int, expect: Expectation, precedents: Mapping[str, Precedents]
) -> RunState:
    """Return the state of a run, from its latest attempt. ``number`` is that attempt's number, or 0 if there is none."""
    run_id = run.run_id
    if number == 0:
        if run_id in owner.not_needed:
            return RunState(run_id, "NOT_NEEDED", 1, why_unbegun="its cell's verdicts are settled without it")
        if reason := why_skipped(run_id, owner.outcome_of, precedents):
            return RunState(run_id, "SKIPPED", 1, why_unbegun=f"{reason}; resume --failed tries again")
        return RunState(run_id, "CANCELLED" if owner.cancelled(run_id) else "PLANNED", 1)
    attempt = run.attempt(number)
    try:
        outcome = read_outcome(attempt)
    except RecordError as error:
        # An outcome is written after the ranks have ended. So even an unreadable one means that nothing runs.
        return RunState(run_id, "INTERRUPTED", number + 1, steps_done=_steps_done(attempt), damaged=str(error))
    if outcome is None:
        return _state_without_outcome(owner, run_id, attempt, expect)
    if owner.submissions is not None and outcome.is_infrastructure and owner.cancelled(run_id):
        # Without the cancellation, a watching command would retry it.
        return RunState(run_id, "CANCELLED", number + 1)
    # The plan knows how many steps a complete run has.
    steps = 0 if outcome.results_intact else _steps_done(attempt)
    return RunState(run_id, outcome.outcome, number + 1, False, outcome, outcome.matches(expect), steps)


def _state_without_outcome(owner: BundleOwner, run_id: str, attempt: AttemptPaths, expect: Expectation) -> RunState:
    interrupted = RunState(run_id, "INTERRUPTED", attempt.number + 1, steps_done=_steps_done(attempt))
    running = replace(interrupted, name="RUNNING", alive=True)
    if owner.job is None or not owner.on_slurm:
        return running if owner.runs(run_id, attempt.number) else interrupted
    if owner.ordered.get(run_id, attempt.number + 1) > attempt.number:
        return interrupted  # the attempt belongs to an earlier job
    requeued = owner.was_requeued(run_id, attempt.number)
    if owner.lives and not requeued:
        return running
    # A supervisor that was asked to cancel may have found no disk space for an outcome. Its job then ends as FAILED.
    end = "REQUEUED" if requeued else "CANCELLED" if owner.cancelled(run_id) else owner.job.state
    evidence = replace(read_evidence(attempt, "job"), job_state=end)
    now, began = time.time(), owner.beginnings.get((run_id, attempt.number))
    outcome = outcome_of_job(evidence, owner.job.nodes, owner.allocation, began.time if began else now, now)
    expected = outcome.matches(expect)
    return replace(interrupted, name=outcome.outcome, outcome=outcome, expected=expected, recorded=False)


def _steps_done(attempt: AttemptPaths) -> int:
    try:
        return read_regular(attempt.metrics).count(b"\n")
    except FileNotFoundError:
        return 0
