"""Ask Slurm about jobs: one squeue for all of them, then one sacct for those that squeue no longer lists.

squeue lists a job for some time after its end (MinJobAge, 300 s by default). sacct may fail, be late, or be switched off. A job
counts as ended only if Slurm reports its end, or if squeue does not list it for a grace period and sacct does not know it
either.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from launch.slurm.job_states import stage_of
from orchestrator.errors import SystemFault
from orchestrator.slurm.job_listing import GONE, SACCT_FORMAT, SQUEUE_FORMAT, UNHEARD, Job, parse_sacct, parse_squeue
from orchestrator.slurm.polled_command import PolledCommand
from orchestrator.sweeps.submissions import Submission
from orchestrator.targets.scontrol import query_configuration

GRACE_SECONDS = 60.0
"""How long squeue and sacct may both not know a job before it counts as ended. A job that has just ended reaches sacct late."""
GRACE_WITHOUT_ACCOUNTS = 5.0
CLOCKS_APART = 300.0
"""The largest difference between this host's clock and the controller's. With a larger one munge rejects every request."""
MOST_IDS = 1000
"""The most jobs per call of sacct. The rest wait for the next call."""


@dataclass(frozen=True)
class Jobs:
    """Slurm's last answer."""

    known: Mapping[str, Job] = field(default_factory=dict)
    fault: str = ""
    """Which command does not answer, and since when; empty if both answer."""
    accounting: bool = True
    """False if sacct is not available."""
    doubtful: frozenset[str] = frozenset()
    """The jobs that squeue no longer lists but whose end is not known yet."""

    def of(self, job_id: str) -> Job | None:
        """Return the job, or None if Slurm was never asked about it."""
        return self.known.get(job_id)


class JobMonitor:
    """Follow this user's jobs. ``clock`` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._squeue = PolledCommand("squeue")
        self._sacct = PolledCommand("sacct")
        self._cluster: str | None = None
        self._missed: dict[str, float] = {}
        """For each missing job, when squeue first answered without it."""
        self._numbers: dict[str, int] = {}
        """For each job id, the number of the latest submission that has it."""
        self._jobs = Jobs()

    def look(self, submissions: Iterable[Submission]) -> Jobs:
        """Return the state of every job of ``submissions``.

        Ask Slurm only if its last answer is old enough and some job may have changed. Otherwise return the same object as the
        last time.

        Raises:
            SystemFault: a submission belongs to another cluster.
        """
        submissions = list(submissions)
        self._check_cluster(submissions)
        self._forget_reused_ids(submissions)
        if self._squeue.due:
            asked = {
                job_id: _SubmittedJob(job_id, one.name, one.time) for one in submissions for job_id in one.job_ids()
            }
            if not all(_has_ended(self._jobs.of(job_id)) for job_id in asked):
                self._jobs = self._ask(asked)
        return self._jobs

    def settled(self, submissions: Sequence[Submission]) -> Jobs:
        """Return the result of :meth:`look` once no job is doubtful (a grace period at most), or if Slurm does not answer."""
        while (jobs := self.look(submissions)).doubtful and not self._squeue.fault:
            time.sleep(0.5)
        return jobs

    def answers(self) -> bool:
        """Return whether squeue answers. Ask it again if its last answer is old enough."""
        if self._squeue.due:
            self._listed()
        return not self._squeue.fault

    def find(self, name: str, since: float) -> tuple[str, ...]:
        """Return the ids of jobs and arrays called ``name`` that were submitted after ``since``, oldest first.

        Jobs that only sacct knows have ended. If sacct fails, they are not found.

        Raises:
            SystemFault: squeue does not answer.
        """
        listed = self._listed()
        if listed is None:
            raise SystemFault(
                f"{self._squeue.fault}; it is unknown without it which jobs have been submitted. Try again later"
            )
        text = self._accounts(since, f"--name={name}")
        jobs = [*listed, *parse_sacct(text, self._sacct.separator)]
        late = since - CLOCKS_APART
        found = {
            _base(job.job_id)
            for submitted, job in jobs
            if job.name == name and submitted > late and not _was_refused(job)
        }
        return tuple(sorted(found, key=int))

    def _check_cluster(self, submissions: Iterable[Submission]) -> None:
        named = {submission.cluster for submission in submissions if submission.cluster}
        if named and self._cluster is None:
            # If scontrol does not answer, squeue does not either, and that is reported.
            with contextlib.suppress(SystemFault):
                self._cluster = query_configuration().cluster_name
        others = named - {self._cluster}
        if others and self._cluster is not None:
            raise SystemFault(
                f"jobs of this sweep are on Slurm cluster {min(others)!r}, but cluster {self._cluster!r} answers here: run the "
                f"command on a login node of {min(others)!r}, or set SLURM_CONF to the configuration of that cluster"
            )

    def _forget_reused_ids(self, submissions: Iterable[Submission]) -> None:
        """Forget the job of an id that a later submission has. After a crash, slurmctld may assign ids a second time."""
        earlier = self._numbers
        asked = {job_id: one.number for one in submissions for job_id in one.job_ids()}
        self._numbers = earlier | {job_id: max(number, earlier.get(job_id, 0)) for job_id, number in asked.items()}
        reused = {job_id for job_id, number in earlier.items() if self._numbers[job_id] > number}
        if reused:
            known = {job_id: job for job_id, job in self._jobs.known.items() if job_id not in reused}
            self._jobs = replace(self._jobs, known=known, doubtful=self._jobs.doubtful - reused)
            self._missed = {job_id: since for job_id, since in self._missed.items() if job_id not in reused}

    def _ask(self, asked: Mapping[str, _SubmittedJob]) -> Jobs:
        rows = self._listed()
        if rows is None:
            return replace(self._jobs, fault=self._squeue.fault)
        now = self._clock()
        listed = {job.job_id: job for _, job in rows if job.job_id in asked and asked[job.job_id].name == job.name}
        known = {**self._jobs.known, **listed}
        missing = [job for job_id, job in asked.items() if job_id not in listed and not _has_ended(known.get(job_id))]
        self._missed = {job.job_id: self._missed.get(job.job_id, now) for job in missing}
        accounts, answered_for = self._accounts_of(missing)
        silent = self._sacct.exists and self._sacct.fault != ""
        there = {job_id for job_id, job in known.items() if job.ended and job.state != GONE} | listed.keys()
        grace = GRACE_SECONDS if self._sacct.exists else GRACE_WITHOUT_ACCOUNTS
        arrays = set() if silent else {_base(job_id) for job_id in there | accounts.keys()}
        for job in missing:
            last, account = known.get(job.job_id), accounts.get(job.job_id)
            heard = silent or account is not None or (last is not None and last.state != UNHEARD)
            # If neither squeue nor sacct ever listed the job, the time since its submission counts.
            since = max(self._missed[job.job_id], job.submitted) if heard else job.submitted
            certain = now >= since + grace and job.job_id in answered_for
            # An array element that was cancelled before it started leaves no trace, but other elements of its array do.
            end = "CANCELLED" if account is None and _never_began(last) and _base(job.job_id) in arrays else GONE
            known[job.job_id] = _unlisted(job, last, account, end if certain else None)
        doubtful = frozenset(job.job_id for job in missing if not known[job.job_id].ended)
        fault = self._sacct.fault if missing and self._sacct.exists else ""
        return Jobs(known, fault, self._sacct.exists, doubtful)

    def _listed(self) -> list[tuple[float, Job]] | None:
        """Return (time of submission, job) for each of this user's jobs in squeue, or None if it does not answer."""
        separator = self._squeue.separator
        text = self._squeue.ask(
            "--me", "--array", "--states=all", "--noheader", f"--format={separator.join(SQUEUE_FORMAT)}"
        )
        return None if text is None else list(parse_squeue(text, separator))

    def _accounts_of(self, missing: Sequence[_SubmittedJob]) -> tuple[dict[str, Job], set[str]]:
        """Return sacct's records of ``missing`` by job id, and the ids of jobs about which it was asked."""
        if missing and self._sacct.exists and not self._sacct.due:
            return {}, set()
        arrays = dict(islice({_base(job.job_id): job.name for job in missing}.items(), MOST_IDS))
        names = {job.job_id: job.name for job in missing if _base(job.job_id) in arrays}
        if not names:
            return {}, set()
        text = self._accounts(min(job.submitted for job in missing), f"--jobs={','.join(arrays)}")
        rows = sorted(parse_sacct(text, self._sacct.separator), key=lambda row: row[0])
        return {job.job_id: job for _, job in rows if names.get(job.job_id) == job.name}, set(names)

    def _accounts(self, since: float, which: str) -> str:
        if not self._sacct.exists:
            return ""
        # Begin an hour earlier, because clocks differ and local time repeats when summer time ends.
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 3600))
        text = self._sacct.ask(
            "--allocations", "--duplicates", "--parsable2", "--noheader", f"--delimiter={self._sacct.separator}",
            f"--starttime={begin}", which, f"--format={SACCT_FORMAT}",
        )  # fmt: skip
        return text or ""


# --- one job --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SubmittedJob:
    """A job as it was submitted. Slurm may reuse ids after a crash, so a job must match in id and name."""

    job_id: str
    name: str
    submitted: float


def _base(job_id: str) -> str:
    """Return the id of the job's array, or the job's own id."""
    return job_id.partition("_")[0]


def _was_refused(job: Job) -> bool:
    """Return whether Slurm refused the request. It keeps such a job as failed and without nodes."""
    return job.state == "FAILED" and not job.nodes


def _has_ended(job: Job | None) -> bool:
    return job is not None and job.ended


def _never_began(job: Job | None) -> bool:
    """Return whether the job was never seen running."""
    return job is None or job.state == UNHEARD or stage_of(job.state) == "waits"


def _unlisted(job: _SubmittedJob, last: Job | None, account: Job | None, end: str | None) -> Job:
    """Return the state of a job that squeue does not list. ``end`` is its final state if the grace period has passed."""
    if account is not None and account.ended:
        return account
    known = last or account or Job(job.job_id, job.name, UNHEARD)
    return replace(known, state=end, expected_start=None) if end else known
