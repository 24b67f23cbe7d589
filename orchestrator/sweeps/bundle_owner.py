"""Who works on a bundle, or will: a supervisor on this host, this host's queue, or a Slurm job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from launch.common.atomic_files import RecordError, read_json_lines
from launch.common.file_lock import holder
from launch.contract.bundle import BundleOrder
from launch.contract.cancellation import Cancellation, read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from orchestrator.slurm.job_listing import UNHEARD, Job
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.store import read_order
from orchestrator.sweeps.submissions import read_submissions

CANCELLED_STATES = ("CANCELLED", "REVOKED")
"""States of a job that somebody took away. What it had not started is not started unasked."""


@dataclass(frozen=True)
class SlurmSubmissions:
    """A bundle's submissions to Slurm."""

    job: Job
    """Of the latest one; or of an earlier one, if that job is alive and the latest is not."""
    times: Sequence[float]


@dataclass(frozen=True)
class BundleOwner:
    """What is known of a bundle. Each file is read when it is first needed: of most bundles little is asked."""

    bundle: BundlePaths
    queue_lives: bool
    submissions: SlurmSubmissions | None = None
    planned: Sequence[str] = ()
    """The bundle's runs in the plan; empty where the caller has no plan."""

    @cached_property
    def sweep(self) -> SweepPaths:
        return self.bundle.sweep

    @cached_property
    def supervised_since(self) -> int | None:
        """When the living supervisor took the bundle, in ns since the epoch; None where none lives."""
        return self.bundle.lock.stat().st_mtime_ns if holder(self.bundle.lock) is not None else None

    @cached_property
    def order(self) -> BundleOrder | None:
        return read_order(self.bundle)

    @cached_property
    def ordered(self) -> Mapping[str, int]:
        """The ordered attempt of each run."""
        return dict(self.order.schedule) if self.order else {}

    @property
    def job(self) -> Job | None:
        return self.submissions.job if self.submissions else None

    @cached_property
    def on_slurm(self) -> bool:
        """Whether the latest order went to Slurm, and not to this host."""
        return self.submissions is not None and not (self.order is not None and self.order.step is None)

    @cached_property
    def lives(self) -> bool:
        """Whether somebody alive works on the bundle, or will."""
        if self.job is not None and not self.job.ended:
            return True
        # A lock that a supervisor took on another node always seems to be held.
        return (self.queue_lives or self.supervised_since is not None) and not self.on_slurm

    @cached_property
    def _cancellation(self) -> Cancellation | None:
        return read_cancellation(self.bundle)

    def cancelled(self, run_id: str) -> bool:
        """Whether the ordered attempt of the run was cancelled: by ``cancel``, or by somebody's scancel."""
        by_scancel = self.job is not None and self.job.state in CANCELLED_STATES and self.on_slurm
        return by_scancel or (self._cancellation is not None and self._cancellation.covers(run_id))

    def waits(self, run_id: str, started: int) -> bool:
        """Whether an attempt after number ``started`` is ordered, and somebody alive will start it."""
        return self.lives and not self.cancelled(run_id) and self.ordered.get(run_id, 0) > started

    def has_abandoned(self, run_id: str, started: int) -> bool:
        """Whether the job has ended without starting the attempt that was ordered after number ``started``."""
        return not self.lives and self.on_slurm and self.ordered.get(run_id, 0) > started

    @cached_property
    def launches(self) -> int:
        """How often the bundle was submitted to Slurm since any of its runs started an attempt."""
        sweep = self.sweep
        run_ids = {*self.planned, *self.ordered}
        last = max((begun_at(sweep, run_id) / 1e9 for run_id in run_ids if sweep.run(run_id).attempts()), default=0.0)
        return sum(time > last for time in self.submissions.times) if self.submissions else 0

    @cached_property
    def last_taken(self) -> int:
        """When a supervisor last took the bundle, in ns since the epoch."""
        try:
            return self.bundle.allocations.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def allocation(self) -> str:
        """The name of its latest supervision, as launch.supervise.supervisor writes it; "" where there was none."""
        try:
            lines = list(read_json_lines(self.bundle.allocations))
            return f"{self.bundle.root.name}.{lines[-1]['allocation']}" if lines else ""
        except (RecordError, KeyError):
            return ""


def bundle_owners(
    sweep: SweepPaths, jobs: Jobs | None, bundles: Mapping[BundlePaths, Sequence[str]]
) -> Iterator[BundleOwner]:
    """Yield the owner of each of ``bundles``, which maps to its planned runs. ``jobs`` None: Slurm was not asked."""
    queue_lives = holder(sweep.queue_lock) is not None
    submissions = _submissions_by_bundle(sweep, jobs) if jobs is not None else {}
    for bundle, planned in bundles.items():
        yield BundleOwner(bundle, queue_lives, submissions.get(bundle.root.name), planned)


def _submissions_by_bundle(sweep: SweepPaths, jobs: Jobs) -> dict[str, SlurmSubmissions]:
    submissions = [submission for submission in read_submissions(sweep) if submission.job_id is not None]
    # After a crash Slurm may give an id again: of two submissions with one id, the job is the later one's.
    owner = {submission.job_id: submission.token for submission in submissions}
    found: dict[str, list[tuple[float, Job]]] = {}
    for submission in submissions:
        if owner[submission.job_id] == submission.token:
            for bundle in submission.bundles:
                job_id = submission.job_of(bundle) or ""
                job = jobs.of(job_id) or Job(job_id, submission.name, UNHEARD)
                found.setdefault(bundle, []).append((submission.time, job))
    return {bundle: _latest(rows) for bundle, rows in found.items()}


def _latest(rows: Sequence[tuple[float, Job]]) -> SlurmSubmissions:
    living = [job for _, job in rows if not job.ended]
    return SlurmSubmissions((living or [job for _, job in rows])[-1], [time for time, _ in rows])


def begun_at(sweep: SweepPaths, run_id: str) -> int:
    """Return when the latest attempt was started, in ns since the epoch: only then the folder of attempts changes."""
    return (sweep.run(run_id).root / "attempts").stat().st_mtime_ns
