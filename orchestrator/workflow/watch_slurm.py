"""Watch a sweep whose bundles are Slurm jobs, and act on jobs that wait too long or lost their node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from launch.common.poll_interval import poll_interval
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.slurm.job_states import stage_of
from orchestrator.errors import SystemFault
from orchestrator.output.jobs import blocked_jobs, slurm_faults
from orchestrator.output.progress_view import View, print_new
from orchestrator.output.states import describe_full_disk
from orchestrator.slurm.pending_reasons import OF_THIS_SWEEP
from orchestrator.submit.cancel import scancel
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.run_state import RunState, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.submissions import Submission, read_submissions

POLL_SECONDS = 0.5
MOST_SECONDS = 20.0
"""The longest pause between polls in seconds, even after a slow poll: a node failure or the end must be noticed in time."""

Retry = Callable[[Mapping[str, RunState]], bool]
"""Submit what is to be retried, given the state of each run. Return whether anything was submitted or waits for room."""


def watch_slurm(
    paths: SweepPaths,
    plan: Plan,
    view: View,
    scheduler: JobMonitor,
    timeout: PendingTimeout,
    retry: Retry | None = None,
) -> dict[str, RunState]:
    """Show the sweep until no run is running or waiting. Return the final state of every run.

    With ``retry``, this command also writes outcomes that nobody else can write. It cancels jobs that have waited too long, and
    retries runs after each answer from Slurm. If a retry cannot be submitted, it waits for Slurm.
    """
    printed: set[str] = set()
    jobs: Jobs | None = None
    while True:
        submissions = read_submissions(paths)
        latest = scheduler.look(submissions)
        begun, is_new, jobs = time.monotonic(), latest is not jobs, latest
        states = read_states(paths, plan, jobs)
        view.update(states)
        seconds = time.monotonic() - begun
        printed = print_new(
            view, printed, [*slurm_faults(jobs), *blocked_jobs(states), *describe_full_disk(paths, states)]
        )
        idle = not any(state.alive or (retry and _awaits_retry(state)) for state in states.values())
        submitted = False
        if retry and (is_new or idle):
            for line in timeout.cancel_overdue(submissions, jobs) if is_new else ():
                view.print(line)
            if close_dead_attempts(paths, states, timeout.cancelled):
                states = read_states(paths, plan, jobs)
                view.update(states)
            submitted = retry(states)
        may_retry = retry and any(map(_is_infrastructure, states.values()))
        if idle and not submitted and (not may_retry or scheduler.answers()):
            return states
        time.sleep(min(poll_interval(seconds, POLL_SECONDS), MOST_SECONDS))


def _awaits_retry(state: RunState) -> bool:
    """Return whether the run may be retried once its job has ended."""
    return _is_infrastructure(state) and state.has_job


def _is_infrastructure(state: RunState) -> bool:
    """Return whether nodes, network or scheduler ended the run or prevented its start."""
    return state.abandoned or (state.finished and not state.ended_by_itself)


class PendingTimeout:
    """Cancel jobs that this command has seen waiting for more than ``minutes``. None means forever.

    Time in which a job waits for other jobs of its own sweep does not count. Time before this command does not count either,
    because only the clocks of other hosts measured it.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._minutes = minutes
        self._clock = clock
        self._since: dict[str, float] = {}
        self.cancelled: dict[str, str] = {}
        """The reasons of cancelled jobs, by job id."""

    def cancel_overdue(self, submissions: Iterable[Submission], jobs: Jobs) -> list[str]:
        """Cancel the jobs that have waited too long. Return the lines to print."""
        overdue = {} if self._minutes is None else self._overdue(submissions, jobs, self._minutes)
        try:
            scancel(list(overdue))
        except SystemFault as fault:
            return [f"jobs that have waited too long could not be cancelled: {fault}"]
        self.cancelled |= overdue
        return [f"job {job_id} is cancelled: {reason}" for job_id, reason in overdue.items()]

    def _overdue(self, submissions: Iterable[Submission], jobs: Jobs, minutes: float) -> dict[str, str]:
        now, overdue = self._clock(), {}
        for submission in submissions:
            for job_id in submission.job_ids():
                job = jobs.of(job_id)
                if job is None or stage_of(job.state) != "waits" or job_id in self.cancelled:
                    continue
                if job.reason in OF_THIS_SWEEP:
                    self._since[job_id] = now
                elif now - self._since.setdefault(job_id, now) > minutes * 60:
                    reason = job.reason or "no reason given"
                    overdue[job_id] = f"it waited longer than max_pending_minutes, {minutes:g} min ({reason})"
        return overdue
