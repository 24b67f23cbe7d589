"""Who works on a bundle, or will: a supervisor on this host, its queue, or a job of Slurm's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

CALLED_OFF = ("CANCELLED", "REVOKED")
"""States of a job that somebody took away: what it had not begun is not begun unasked."""


@dataclass(frozen=True)
class Handed:
    """A bundle's submissions to Slurm."""

    job: Job
    """Of the latest one; or of an earlier one, if that lives and the latest does not."""
    times: Sequence[float]


def handed_over(sweep: SweepPaths, jobs: Jobs | None) -> dict[str, Handed]:
    """By bundle. Of two submissions with one job id, which Slurm gives again after a crash, the later has the job."""
    if jobs is None:
        return {}
    submissions = [submission for submission in read_submissions(sweep) if submission.job_id is not None]
    owner = {submission.job_id: submission.token for submission in submissions}
    found: dict[str, list[tuple[float, Job]]] = {}
    for submission in submissions:
        if owner[submission.job_id] == submission.token:
            for bundle in submission.bundles:
                job_id = submission.job_of(bundle) or ""
                job = jobs.of(job_id) or Job(job_id, submission.name, UNHEARD)
                found.setdefault(bundle, []).append((submission.time, job))
    return {bundle: _latest(rows) for bundle, rows in found.items()}


def _latest(rows: Sequence[tuple[float, Job]]) -> Handed:
    living = [job for _, job in rows if not job.ended]
    return Handed((living or [job for _, job in rows])[-1], [time for time, _ in rows])


@dataclass(frozen=True)
class Supervision:
    """What is known of a run's bundle; of most bundles in a large store little is asked, and no more is read."""

    bundle: BundlePaths
    queue_lives: bool
    handed: Handed | None = None
    planned: Sequence[str] = ()
    """Its runs, as far as the plan has them."""

    @cached_property
    def since(self) -> int | None:
        """When the living supervisor took the bundle, in ns since the epoch; None where none lives."""
        return self.bundle.lock.stat().st_mtime_ns if holder(self.bundle.lock) is not None else None

    @cached_property
    def order(self) -> BundleOrder | None:
        return read_order(self.bundle)

    @cached_property
    def ordered(self) -> Mapping[str, int]:
        """The attempt that is ordered, by run."""
        return dict(self.order.schedule) if self.order else {}

    @property
    def job(self) -> Job | None:
        return self.handed.job if self.handed else None

    @cached_property
    def on_slurm(self) -> bool:
        """Whether it was Slurm, and not this host, that was told last."""
        return self.handed is not None and not (self.order is not None and self.order.step is None)

    @cached_property
    def lives(self) -> bool:
        """Whether somebody lives who works on the bundle, or will."""
        if self.handed is not None and not self.handed.job.ended:
            return True
        # A lock that was taken on a node of Slurm's always seems to be held.
        return (self.queue_lives or self.since is not None) and not self.on_slurm

    @cached_property
    def _cancellation(self) -> Cancellation | None:
        return read_cancellation(self.bundle)

    def cancelled(self, run_id: str) -> bool:
        """Whether what was ordered of the run was called off: by ``cancel``, or by somebody's scancel."""
        by_scancel = self.handed is not None and self.handed.job.state in CALLED_OFF and self.on_slurm
        return by_scancel or (self._cancellation is not None and self._cancellation.covers(run_id))

    def waits(self, run_id: str, begun: int) -> bool:
        """Whether an attempt after ``begun`` has been ordered and somebody lives who will begin it."""
        return self.lives and not self.cancelled(run_id) and self.ordered.get(run_id, 0) > begun

    def has_abandoned(self, run_id: str, begun: int) -> bool:
        return not self.lives and self.on_slurm and self.ordered.get(run_id, 0) > begun

    @cached_property
    def launches(self) -> int:
        """How often the bundle was handed to Slurm since any of its runs began an attempt."""
        sweep = self.bundle.sweep
        run_ids = {*self.planned, *self.ordered}
        last = max((begun_at(sweep, run_id) / 1e9 for run_id in run_ids if sweep.run(run_id).attempts()), default=0.0)
        return sum(time > last for time in self.handed.times) if self.handed else 0

    @cached_property
    def taken(self) -> int:
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


def begun_at(sweep: SweepPaths, run_id: str) -> int:
    """When the latest attempt was begun, in ns since the epoch: the folder of attempts changes then and only then."""
    return (sweep.run(run_id).root / "attempts").stat().st_mtime_ns
