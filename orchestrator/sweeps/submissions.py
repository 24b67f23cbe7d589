"""Submissions to Slurm: submissions/<token>.json, written before sbatch is called and completed afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launch.common.atomic_files import RecordError, write_json
from launch.common.typed_json import read_record
from launch.contract.paths import SweepPaths
from orchestrator.errors import SystemFault


@dataclass(frozen=True)
class Submission:
    """One call of sbatch: a job, or an array with one element per bundle."""

    token: str
    """Unique to this call, whose folder is submitit/<token>."""
    name: str
    """The job's name: the token, or the chain's name if the profile has limits (--dependency=singleton)."""
    bundles: tuple[str, ...]
    """Bundle ids; the position is the array's index."""
    time: float
    """The time just before the call of sbatch, in seconds since the epoch. Nothing is ordered by it: clocks may be set back."""
    host: str
    """The login node that called sbatch."""
    job_id: str | None = None
    """The id that sbatch printed. It is None before that, or if the orchestrator died in between."""
    cluster: str = ""
    """Slurm's ClusterName. An id is valid only on that cluster."""
    number: int = 0
    """The number of the submission. Submissions of a sweep count up in the order of the calls of sbatch."""
    schedules: tuple[tuple[tuple[str, int], ...], ...] = ()
    """The (run_id, attempt) pairs of each bundle."""
    withdrawn: tuple[str, ...] = ()
    """The bundles whose jobs began no run, because each was skipped. A command took those that still waited out of the queue."""

    def job_of(self, bundle_id: str) -> str | None:
        """Return the job's id as squeue and sacct write it, "123" or "123_4" in an array, or None if unknown or withdrawn."""
        if self.job_id is None or bundle_id in self.withdrawn:
            return None
        return self.job_id if len(self.bundles) == 1 else f"{self.job_id}_{self._places[bundle_id]}"

    def schedule_of(self, bundle_id: str) -> Sequence[tuple[str, int]]:
        return self.schedules[self._places[bundle_id]] if self.schedules else ()

    def job_ids(self) -> list[str]:
        """Return the id of each bundle's job, in the bundles' order; empty if no id is recorded."""
        return [job_id for bundle in self.bundles if (job_id := self.job_of(bundle)) is not None]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {bundle: place for place, bundle in enumerate(self.bundles)}

    def folder(self, sweep: SweepPaths) -> Path:
        """Return the folder of submitit's files and of the job's output."""
        return sweep.root.absolute().joinpath("submitit", self.token)


def read_submissions(sweep: SweepPaths) -> list[Submission]:
    """Return every submission of ``sweep``, in order.

    Raises:
        SystemFault: a record is damaged, or written by another version.
    """
    try:
        names = sorted(os.listdir(sweep.submissions))
    except FileNotFoundError:
        return []
    found = [_read(sweep.submissions / name) for name in names if name.endswith(".json") and name[0] != "."]
    return sorted(found, key=lambda submission: submission.number)


def write_submission(sweep: SweepPaths, submission: Submission, *, sync: bool = True) -> None:
    """Write or replace the record of ``submission``. Without ``sync`` the caller syncs the file system."""
    write_json(_path(sweep, submission), submission, sync=sync)


def discard_submission(sweep: SweepPaths, submission: Submission) -> None:
    """Delete the record of a submission for which Slurm has no job."""
    _path(sweep, submission).unlink(missing_ok=True)


def _path(sweep: SweepPaths, submission: Submission) -> Path:
    return sweep.submissions / f"{submission.token}.json"


def _read(path: Path) -> Submission:
    try:
        return read_record(Submission, path)
    except RecordError as error:
        raise SystemFault(
            f"{path}: not a submission of this version ({error}); squeue --name shows whether its jobs live: end them, "
            "then delete it"
        ) from error
