"""A supervisor's order (bundle.json), the attempts that it has begun (begun.jsonl), and the runs not needed (early_stop.json)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.common.atomic_files import RecordError, parse_json
from launch.common.file_lock import Owner
from launch.common.regular_file import read_regular
from launch.common.typed_json import from_json, read_record
from launch.contract.paths import BundlePaths
from launch.contract.plan import Limits


@dataclass(frozen=True)
class Step:
    """How ranks start in a Slurm allocation: one srun starts each run as one step.

    ``arguments`` go to srun: the kind of MPI, container flags, and whatever the site needs. ``python`` is the path of the
    ranks' interpreter, inside the container if there is one.
    """

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    python: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class BundleOrder:
    """Run attempt k of run R, in this order, each within its limits.

    A supervisor never starts an attempt whose folder exists, so a bundle that starts twice does its work once.
    """

    bundle_id: str
    workload_id: str
    schedule: tuple[tuple[str, int], ...]
    """(run_id, attempt) pairs."""
    limits: Limits
    slots: int
    """CPU or GPU slots that the bundle takes on its host; 0 under Slurm, where the bundle has the allocation to itself."""
    slot_names: tuple[str, ...]
    """All slots of the host: ids of its visible GPUs, or cpu0, cpu1, ..."""
    tracking: Mapping[str, Any] | None = None
    """Settings of launch.track; None means no tracking."""
    step: Step | None = None
    """How ranks start under Slurm; None starts them on this host."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The cluster profile's variables for every rank. The run's own spec overrides them."""
    looks: tuple[str, ...] = ()
    """Runs before which the verdicts so far are judged. If they are settled, the runs left are not begun (EarlyStop)."""


@dataclass(frozen=True)
class Beginning:
    """An attempt that a supervisor is about to begin."""

    run_id: str
    attempt: int
    time: float
    """In seconds since the epoch. Only people read it, because clocks may be set back."""
    supervisor: Owner


@dataclass(frozen=True)
class EarlyStop:
    """Why a bundle with ``repeats: auto`` stopped: its verdicts were settled after ``repeats`` of ``limit``."""

    repeats: int
    limit: int
    run_ids: tuple[str, ...]
    """The runs that are not needed."""


def runs_not_needed(bundle: BundlePaths) -> frozenset[str]:
    """Return the runs that nobody begins, since the bundle's verdicts are settled. A damaged record names none."""
    try:
        return frozenset(read_record(EarlyStop, bundle.early_stop).run_ids)
    except (FileNotFoundError, RecordError):
        return frozenset()


def read_beginnings(bundle: BundlePaths) -> dict[tuple[str, int], Beginning]:
    """Return the latest readable beginning of each attempt, by (run_id, attempt)."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in read_regular(bundle.begun).splitlines():
            # A damaged line does not affect those after it.
            with contextlib.suppress(TypeError, ValueError):
                beginning = from_json(Beginning, parse_json(line))
                found[beginning.run_id, beginning.attempt] = beginning
    return found
