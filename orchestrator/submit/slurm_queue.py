"""Slurm's queue: bundles are handed to it, each once, whatever moment the command that hands them over dies at.

A submission is on disk, without a job's id, before sbatch is called. Whoever finds one like that (an earlier command
died in between) asks Slurm for the jobs of its name before anything else is submitted.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launch.common.atomic_files import sync_file_system
from launch.contract.bundle import BundleOrder
from launch.contract.errors import OrchestratorError
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.spec_ids import digest
from orchestrator.errors import SystemFault, input_error
from orchestrator.submit.job_arrays import Array, count_lanes, form_arrays
from orchestrator.submit.submitit_adapter import BatchJob, Refused, put_in_place, submit_bundles
from orchestrator.sweeps.run_state import live_runs, open_submissions
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import read_order, report_disk_errors, write_orders
from orchestrator.sweeps.submissions import Submission, discard_submission, read_submissions, write_submission
from orchestrator.targets.job_request import bundle_request
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Cluster

ASK_SECONDS = 0.5
"""Between looks at what Slurm last said, while that is not enough."""
FIND_SECONDS = 2.0
"""Between two searches for a job whose id nobody wrote down."""
SBATCH_SECONDS = 60.0
"""How long an earlier command's sbatch is waited for: as long as one of another host may take, which cannot be seen."""
ARRIVAL_SECONDS = 10.0
"""How long a request may still be on its way to Slurm when the sbatch that sent it has gone: its MessageTimeout, as
slurm.conf has it by default."""

_UNREACHED = re.compile(
    "unable to contact|connection (refused|failure)|find an address|munge|standby mode|temporarily unable",
    re.IGNORECASE,
)  # fmt: skip
"""sbatch's words where Slurm, and not what was asked of it, is at fault."""


# --- what earlier commands left -------------------------------------------------------------------------------------


def poll_jobs(sweep: SweepPaths, scheduler: JobMonitor) -> Jobs:
    """What Slurm says of every job that ``sweep`` may still have, each known by its id: it is certain enough to decide
    by what is submitted. No call is made where the sweep has no such job. To be called by one command at a time.

    Raises:
        SystemFault: Slurm does not answer, or an sbatch of an earlier command is still at work.
    """
    _adopt(sweep, scheduler)
    submissions = open_submissions(sweep)
    while not _is_certain(sweep, submissions, jobs := scheduler.look(submissions)):
        if not scheduler.answers():
            fault = jobs.fault or "squeue does not answer"
            raise SystemFault(f"{fault}; without it nobody knows what runs. Try again later")
        time.sleep(ASK_SECONDS)
    return jobs


def _is_certain(sweep: SweepPaths, submissions: Sequence[Submission], jobs: Jobs) -> bool:
    """Whether something is known of every job, and the end of each whose runs are still waited for."""
    if any(jobs.of(job_id) is None for submission in submissions for job_id in submission.job_ids()):
        return False
    if not jobs.doubtful:
        return True
    waited_for = {bundle.root.name for bundle, _ in live_runs(sweep, jobs)}
    in_doubt = {s.job_of(bundle) for s in submissions for bundle in s.bundles if bundle in waited_for}
    return jobs.doubtful.isdisjoint(in_doubt - {None})


def _adopt(sweep: SweepPaths, scheduler: JobMonitor) -> None:
    """Settle every submission whose job's id was never recorded: it is recorded now, or there is no such job and the
    submission is forgotten."""
    submissions = read_submissions(sweep)
    known = {submission.job_id for submission in submissions}
    for submission in submissions:
        if submission.job_id is None:
            job_id = _job_of(sweep, submission, lambda name, since: set(scheduler.find(name, since)) - known)
            with report_disk_errors(sweep):
                _settle(sweep, submission, job_id)
            known.add(job_id)


def _settle(sweep: SweepPaths, submission: Submission, job_id: str | None) -> None:
    if job_id is None:
        discard_submission(sweep, submission)
        return
    put_in_place(submission.folder(sweep), [sweep.bundle(bundle) for bundle in submission.bundles], job_id)
    write_submission(sweep, replace(submission, job_id=job_id))


def _job_of(sweep: SweepPaths, submission: Submission, find: Callable[[str, float], set[str]]) -> str | None:
    """The job of a submission that does not say, None where there is none."""
    here = submission.host == socket.gethostname()
    # A clock that was set back must not make it wait for longer.
    certain_at = min(submission.time, time.time()) + (ARRIVAL_SECONDS if here else SBATCH_SECONDS)
    while True:
        _wait_for_sbatch(submission.folder(sweep))
        late = time.time() >= certain_at
        found = find(submission.name, submission.time)
        if found or late:
            return max(found, key=int, default=None)
        time.sleep(FIND_SECONDS)


def _wait_for_sbatch(folder: Path) -> None:
    """Until no sbatch on this host submits from ``folder``."""
    deadline = time.monotonic() + SBATCH_SECONDS
    while (pid := _sbatch(folder)) is not None:
        if time.monotonic() > deadline:
            raise SystemFault(
                f"an sbatch that an earlier command started (process {pid}) has not ended for {SBATCH_SECONDS:g} s; "
                "wait for it or kill it, then try again"
            )
        time.sleep(0.1)


def _sbatch(folder: Path) -> int | None:
    """The process on this host that was given a script in ``folder``. Nothing else has that on its command line."""
    script = os.fsencode(folder / ".submission_file_")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is another user's
        if any(word.startswith(script) for word in words):
            return int(path.parent.name)
    return None


# --- handing over ---------------------------------------------------------------------------------------------------


def enqueue(
    sweep: SweepPaths, plan: Plan, orders: Sequence[BundleOrder], cluster: Cluster, jobs: Jobs, exclude: Sequence[str]
) -> Sequence[str]:
    """Hand ``orders`` over to Slurm. Nodes in ``exclude`` are left aside where others will do; the value is which were.

    Raises:
        InputError: Slurm refuses what the cluster's profile asks for, or a limit in it is too low for any job.
        SystemFault: Slurm, or the disk, does not do its part.
    """
    profile = cluster.profile
    requests = {order.bundle_id: bundle_request(plan, order.schedule, profile) for order in orders}
    widest = max(cell.spec["placement"]["nodes"] for cell in plan.cells if cell.run_ids)
    count = count_lanes(widest, profile.max_nodes, profile.max_jobs)
    lanes = [lane_name(sweep, plan, lane) for lane in range(count or 0)]
    loads = None if count is None else _loads(sweep, plan, lanes, cluster, jobs)
    arrays = form_arrays(requests, loads, cluster.configuration.max_array_size)
    write_orders(sweep, orders)
    for number, array in enumerate(arrays):
        lane = None if array.lane is None else lanes[array.lane]
        try:
            exclude = _submit_where_possible(sweep, array, cluster, lane, exclude)
        except Refused as refused:
            raise _refusal(refused, array, cluster.profile, sum(len(a.bundles) for a in arrays[:number])) from refused
    return exclude


def lane_name(sweep: SweepPaths, plan: Plan, lane: int) -> str:
    """The name of every job in that lane, from whichever command: other sweeps' jobs do not have it."""
    return f"{plan.name}-{digest(str(sweep.root.resolve()))[:6]}-{lane}"


def _loads(sweep: SweepPaths, plan: Plan, lanes: Sequence[str], cluster: Cluster, jobs: Jobs) -> list[float]:
    """Minutes of work, at most, that each lane has before it."""
    minutes = dict.fromkeys(lanes, 0.0)
    for submission in read_submissions(sweep):
        for bundle in submission.bundles if submission.name in minutes else ():
            job_id = submission.job_of(bundle)
            job = jobs.of(job_id) if job_id else None
            order = read_order(sweep.bundle(bundle))
            if job is not None and order is not None and not job.ended:
                minutes[submission.name] += bundle_request(plan, order.schedule, cluster.profile).minutes
    return list(minutes.values())


def _submit_where_possible(
    sweep: SweepPaths, array: Array, cluster: Cluster, lane: str | None, exclude: Sequence[str]
) -> Sequence[str]:
    """Without the nodes in ``exclude`` if there are others: on the same nodes is better than not at all."""
    try:
        _submit(sweep, array, cluster, lane, exclude)
    except Refused as refused:
        if not (refused.certain and exclude):
            raise
        _submit(sweep, array, cluster, lane, ())
        return ()
    return exclude


def _submit(sweep: SweepPaths, array: Array, cluster: Cluster, lane: str | None, exclude: Sequence[str]) -> None:
    token = f"{sweep.root.name}-{secrets.token_hex(5)}"
    name = cluster.configuration.cluster_name
    submission = Submission(token, lane or token, array.bundles, time.time(), socket.gethostname(), cluster=name)
    bundles = [sweep.bundle(bundle) for bundle in array.bundles]
    job = BatchJob(
        submission.folder(sweep), array.request, cluster.profile, submission.name, len(bundles),
        in_lane=lane is not None, exclude=exclude,
    )  # fmt: skip
    with report_disk_errors(sweep):
        write_submission(sweep, submission, sync=False)
        sync_file_system(sweep.root)  # with the orders of its bundles: Slurm is not to know of more than the disk
        try:
            job_id = submit_bundles(job, bundles)
        except Refused as refused:
            if refused.certain:
                discard_submission(sweep, submission)
            raise
        write_submission(sweep, replace(submission, job_id=job_id))


def _refusal(refused: Refused, array: Array, profile: Profile, before: int) -> OrchestratorError:
    kept = f" ({before} bundles submitted before it go on)" if before else ""
    if _UNREACHED.search(str(refused)) or not refused.certain:
        return SystemFault(
            f"Slurm did not answer sbatch: {refused}{kept}. Run the command again: it asks Slurm what it has, and "
            "submits what is missing"
        )
    asked = f"{len(array.bundles)} x {array.request.nodes} nodes for {array.request.minutes} min"
    return input_error(f"profile {profile.name}" if profile.name else "", f"sbatch refuses {asked}: {refused}{kept}",
                 "python -m orchestrator plan RECIPE prints the script; mend the profile, then run the command again")  # fmt: skip
