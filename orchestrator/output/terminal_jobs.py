"""What a person is told of Slurm's jobs: one line for each run that has something to do with one, and what is amiss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.common.text import count
from launch.slurm.job_states import stage_of
from orchestrator.slurm.job_listing import UNHEARD, Job
from orchestrator.slurm.pending_reasons import blocking_reason
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slurm_jobs import GRACE_SECONDS, Jobs


def job_of(state: RunState) -> str:
    """What the run's job does, as far as that says something of the run; empty where it does not."""
    job = state.job
    if job is None:
        return ""
    if state.name == "QUEUED" and stage_of(job.state) == "waits":
        return f"job {job.job_id} {job.state}{_reason(job)}{_expected(job)}"
    if state.name in ("QUEUED", "RUNNING") and job.state == UNHEARD:
        return f"job {job.job_id}, of which Slurm has not spoken yet"
    if state.name in ("QUEUED", "RUNNING"):
        suspended = f" ({job.state})" if job.state != "RUNNING" else ""
        return f"job {job.job_id}{f' on {job.nodes}' if job.nodes else ''}{suspended}"
    if state.abandoned:
        tries = f"; {state.launches} jobs in a row did" if state.launches > 1 else ""
        return f"job {job.job_id} ended as {job.state} before this run began{tries}"
    return ""


def job_to_json(job: Job | None) -> dict[str, Any] | None:
    if job is None:
        return None
    return {
        "job_id": job.job_id,
        "state": job.state,
        "reason": job.reason,
        "expected_start": job.expected_start,
        "nodes": job.nodes,
    }


def faults(jobs: Jobs) -> list[str]:
    """What of Slurm does not answer, a line each."""
    lines = [f"{jobs.fault}; states are as they were last known"] if jobs.fault else []
    if not jobs.accounting:
        lines.append("sacct has no accounts here: how a job ended is known from its own records and from squeue alone")
    return lines


def doubts(jobs: Jobs) -> list[str]:
    """Jobs whose end is not certain yet, in one line."""
    if not jobs.doubtful:
        return []
    shown = ", ".join(sorted(jobs.doubtful)[:5]) + (", ..." if len(jobs.doubtful) > 5 else "")
    return [
        f"job {shown}: no longer in squeue, and nobody says yet how it ended; for certain {GRACE_SECONDS:g} s later"
    ]


def blocked_jobs(states: Mapping[str, RunState]) -> list[str]:
    """Jobs that will not start by themselves, a line for each array and reason: why, and what to type."""
    found: dict[tuple[str, str], list[Job]] = {}
    for state in states.values():
        if state.name == "QUEUED" and state.job is not None and blocking_reason(state.job) is not None:
            found.setdefault((state.job.job_id.partition("_")[0], state.job.reason), []).append(state.job)
    return [_obstacle(base, jobs) for (base, _), jobs in found.items()]


def _obstacle(base: str, jobs: Sequence[Job]) -> str:
    """``jobs`` is the job of each run that waits for it: elements of the array ``base``, of one reason."""
    row = blocking_reason(jobs[0])
    job = jobs[0].job_id if len(set(jobs)) == 1 else base
    meaning, way_out = (row.meaning, row.way_out.format(job=job)) if row else ("", "")
    return f"job {job} ({count('run', len(jobs))}) will not start by itself: {meaning} ({jobs[0].reason}). Way out: {way_out}"


def _reason(job: Job) -> str:
    return f" ({job.reason})" if job.reason else ""


def _expected(job: Job) -> str:
    if job.expected_start is None:
        return ""
    start, now = time.localtime(job.expected_start), time.localtime()
    same_day = start[:3] == now[:3]
    return f", expected to start at {time.strftime('%H:%M' if same_day else '%Y-%m-%d %H:%M', start)}"
