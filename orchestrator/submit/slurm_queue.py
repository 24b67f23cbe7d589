"""Submit bundles to Slurm, each exactly once, even if a command dies while it submits.

A submission is on disk, without a job id, before sbatch is called. A later command that finds such a record asks Slurm for jobs
of its name before it submits anything. This command does the same if sbatch fails. Jobs do not need a living command, because
their orders are also on disk before sbatch is called.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.common.atomic_files import sync_file_system
from launch.contract.bundle import BundleOrder
from launch.contract.errors import OrchestratorError
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.spec_ids import digest
from orchestrator import PROGRAM
from orchestrator.errors import SystemFault, input_error
from orchestrator.submit.job_arrays import Array, count_chains, form_arrays
from orchestrator.submit.sbatch import BatchJob, Refused, submit_bundles
from orchestrator.sweeps.run_state import idle_submissions, live_runs, open_submissions
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import read_order, report_disk_errors, write_orders
from orchestrator.sweeps.submissions import Submission, discard_submission, read_submissions, write_submission
from orchestrator.targets.job_request import bundle_request
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Cluster

POLL_SECONDS = 0.5
"""The time between two checks of Slurm's last answer while it is not certain enough."""
FIND_SECONDS = 2.0
"""The time between two searches for a job whose id is not recorded."""
SBATCH_SECONDS = 60.0
"""How long to wait for an earlier command's sbatch. On another host it is not visible, so this time is always waited."""
ARRIVAL_SECONDS = 10.0
"""How long a request may be on its way to Slurm after its sbatch has ended (Slurm's default MessageTimeout)."""

_UNREACHED = re.compile(
    "unable to contact|connection (refused|failure)|find an address|munge|standby mode",
    re.IGNORECASE,
)  # fmt: skip
"""The messages of sbatch if Slurm is at fault, not the request."""
_CLOSED = re.compile("partition not available|creation temporarily disabled|I/O error writing script")
"""The messages of sbatch if Slurm takes no job now: a drained partition, ports or nodes that are busy, its own full disk."""

_SUBMIT_LIMIT = re.compile(r"(QOS|Assoc)(Max|Grp)SubmitJob\w*")
"""The reasons that sbatch prints if a user or an account has too many jobs. Each element of an array is one of them."""
_QUEUE_FULL = re.compile("temporarily unable to accept job|job queue full|MaxJobCount limit reached")
"""What sbatch prints if all users together have too many jobs, ended ones that squeue still lists (MinJobAge) included."""


# --- what earlier commands left behind ------------------------------------------------------------------------------


def poll_jobs(sweep: SweepPaths, scheduler: JobMonitor) -> Jobs:
    """Return the jobs that ``sweep`` may still have, certain enough to decide what to submit.

    Slurm is not called if the sweep has no such job. Only one command at a time may call this.

    Raises:
        SystemFault: Slurm does not answer, or an sbatch of an earlier command still runs.
    """
    _adopt(sweep, scheduler)
    submissions = [*open_submissions(sweep), *(submission for submission, _ in idle_submissions(sweep))]
    while not _is_certain(sweep, submissions, jobs := scheduler.look(submissions)):
        if not scheduler.answers():
            fault = jobs.fault or "squeue does not answer"
            raise SystemFault(f"{fault}; the state of jobs is unknown without it. Try again later")
        time.sleep(POLL_SECONDS)
    return jobs


def _is_certain(sweep: SweepPaths, submissions: Sequence[Submission], jobs: Jobs) -> bool:
    """Return whether every job is known, and no job with unfinished runs is doubtful."""
    if any(jobs.of(job_id) is None for submission in submissions for job_id in submission.job_ids()):
        return False
    if not jobs.doubtful:
        return True
    waited_for = {bundle.root.name for bundle, _ in live_runs(sweep, jobs)}
    in_doubt = {s.job_of(bundle) for s in submissions for bundle in s.bundles if bundle in waited_for}
    return jobs.doubtful.isdisjoint(in_doubt - {None})


def _adopt(sweep: SweepPaths, scheduler: JobMonitor) -> None:
    """Find the job of each submission without a job id. Record its id, or discard the submission if there is no job."""
    for submission in read_submissions(sweep):
        if submission.job_id is None:
            job_id = _await_job(sweep, submission, scheduler)
            with report_disk_errors(sweep):
                if job_id is None:
                    discard_submission(sweep, submission)
                else:
                    write_submission(sweep, replace(submission, job_id=job_id))


def _await_job(sweep: SweepPaths, submission: Submission, scheduler: JobMonitor) -> str | None:
    """Return the job of a submission without a job id, or None once no job exists and none can arrive any more."""
    here = submission.host == socket.gethostname()
    # Wait from now on: the clock may have been set since sbatch was called, and another host has another clock.
    certain_at = time.monotonic() + (ARRIVAL_SECONDS if here else SBATCH_SECONDS)
    while True:
        _wait_for_sbatch(submission.folder(sweep))
        late = time.monotonic() >= certain_at
        job_id = _find_job(sweep, submission, scheduler)
        if job_id is not None or late:
            return job_id
        time.sleep(FIND_SECONDS)


def _find_job(sweep: SweepPaths, submission: Submission, scheduler: JobMonitor) -> str | None:
    """Return the job that squeue or sacct lists under the submission's name and no other of that name has, or None."""
    # A submission of another name may have the id too: after a crash, slurmctld may assign ids a second time.
    known = {other.job_id for other in read_submissions(sweep) if other.name == submission.name}
    return max(set(scheduler.find(submission.name, submission.time)) - known, key=int, default=None)


def _wait_for_sbatch(folder: Path) -> None:
    """Wait until no sbatch on this host submits from ``folder``."""
    deadline = time.monotonic() + SBATCH_SECONDS
    while (pid := _find_sbatch(folder)) is not None:
        if time.monotonic() > deadline:
            raise SystemFault(
                f"an sbatch that an earlier command started (process {pid}) has not ended for {SBATCH_SECONDS:g} s; "
                "wait for it or kill it, then try again"
            )
        time.sleep(0.1)


def _find_sbatch(folder: Path) -> int | None:
    """Return the process on this host that has a script of ``folder`` on its command line, which only sbatch has."""
    script = os.fsencode(folder / ".submission_file_")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # The process has ended, or belongs to another user.
            continue
        if any(word.startswith(script) for word in words):
            return int(path.parent.name)
    return None


# --- submission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """What one call of :func:`enqueue` has submitted."""

    avoided: Sequence[str] = ()
    """The nodes that its jobs avoid."""
    left: Sequence[str] = ()
    """The bundles for which a limit on the number of jobs left no room. Their orders are on disk."""
    limit: str = ""
    """That limit, in Slurm's word."""


def enqueue(
    sweep: SweepPaths,
    plan: Plan,
    orders: Sequence[BundleOrder],
    cluster: Cluster,
    scheduler: JobMonitor,
    exclude: Sequence[str],
) -> Submitted:
    """Submit ``orders`` to Slurm. Avoid the nodes in ``exclude`` if other nodes suffice.

    Slurm accepts an array as a whole or not at all, and each element counts as a job. So an array that exceeds a limit on the
    number of jobs is halved until a single job has no room.

    Raises:
        InputError: Slurm rejects the profile's request, or a limit in the profile is too low for any job.
        SystemFault: Slurm does not answer, or the disk cannot be written to.
    """
    profile = cluster.profile
    requests = {order.bundle_id: bundle_request(plan, order.schedule, profile) for order in orders}
    widest = max(cell.spec["placement"]["nodes"] for cell in plan.cells if cell.run_ids)
    count = count_chains(widest, profile.max_nodes, profile.max_jobs)
    chains = [chain_name(sweep, plan, chain) for chain in range(count or 0)]
    loads = None if count is None else _loads(sweep, plan, chains, cluster, scheduler)
    arrays = deque(form_arrays(requests, loads, cluster.configuration.max_array_size))
    write_orders(sweep, orders)
    submitted = 0
    while arrays:
        array = arrays.popleft()
        chain = None if array.chain is None else chains[array.chain]
        try:
            exclude = _submit_where_possible(partial(_submit, sweep, scheduler, array, cluster, chain), exclude)
        except Refused as refused:
            limit = _submit_limit(refused)
            if not limit:
                raise _refusal(refused, array, cluster.profile, submitted) from refused
            if len(array.bundles) == 1:
                return Submitted(exclude, [bundle for a in (array, *arrays) for bundle in a.bundles], limit)
            arrays.extendleft(reversed(array.halves()))
        else:
            submitted += len(array.bundles)
    return Submitted(exclude)


def chain_name(sweep: SweepPaths, plan: Plan, chain: int | str) -> str:
    """Return the name of every job in the chain, the same for all commands and unique to the sweep."""
    return f"{plan.name}-{digest(str(sweep.root.resolve()))[:6]}-{chain}"


def _loads(
    sweep: SweepPaths, plan: Plan, chains: Sequence[str], cluster: Cluster, scheduler: JobMonitor
) -> list[float]:
    """Return an upper bound on the minutes of work that each chain already has."""
    jobs = scheduler.look(open_submissions(sweep))
    minutes = dict.fromkeys(chains, 0.0)
    for submission in read_submissions(sweep):
        for bundle in submission.bundles if submission.name in minutes else ():
            job_id = submission.job_of(bundle)
            job = jobs.of(job_id) if job_id else None
            order = read_order(sweep.bundle(bundle))
            if job is not None and order is not None and not job.ended:
                minutes[submission.name] += bundle_request(plan, order.schedule, cluster.profile).minutes
    return list(minutes.values())


def _submit_where_possible(submit: Callable[[Sequence[str]], None], exclude: Sequence[str]) -> Sequence[str]:
    """Submit without the nodes in ``exclude``, or with them if sbatch finds no others. Return the avoided nodes."""
    try:
        submit(exclude)
    except Refused as refused:
        if not (refused.certain and exclude) or _submit_limit(refused):
            raise
        submit(())
        return ()
    return exclude


def _submit(
    sweep: SweepPaths, scheduler: JobMonitor, array: Array, cluster: Cluster, chain: str | None, exclude: Sequence[str]
) -> None:
    token = f"{sweep.root.name}-{secrets.token_hex(5)}"
    name = cluster.configuration.cluster_name
    number = 1 + max((submission.number for submission in read_submissions(sweep)), default=0)
    orders = [read_order(sweep.bundle(bundle)) for bundle in array.bundles]
    schedules = tuple(order.schedule if order else () for order in orders)
    submission = Submission(
        token, chain or token, array.bundles, time.time(), socket.gethostname(), None, name, number, schedules
    )
    job = BatchJob(sweep, submission.folder(sweep), array, cluster.profile, submission.name, exclude)
    with report_disk_errors(sweep):
        write_submission(sweep, submission, sync=False)
        # Sync the bundles' orders too, because Slurm must not know more than the disk.
        sync_file_system(sweep.root)
        try:
            job_id = submit_bundles(job)
        except Refused as refused:
            job_id = _find_refused(sweep, submission, scheduler, refused)
        write_submission(sweep, replace(submission, job_id=job_id))


def _find_refused(sweep: SweepPaths, submission: Submission, scheduler: JobMonitor, refused: Refused) -> str:
    """Return the job that Slurm has although sbatch failed.

    Raises:
        Refused: there is no job. If Slurm does not answer, the refusal is not certain.
    """
    try:
        job_id = _find_job(sweep, submission, scheduler)
    except SystemFault as fault:
        raise Refused(str(refused), certain=False) from fault
    if job_id is not None:
        return job_id
    if refused.certain:
        discard_submission(sweep, submission)
    raise refused


def _submit_limit(refused: Refused) -> str:
    """Return the limit on the number of jobs for which sbatch failed, in Slurm's word; "" if it failed for another reason."""
    if not refused.certain:
        return ""
    if limit := _SUBMIT_LIMIT.search(str(refused)):
        return limit.group()
    return "MaxJobCount, of all users together" if _QUEUE_FULL.search(str(refused)) else ""


def _refusal(refused: Refused, array: Array, profile: Profile, before: int) -> OrchestratorError:
    kept = f" (the {before} bundles that were submitted earlier continue)" if before else ""
    if refused.certain and _CLOSED.search(str(refused)):
        return SystemFault(f"Slurm takes no jobs now: {refused}{kept}. Run the command again once it does")
    if _UNREACHED.search(str(refused)) or not refused.certain:
        return SystemFault(
            f"Slurm did not answer sbatch: {refused}{kept}. Run the command again. It checks which jobs Slurm has, and submits "
            "the missing ones"
        )
    asked = f"{len(array.bundles)} x {array.request.nodes} nodes for {array.request.minutes} min"
    fix = f"{PROGRAM} plan RECIPE prints the script; correct the profile, then run the command again"
    return input_error(
        f"profile {profile.name}" if profile.name else "", f"sbatch rejects {asked}: {refused}{kept}", fix
    )
