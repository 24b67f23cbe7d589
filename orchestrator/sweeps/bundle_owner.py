"""The owner of a bundle, which works on it or will do so: a supervisor on this host, this host's queue, or a Slurm job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launch.common.atomic_files import parse_json
from launch.common.file_lock import UNNAMED, Owner, holder
from launch.common.regular_file import read_regular
from launch.contract.bundle import (
    Beginning,
    BundleOrder,
    latest_outcomes,
    read_beginnings,
    runs_not_begun,
    runs_not_needed,
)
from launch.contract.cancellation import Cancellation, read_cancellation
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.skipped_runs import OutcomeOf
from orchestrator.slurm.job_listing import UNHEARD, Job
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.store import read_order
from orchestrator.sweeps.submissions import read_submissions

CANCELLED_STATES = ("CANCELLED", "REVOKED")
"""The states of a job that somebody cancelled. Its runs that have not started are not started unasked."""


@dataclass(frozen=True)
class SlurmSubmissions:
    """A bundle's submissions to Slurm."""

    job: Job
    """The job of the latest submission, or of an earlier one if only that job is alive."""
    schedules: Sequence[Sequence[tuple[str, int]]]
    """The (run_id, attempt) pairs of each submission."""


@dataclass(frozen=True)
class BundleOwner:
    """All information about a bundle. Each file is read when first needed, because most bundles need few of them."""

    bundle: BundlePaths
    queue_lives: bool
    submissions: SlurmSubmissions | None = None
    planned: Sequence[str] = ()
    """The bundle's runs in the plan; empty if the caller has no plan."""

    @cached_property
    def sweep(self) -> SweepPaths:
        return self.bundle.sweep

    @cached_property
    def supervisor(self) -> Owner | None:
        """The living supervisor, or None."""
        return holder(self.bundle.lock)

    @cached_property
    def order(self) -> BundleOrder | None:
        return read_order(self.bundle)

    @cached_property
    def ordered(self) -> Mapping[str, int]:
        """The ordered attempt of each run."""
        return dict(self.order.schedule) if self.order else {}

    @cached_property
    def outcome_of(self) -> OutcomeOf:
        """How a run of any bundle ended last, unless it failed and the order begins it again."""
        return latest_outcomes(self.sweep, self.order)

    @cached_property
    def not_needed(self) -> frozenset[str]:
        return runs_not_needed(self.bundle)

    @cached_property
    def not_begun(self) -> frozenset[str]:
        return runs_not_begun(self.bundle, self.order)

    @property
    def job(self) -> Job | None:
        return self.submissions.job if self.submissions else None

    @cached_property
    def on_slurm(self) -> bool:
        """Whether the latest order went to Slurm instead of this host."""
        return self.submissions is not None and not (self.order is not None and self.order.step is None)

    @cached_property
    def lives(self) -> bool:
        """Whether a living supervisor, queue or job works on the bundle or will do so."""
        if self.job is not None and not self.job.ended:
            return True
        # A lock that a supervisor took on another node always appears to be held.
        return (self.queue_lives or self.supervisor is not None) and not self.on_slurm

    @cached_property
    def _cancellation(self) -> Cancellation | None:
        return read_cancellation(self.bundle)

    def cancelled(self, run_id: str) -> bool:
        """Return whether the ordered attempt of the run was cancelled, by ``cancel`` or by somebody's scancel."""
        by_scancel = self.job is not None and self.job.state in CANCELLED_STATES and self.on_slurm
        return by_scancel or (self._cancellation is not None and self._cancellation.covers(run_id))

    def waits(self, run_id: str, started: int) -> bool:
        """Return whether an attempt after number ``started`` is ordered, and a living owner will start it."""
        return self.lives and not self.cancelled(run_id) and self._is_due(run_id, started)

    def has_abandoned(self, run_id: str, started: int) -> bool:
        """Return whether the job, or this host's queue, has ended without starting the attempt ordered after number ``started``."""
        on_host = self.order is not None and self.order.step is None
        return not self.lives and (self.on_slurm or on_host) and self._is_due(run_id, started)

    def lacks_job(self, run_id: str, started: int) -> bool:
        """Return whether no job will start the attempt that was ordered on Slurm after number ``started``, and ``cancel`` does
        not cover it. A command may wait to submit it."""
        covered = self._cancellation is not None and self._cancellation.covers(run_id)
        ordered = self.order is not None and self.order.step is not None
        return ordered and not self.lives and not covered and self._is_due(run_id, started)

    def _is_due(self, run_id: str, started: int) -> bool:
        return self.ordered.get(run_id, 0) > started and run_id not in self.not_begun

    @cached_property
    def launches(self) -> int:
        """How often the bundle was submitted to Slurm without starting any attempt."""
        schedules = self.submissions.schedules if self.submissions else ()
        return sum(
            not any(self.sweep.run(run_id).attempt(k).root.exists() for run_id, k in schedule) for schedule in schedules
        )

    @cached_property
    def beginnings(self) -> Mapping[tuple[str, int], Beginning]:
        return read_beginnings(self.bundle)

    def runs(self, run_id: str, number: int) -> bool:
        """Return whether a supervisor lives that may have begun this attempt, instead of an earlier supervisor."""
        began = self.beginnings.get((run_id, number))
        return self.supervisor is not None and (began is None or self.supervisor in (began.supervisor, UNNAMED))

    def was_requeued(self, run_id: str, number: int) -> bool:
        """Return whether another supervisor has taken the bundle since the attempt began."""
        began = self.beginnings.get((run_id, number))
        return began is not None and self._taken.get("token", began.supervisor.token) != began.supervisor.token

    @property
    def allocation(self) -> str:
        """The name of its latest allocation, as launch.supervise.supervisor writes it; "" if there was none."""
        return f"{self.bundle.root.name}.{self._taken['allocation']}" if "allocation" in self._taken else ""

    @cached_property
    def _taken(self) -> Mapping[str, Any]:
        """The line that the latest supervisor wrote when it took the bundle; empty if there is none or it is damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            # A damaged earlier line does not matter.
            latest = parse_json(read_regular(self.bundle.allocations).rpartition(b"\n")[0].rpartition(b"\n")[2])
            return latest if isinstance(latest, dict) else {}
        return {}


def bundle_owners(
    sweep: SweepPaths, jobs: Jobs | None, bundles: Mapping[BundlePaths, Sequence[str]]
) -> Iterator[BundleOwner]:
    """Yield the owner of each of ``bundles``, given with their planned runs. ``jobs`` None means that Slurm was not asked."""
    queue_lives = holder(sweep.queue_lock) is not None
    submissions = _submissions_by_bundle(sweep, jobs) if jobs is not None else {}
    for bundle, planned in bundles.items():
        yield BundleOwner(bundle, queue_lives, submissions.get(bundle.root.name), planned)


def _submissions_by_bundle(sweep: SweepPaths, jobs: Jobs) -> dict[str, SlurmSubmissions]:
    submissions = [submission for submission in read_submissions(sweep) if submission.job_id is not None]
    # After a crash, Slurm may reuse an id. If two submissions have the same id, the job belongs to the later one.
    owner = {submission.job_id: submission.token for submission in submissions}
    found: dict[str, list[tuple[Sequence[tuple[str, int]], Job]]] = {}
    for submission in submissions:
        if owner[submission.job_id] == submission.token:
            for bundle in submission.bundles:
                if job_id := submission.job_of(bundle):
                    job = jobs.of(job_id) or Job(job_id, submission.name, UNHEARD)
                    found.setdefault(bundle, []).append((submission.schedule_of(bundle), job))
    return {bundle: _latest(rows) for bundle, rows in found.items()}


def _latest(rows: Sequence[tuple[Sequence[tuple[str, int]], Job]]) -> SlurmSubmissions:
    living = [job for _, job in rows if not job.ended]
    return SlurmSubmissions((living or [job for _, job in rows])[-1], [schedule for schedule, _ in rows])
