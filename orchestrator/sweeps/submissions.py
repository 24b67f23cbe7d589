"""What was handed to Slurm: submissions/<token>.json, written before sbatch is called and completed after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.common.atomic_files import RecordError, read_json, write_json
from launch.contract.paths import SweepPaths
from orchestrator.errors import SystemFault


@dataclass(frozen=True)
class Submission:
    """One call of sbatch: a job, or an array of as many elements as there are bundles."""

    token: str
    """Of this call alone; the folder submitit/<token> is its own."""
    name: str
    """The job's name: the token, or that of the lane (--dependency=singleton) that bounds the sweep."""
    bundles: tuple[str, ...]
    """Bundle ids; the place is the array's index."""
    time: float
    """When it was decided, in seconds since the epoch."""
    host: str
    """The login node that called sbatch."""
    job_id: str | None = None
    """As sbatch said it; None until then, and after a death of the orchestrator in between."""
    cluster: str = ""
    """Slurm's name of itself (ClusterName). An id is one of its jobs and of no other's."""

    def job_of(self, bundle_id: str) -> str | None:
        """The job's id as squeue and sacct write it: "123", or "123_4" of an array."""
        if self.job_id is None:
            return None
        return self.job_id if len(self.bundles) == 1 else f"{self.job_id}_{self._places[bundle_id]}"

    def job_ids(self) -> list[str]:
        """Of its bundles, in their order; empty where no id is recorded."""
        return [job_id for bundle in self.bundles if (job_id := self.job_of(bundle)) is not None]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {bundle: place for place, bundle in enumerate(self.bundles)}

    def folder(self, sweep: SweepPaths) -> Path:
        """Where submitit keeps what it hands to the job, and the job's own output."""
        return sweep.root.absolute().joinpath("submitit", self.token)


def read_submissions(sweep: SweepPaths) -> list[Submission]:
    """Every submission of ``sweep``, the oldest first.

    Raises:
        SystemFault: one is damaged, or written by another version.
    """
    try:
        names = sorted(os.listdir(sweep.submissions))
    except FileNotFoundError:
        return []
    found = [_read(sweep.submissions / name) for name in names if name.endswith(".json") and name[0] != "."]
    return sorted(found, key=lambda submission: submission.time)


def write_submission(sweep: SweepPaths, submission: Submission, *, sync: bool = True) -> None:
    """Put ``submission`` on disk, in the place of what it was. Without ``sync`` the caller sees to that (as
    launch.common.atomic_files.write_bytes)."""
    write_json(_path(sweep, submission), asdict(submission), sync=sync)


def discard_submission(sweep: SweepPaths, submission: Submission) -> None:
    """Forget a submission of which Slurm has no job."""
    _path(sweep, submission).unlink(missing_ok=True)


def _path(sweep: SweepPaths, submission: Submission) -> Path:
    return sweep.submissions / f"{submission.token}.json"


def _read(path: Path) -> Submission:
    try:
        return _from_json(read_json(path))
    except (RecordError, KeyError, TypeError) as error:
        raise SystemFault(
            f"{path}: not a submission of this version ({error}); squeue --name shows whether its jobs live: end them, "
            "then delete it"
        ) from error


def _from_json(content: Mapping[str, Any]) -> Submission:
    return Submission(**dict(content) | {"bundles": tuple(content["bundles"])})
