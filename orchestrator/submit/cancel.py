"""Cancel runs of a sweep: all runs that run or wait, or chosen ones.

The file ``cancel`` makes supervisors end their runs as CANCELLED. A waiting Slurm job has no supervisor, so scancel ends it.
scancel also ends a job whose supervisor does not react.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.common.atomic_files import write_json, write_text
from launch.common.file_lock import UNNAMED, Owner, holder
from launch.common.poll_interval import poll_interval
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan
from launch.slurm.command import Unanswered, run
from launch.slurm.job_states import Stage, stage_of
from orchestrator.errors import InputError, Problem, SystemFault
from orchestrator.submit.slurm_queue import poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.find_run import find_by_run_id
from orchestrator.sweeps.run_state import RunState, live_runs, read_states, runs_without_job
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import order_lock, read_order, report_disk_errors
from orchestrator.sweeps.submissions import read_submissions

ASKED_SECONDS = 30.0
"""How long supervisors may take to end their runs."""
QUIET_SECONDS = 2.0
"""How long to wait before saying so. Most runs end within this time."""
ENDED_SECONDS = 120.0
"""How long Slurm may take to end a job: KillWait, 30 s by default, and the site's epilog."""
POLL_SECONDS = 0.2
MOST_IDS = 500
"""The most jobs per call of scancel."""


def choose(plan: Plan, wanted: Sequence[str]) -> frozenset[str] | None:
    """Return the runs that ``wanted`` names by ids or prefixes of ids, or None (all runs) if it is empty.

    Raises:
        InputError: a prefix matches no run, or several.
    """
    runs = [(run_id, run_id) for run_id in plan.cell_of_run()]
    chosen: set[str] = set()
    problems: list[Problem] = []
    for prefix in wanted:
        try:
            chosen.add(find_by_run_id(runs, prefix, repr(plan.name)))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return frozenset(chosen) or None


def cancel(
    sweep: SweepPaths, plan: Plan, chosen: frozenset[str] | None, tell: Callable[[str], None]
) -> tuple[list[str], dict[str, RunState]]:
    """Cancel ``chosen`` runs (None: all) and wait until they have ended. ``tell`` is told what this waits for.

    Return the cancelled runs, and the state of every run of ``plan`` afterwards.

    Raises:
        SystemFault: some runs have not ended, or Slurm does not answer.
    """
    scheduler = JobMonitor()
    with order_lock(sweep):
        jobs = poll_jobs(sweep, scheduler)
        alive = {bundle.root.name: set(run_ids) for bundle, run_ids in live_runs(sweep, jobs)}
        # A command that follows the sweep may be waiting to submit more of it.
        left = {bundle.root.name: set(run_ids) for bundle, run_ids in runs_without_job(sweep, jobs)}
        going = {bundle: run_ids & chosen if chosen else run_ids for bundle, run_ids in (alive | left).items()}
        planned = {bundle.bundle_id: set(bundle.run_ids) for bundle in plan.all_bundles}
        with report_disk_errors(sweep):
            for bundle, run_ids in going.items():
                # A command may be waiting for the job, to begin a chosen run that has ended.
                ending = run_ids | (planned.get(bundle, set()) & chosen) if chosen else run_ids
                if ending:
                    _write_cancellation(sweep.bundle(bundle), ending if chosen else None)
        cancelled = CancelledJobs(
            sweep, scheduler, chosen, frozenset(b for b, run_ids in alive.items() if going[b] == run_ids)
        )
        scancel(cancelled.job_ids(jobs, "waits"))
    _wait(cancelled, plan, tell)
    states = read_states(sweep, plan, scheduler.look(read_submissions(sweep)))
    try:
        close_dead_attempts(sweep, states)
    except SystemFault as fault:
        raise SystemFault(f"the runs have ended, but not every outcome is written yet: {fault}") from fault
    asked = sorted(run_id for run_ids in going.values() for run_id in run_ids)
    withdrawn = {run_id for bundle, run_ids in going.items() for run_id in _unbegun(sweep.bundle(bundle)) & run_ids}
    gone = {run_id for run_id in asked if run_id not in states or states[run_id].name == "CANCELLED"}
    return [run_id for run_id in asked if run_id in gone | withdrawn], states


def _unbegun(bundle: BundlePaths) -> set[str]:
    """Return the runs of which the ordered attempt has not begun. A failed run that was ordered again keeps its outcome."""
    order = read_order(bundle)
    return {run for run, k in order.schedule if not bundle.sweep.run(run).attempt(k).root.exists()} if order else set()


def _wait(cancelled: CancelledJobs, plan: Plan, tell: Callable[[str], None]) -> None:
    """Wait until the runs have ended. End by scancel the jobs of those that take long.

    Raises:
        SystemFault: some runs have not ended.
    """
    if not cancelled.have_ended(QUIET_SECONDS):
        tell(f"waiting up to {ASKED_SECONDS:g} s for {cancelled.describe_left()}")
    if cancelled.have_ended(ASKED_SECONDS - QUIET_SECONDS):
        return
    job_ids = cancelled.job_ids(cancelled.scheduler.look(read_submissions(cancelled.sweep)))
    scancel(job_ids)
    by_scancel = " after scancel" if job_ids else ""
    tell(f"waiting up to {ENDED_SECONDS:g} s more{by_scancel} for {cancelled.describe_left()}")
    if not cancelled.have_ended(ENDED_SECONDS):
        seconds = ASKED_SECONDS + ENDED_SECONDS
        raise SystemFault(
            f"runs of {plan.name} have not ended {seconds:g} s after being asked to; see status {plan.name}"
        )


def scancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs by their ids.

    A filter (``--state``) cannot be used: given a filter and an element's id, scancel of Slurm 22.05 ends every waiting element
    of the array.

    Raises:
        SystemFault: scancel fails.
    """
    for first in range(0, len(job_ids), MOST_IDS):
        try:
            run("scancel", "--quiet", *job_ids[first : first + MOST_IDS])
        except Unanswered as error:
            raise SystemFault(f"scancel failed ({error}), and jobs are still in the queue; try again") from error


def _write_cancellation(bundle: BundlePaths, run_ids: set[str] | None) -> None:
    """Cancel ``run_ids`` (None: all) in addition to the runs that are already cancelled.

    An empty file cancels all, because a full disk still takes it.
    """
    before = read_cancellation(bundle)
    if run_ids is None or (before is not None and not before.run_ids):
        write_text(bundle.cancel, "")
    else:
        write_json(bundle.cancel, sorted({*run_ids, *(before.run_ids if before else ())}))


@dataclass(frozen=True)
class CancelledJobs:
    """The runs to cancel, and the bundles whose jobs have no other runs."""

    sweep: SweepPaths
    scheduler: JobMonitor
    chosen: frozenset[str] | None
    """None means every run and every job."""
    bundles: frozenset[str]
    """The bundles in which all runs that run or wait are chosen."""

    def job_ids(self, jobs: Jobs, stage: Stage | None = None) -> list[str]:
        """Return the ids of jobs that squeue lists and that have not ended, with ``stage`` only those in this stage.

        An array element that was cancelled before it started leaves no trace in squeue or sacct.
        """
        found = []
        for submission in read_submissions(self.sweep):
            for bundle in submission.bundles if self.chosen is None else self.bundles.intersection(submission.bundles):
                job = jobs.of(submission.job_of(bundle) or "")
                if job is None or job.ended or job.job_id in jobs.doubtful:
                    continue
                if stage in (None, stage_of(job.state)):
                    found.append(job.job_id)
        return found

    def have_ended(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until everything has ended. Return whether it has."""
        deadline = time.monotonic() + seconds
        while (begun := time.monotonic()) < deadline:
            if self._have_ended():
                return True
            time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))
        return False

    def _have_ended(self) -> bool:
        jobs = self.scheduler.look(read_submissions(self.sweep))
        return not self.job_ids(jobs) and not self._left(jobs)

    def describe_left(self) -> str:
        """Say what has not ended: runs, each with the process that must end it, and jobs."""
        jobs = self.scheduler.look(read_submissions(self.sweep))
        runs = [_describe_supervisor(bundle, run_ids) for bundle, run_ids in self._left(jobs)]
        return "; ".join([*runs, *(f"job {job_id}" for job_id in self.job_ids(jobs))])

    def _left(self, jobs: Jobs) -> list[tuple[BundlePaths, list[str]]]:
        """Return the bundles with runs to cancel that still run or wait."""
        chosen = (
            (b, [r for r in run_ids if self.chosen is None or r in self.chosen])
            for b, run_ids in live_runs(self.sweep, jobs)
        )
        return [(bundle, run_ids) for bundle, run_ids in chosen if run_ids]


def _describe_supervisor(bundle: BundlePaths, run_ids: Sequence[str]) -> str:
    runs, owner = ", ".join(run_ids), holder(bundle.lock)
    if owner is None or owner == UNNAMED:
        return runs
    stopped = f", which is stopped: kill -CONT {owner.pid} lets it react" if _is_stopped(owner) else ""
    return f"{runs} (supervised by process {owner.pid} on {owner.host}{stopped})"


def _is_stopped(owner: Owner) -> bool:
    """Return whether the process is on this host and SIGSTOP has stopped it."""
    try:
        state = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return owner.host == socket.gethostname() and state == "T"
