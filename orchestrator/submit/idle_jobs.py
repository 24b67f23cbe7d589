"""Jobs that wait in Slurm's queue although each of their runs is skipped, since a run of another job has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launch.common.grouped import grouped
from launch.contract.paths import SweepPaths
from launch.slurm.job_states import stage_of
from orchestrator.submit.cancel import scancel
from orchestrator.sweeps.run_state import RunState, idle_submissions
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.store import report_disk_errors
from orchestrator.sweeps.submissions import write_submission


def has_idle_jobs(sweep: SweepPaths, states: Mapping[str, RunState]) -> bool:
    """Return whether :func:`withdraw_idle_jobs` would cancel a job of a skipped run."""
    jobs = {state.job for state in states.values() if state.job and state.name == "SKIPPED"}
    waiting = {job.job_id for job in jobs if stage_of(job.state) == "waits"}
    return bool(waiting) and any(one.job_of(bundle) in waiting for one, bundle in idle_submissions(sweep))


def withdraw_idle_jobs(sweep: SweepPaths, jobs: Jobs) -> list[str]:
    """Cancel the jobs that wait and will begin no run, and return their ids. Only one command at a time may call this.

    Their submissions count as withdrawn, as do those of such jobs that have ended. So their runs are not CANCELLED, and get a job
    of their own if they are ordered again.

    Raises:
        SystemFault: scancel fails, or the store cannot be written to.
    """
    known = [(one, bundle, jobs.of(one.job_of(bundle) or "")) for one, bundle in idle_submissions(sweep)]
    idle = [(one, bundle, job) for one, bundle, job in known if job and stage_of(job.state) in ("waits", "ended")]
    waiting = [job.job_id for _, _, job in idle if not job.ended]
    scancel(waiting)
    with report_disk_errors(sweep):
        for submission, bundles in grouped((one, bundle) for one, bundle, _ in idle).items():
            write_submission(sweep, replace(submission, withdrawn=(*submission.withdrawn, *bundles)))
    return waiting
