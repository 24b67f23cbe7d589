"""A supervisor's order (bundle.json), the attempts that it has begun (begun.jsonl), and the runs not needed (early_stop.json)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.common.atomic_files import RecordError, parse_json
from launch.common.file_lock import Owner
from launch.common.regular_file import read_regular
from launch.common.typed_json import from_json, read_record
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import BundlePaths, SweepPaths
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


def why_skipped(sweep: SweepPaths, run_id: str, ordered: Mapping[str, int]) -> str:
    """Return why a run that never began would probably repeat a failure of its cell; "" if it is worth its GPU minutes.

    One failure by settings or installed software suffices. Any other failure counts once a second repeat has confirmed it. An
    attempt in ``ordered`` that has not begun may still succeed.
    """
    cell, _, repeat = run_id.rpartition("-r")
    if not repeat.isdecimal() or repeat == "0" or sweep.run(run_id).attempt_numbers():
        return ""
    first, second = (_latest_outcome(sweep, f"{cell}-r{number}", ordered) for number in (0, 1))
    if first is None or not (first.repeats_alike or (second is not None and second.confirms(first))):
        return ""
    named = f" ({first.failure_class})" * (first.failure_class not in ("", first.outcome))
    who = "repeat 0" if first.repeats_alike else "repeats 0 and 1"
    return f"{who} ended as {first.outcome}{named} in {first.phase}, so this one was not tried"


def _latest_outcome(sweep: SweepPaths, run_id: str, ordered: Mapping[str, int]) -> Outcome | None:
    run = sweep.run(run_id)
    number = max(run.attempt_numbers(), default=0)
    try:
        return read_outcome(run.attempt(number)) if number >= max(1, ordered.get(run_id, 0)) else None
    except RecordError:
        return None


def runs_not_begun(bundle: BundlePaths, schedule: Sequence[tuple[str, int]]) -> frozenset[str]:
    """Return the runs of ``schedule`` that nobody begins: no verdict needs them, or they would probably repeat a failure."""
    ordered = dict(schedule)
    skipped = {run_id for run_id in ordered if why_skipped(bundle.sweep, run_id, ordered)}
    return runs_not_needed(bundle) | skipped


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
