"""Ending runs of a sweep: all that run or wait, or chosen ones.

Supervisors are asked by a file, end their runs and say that they were cancelled. A job of Slurm's that waits has none,
and is taken out of the queue; so is, in the end, a job whose supervisor did not heed the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch.common.atomic_files import write_json
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan
from launch.slurm.command import Unanswered, run
from launch.slurm.job_states import Stage, stage_of
from orchestrator.errors import InputError, Problem, SystemFault
from orchestrator.slurm.command import poll_interval
from orchestrator.submit.slurm_queue import poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.run_state import live_runs, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import order_lock, report_disk_errors
from orchestrator.sweeps.submissions import read_submissions

ASKED_SECONDS = 30.0
"""How long supervisors may take to end their runs once they are asked to."""
ENDED_SECONDS = 120.0
"""How long Slurm may take to end a job: KillWait, 30 s by default, and the site's epilog."""
POLL_SECONDS = 0.2
MOST_IDS = 500
"""Jobs that one scancel is given."""


def choose(plan: Plan, wanted: Sequence[str]) -> frozenset[str] | None:
    """The runs that ``wanted`` names by their ids, or the beginnings of them; None, which is all, where it is empty.

    Raises:
        InputError: a beginning is that of no run, or of several.
    """
    run_ids = plan.cell_of_run().keys()
    found = {word: [word] if word in run_ids else [r for r in run_ids if r.startswith(word)] for word in wanted}
    problems = [
        Problem("", f"{word!r} may be {len(runs)} runs", f"write more of it: {', '.join(runs[:8])}")
        if runs
        else Problem("", f"no run of {plan.name!r} begins with {word!r}", "status lists them")
        for word, runs in found.items()
        if len(runs) != 1
    ]
    if problems:
        raise InputError(problems)
    return frozenset(runs[0] for runs in found.values()) or None


def cancel(sweep: SweepPaths, plan: Plan, chosen: frozenset[str] | None) -> list[str]:
    """End ``chosen`` runs (None: all) and wait until they have ended; the value is those that ran or waited.

    Raises:
        SystemFault: some have not ended, or Slurm does not answer.
    """
    scheduler = JobMonitor()
    with order_lock(sweep):
        jobs = poll_jobs(sweep, scheduler)
        alive = {bundle.root.name: set(run_ids) for bundle, run_ids in live_runs(sweep, jobs)}
        going = {bundle: run_ids & chosen if chosen else run_ids for bundle, run_ids in alive.items()}
        with report_disk_errors(sweep):
            for bundle, run_ids in going.items():
                if run_ids:
                    _call_off(sweep.bundle(bundle), run_ids if chosen else None)
        doomed = CancelledJobs(
            sweep, scheduler, chosen, frozenset(b for b, run_ids in alive.items() if going[b] == run_ids)
        )
        scancel(doomed.job_ids(jobs, "waits"))
    if not doomed.have_ended(ASKED_SECONDS):
        scancel(doomed.job_ids(scheduler.look(read_submissions(sweep))))
        if not doomed.have_ended(ENDED_SECONDS):
            seconds = ASKED_SECONDS + ENDED_SECONDS
            raise SystemFault(
                f"runs of {plan.name} have not ended {seconds:g} s after being asked to; see status {plan.name}"
            )
    close_dead_attempts(sweep, read_states(sweep, plan, scheduler.look(read_submissions(sweep))))
    return sorted(run_id for run_ids in going.values() for run_id in run_ids)


def scancel(job_ids: Sequence[str]) -> None:
    """Have Slurm end jobs, each by its id: with a filter (``--state``) beside an element's id, scancel of Slurm 22.05
    ends every element of the array that waits.

    Raises:
        SystemFault: scancel fails.
    """
    for first in range(0, len(job_ids), MOST_IDS):
        try:
            run("scancel", "--quiet", *job_ids[first : first + MOST_IDS])
        except Unanswered as error:
            raise SystemFault(f"scancel failed ({error}), and jobs are still in the queue; try again") from error


def _call_off(bundle: BundlePaths, run_ids: set[str] | None) -> None:
    """``run_ids`` beside those that were called off before; None is all."""
    before = read_cancellation(bundle)
    everything = run_ids is None or (before is not None and not before.run_ids)
    write_json(bundle.cancel, None if everything else sorted({*(run_ids or ()), *(before.run_ids if before else ())}))


@dataclass(frozen=True)
class CancelledJobs:
    """What is to end: runs, and the jobs of which nothing else is wanted."""

    sweep: SweepPaths
    scheduler: JobMonitor
    chosen: frozenset[str] | None
    """None is every run and every job."""
    bundles: frozenset[str]
    """Bundles of which every run that runs or waits is chosen."""

    def job_ids(self, jobs: Jobs, life_now: Stage | None = None) -> list[str]:
        """Those of its jobs that squeue lists and that have not ended; or, of them, those that are at ``life_now``. An
        element of an array that was taken out of the queue leaves no trace, neither there nor in the accounts."""
        found = []
        for submission in read_submissions(self.sweep):
            for bundle in submission.bundles if self.chosen is None else self.bundles.intersection(submission.bundles):
                job = jobs.of(submission.job_of(bundle) or "")
                if job is None or job.ended or job.job_id in jobs.doubtful:
                    continue
                if life_now in (None, stage_of(job.state)):
                    found.append(job.job_id)
        return found

    def have_ended(self, seconds: float) -> bool:
        """Whether everything has ended, waiting for ``seconds`` at most."""
        deadline = time.monotonic() + seconds
        while (begun := time.monotonic()) < deadline:
            if self._have_ended():
                return True
            time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))
        return False

    def _have_ended(self) -> bool:
        jobs = self.scheduler.look(read_submissions(self.sweep))
        left = (run_id for _, run_ids in live_runs(self.sweep, jobs) for run_id in run_ids)
        return not self.job_ids(jobs) and all(self.chosen is not None and run_id not in self.chosen for run_id in left)
