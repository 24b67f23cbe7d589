"""Following a sweep whose bundles are jobs of Slurm's, and what a command that watches does for it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.slurm.job_states import stage_of
from orchestrator.errors import SystemFault
from orchestrator.output.jobs import blocked_jobs, slurm_faults
from orchestrator.slurm.command import poll_interval
from orchestrator.slurm.pending_reasons import OF_THIS_SWEEP
from orchestrator.submit.cancel import scancel
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.run_state import RunState, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.submissions import Submission, read_submissions

POLL_SECONDS = 0.5
MOST_SECONDS = 20.0
"""Between two looks, however long one takes: a node's failure, and the end, are not to go unseen for longer."""

Tend = Callable[[Mapping[str, RunState]], bool]
"""Submits what is to be begun again; the value is whether anything was."""


class View(Protocol):
    """Where a person sees it."""

    def update(self, states: Mapping[str, RunState]) -> None: ...

    def say(self, line: str) -> None: ...


def follow(
    paths: SweepPaths, plan: Plan, view: View, scheduler: JobMonitor, tend: Tend | None, patience: PendingTimeout
) -> dict[str, RunState]:
    """Show the sweep until nothing of it runs or waits; the value is the state of every run then.

    The disk is looked at every half second, more seldom where that takes long, and Slurm when the scheduler's interval
    allows. With ``tend`` this command sees to the sweep: outcomes that nobody could write are written, jobs that wait
    for too long are cancelled, and ``tend`` is called after every word from Slurm, and when nothing is left to wait
    for. What could not be submitted because Slurm does not answer is waited for.
    """
    said: set[str] = set()
    jobs: Jobs | None = None
    while True:
        submissions = read_submissions(paths)
        latest = scheduler.look(submissions)
        begun, news, jobs = time.monotonic(), latest is not jobs, latest
        states = read_states(paths, plan, jobs)
        view.update(states)
        looked = time.monotonic() - begun
        _say_once(view, said, [*slurm_faults(jobs), *blocked_jobs(states)])
        idle = not any(state.alive or (tend is not None and _is_to_be_seen_to(state)) for state in states.values())
        submitted = False
        if tend is not None and (news or idle):
            for line in patience.cancel_overdue(submissions, jobs) if news else ():
                view.say(line)
            if close_dead_attempts(paths, states, patience.called_off):
                states = read_states(paths, plan, jobs)
                view.update(states)
            submitted = tend(states)
        if (
            idle
            and not submitted
            and (tend is None or scheduler.answers() or not any(map(_failed_here, states.values())))
        ):
            return states
        time.sleep(min(poll_interval(looked, POLL_SECONDS), MOST_SECONDS))


def _is_to_be_seen_to(state: RunState) -> bool:
    """Whether the run may be made again as soon as its job has ended."""
    return _failed_here(state) and state.job is not None and not state.job.ended


def _failed_here(state: RunState) -> bool:
    """Whether nodes, network or scheduler ended the run, or kept it from beginning."""
    return state.abandoned or (state.outcome is not None and state.outcome.is_infrastructure)


def _say_once(view: View, said: set[str], lines: Iterable[str]) -> None:
    """Each line when it comes up, and again only if it went away in between."""
    now = list(lines)
    for line in now:
        if line not in said:
            view.say(line)
    said.intersection_update(now)
    said.update(now)


class PendingTimeout:
    """How long a job may wait before it is taken out of the queue. Jobs that wait for others of their own sweep (the
    next in a lane, or in an array that is bounded) have not begun to wait.

    ``minutes`` None is for ever."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.time) -> None:
        self._minutes = minutes
        self._clock = clock
        self._since: dict[str, float] = {}
        self.called_off: dict[str, str] = {}
        """Why, by job."""

    def cancel_overdue(self, submissions: Iterable[Submission], jobs: Jobs) -> list[str]:
        """Take jobs that have waited for too long out of the queue; the value is what to say about it."""
        overdue = self._overdue(submissions, jobs) if self._minutes is not None else {}
        try:
            scancel(list(overdue))
        except SystemFault as fault:
            return [f"jobs that have waited for too long are still in the queue: {fault}"]
        self.called_off |= overdue
        return [f"job {job_id} is taken out of the queue: {why}" for job_id, why in overdue.items()]

    def _overdue(self, submissions: Iterable[Submission], jobs: Jobs) -> dict[str, str]:
        now, found = self._clock(), {}
        for submission in submissions:
            for job_id in submission.job_ids():
                job = jobs.of(job_id)
                if job is None or stage_of(job.state) != "waits" or job_id in self.called_off:
                    continue
                if job.reason in OF_THIS_SWEEP:
                    self._since[job_id] = now
                elif now - self._since.setdefault(job_id, submission.time) > (self._minutes or 0) * 60:
                    found[job_id] = (
                        f"it waited for more than the {self._minutes:g} minutes of max_pending_minutes"
                        f" ({job.reason or 'no reason given'})"
                    )
        return found
