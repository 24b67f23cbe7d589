"""Print what is known about Slurm jobs: the job of each run, and problems with jobs or with Slurm."""

from __future__ import annotations

import time
from collections.abc import Mapping

from launch.common.grouped import grouped
from launch.common.text import count
from launch.slurm.job_states import stage_of
from orchestrator.slurm.job_listing import UNHEARD, Job
from orchestrator.slurm.pending_reasons import blocking_reason
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slurm_jobs import GRACE_SECONDS, Jobs


def describe_job(state: RunState) -> str:
    """Describe the job of a run that waits, runs, or did not begin in its job. Return "" for other runs."""
    job = state.job
    if job is None:
        return ""
    if state.name == "QUEUED" and stage_of(job.state) == "waits":
        reason = f" ({job.reason})" if job.reason else ""
        return f"job {job.job_id} {job.state}{reason}{_expected_start(job)}"
    if state.name in ("QUEUED", "RUNNING") and job.state == UNHEARD:
        return f"job {job.job_id}, not yet seen in squeue"
    if state.name in ("QUEUED", "RUNNING"):
        suspended = f" ({job.state})" if job.state != "RUNNING" else ""
        return f"job {job.job_id}{f' on {job.nodes}' if job.nodes else ''}{suspended}"
    if state.abandoned and state.name == "CANCELLED" and not state.finished:
        # The job may have skipped the run and ended as COMPLETED.
        return "cancelled before it began"
    if state.abandoned:
        earlier = f" ({state.launches} jobs in a row did)" if state.launches > 1 else ""
        return f"job {job.job_id} ended as {job.state} before this run began{earlier}"
    return ""


def _expected_start(job: Job) -> str:
    if job.expected_start is None:
        return ""
    start, now = time.localtime(job.expected_start), time.localtime()
    same_day = start[:3] == now[:3]
    return f", expected to start at {time.strftime('%H:%M' if same_day else '%Y-%m-%d %H:%M', start)}"


def print_job_problems(jobs: Jobs | None, states: Mapping[str, RunState]) -> None:
    """Print problems with Slurm or with jobs in its queue, one per line. ``jobs`` is None if Slurm was not asked."""
    if jobs is not None:
        for line in (*slurm_faults(jobs), *doubtful_jobs(jobs), *blocked_jobs(states)):
            print(line)


def slurm_faults(jobs: Jobs) -> list[str]:
    """Return a line for each part of Slurm that does not answer."""
    lines = [f"{jobs.fault}; states are as last known"] if jobs.fault else []
    if not jobs.accounting:
        lines.append("Slurm keeps no accounting here, so only the run's records and squeue show how a job ended")
    return lines


def doubtful_jobs(jobs: Jobs) -> list[str]:
    """Return at most one line: the jobs that squeue does not list and whose end is not certain yet."""
    if not jobs.doubtful:
        return []
    job_ids = ", ".join(sorted(jobs.doubtful)[:5]) + (", ..." if len(jobs.doubtful) > 5 else "")
    return [
        f"job {job_ids}: not in squeue, and its end is not recorded yet; its state is certain after {GRACE_SECONDS:g} s"
    ]


def blocked_jobs(states: Mapping[str, RunState]) -> list[str]:
    """Return a line for each array and reason. It names jobs that cannot start until somebody acts, the reason and the fix."""
    waiting = [state.job for state in states.values() if state.name == "QUEUED" and state.job is not None]
    blocked = grouped(((job.job_id.partition("_")[0], job.reason), job) for job in waiting if blocking_reason(job))
    lines = []
    for (array, reason), jobs in blocked.items():
        row = blocking_reason(jobs[0])
        job = jobs[0].job_id if len(set(jobs)) == 1 else array
        meaning, fix = (row.meaning, row.fix.format(job=job)) if row else ("", "")
        lines.append(f"job {job} ({count('run', len(jobs))}) cannot start: {meaning} ({reason}). Fix: {fix}")
    return lines
