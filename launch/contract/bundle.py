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
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Limits, Precedents


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
    precedents: Mapping[str, Precedents] = field(default_factory=dict)
    """Those of each cell of the bundle."""
    awaited: Mapping[str, int] = field(default_factory=dict)
    """Attempts of other bundles' runs that were ordered together with this bundle. Earlier ones are no precedents."""

    @property
    def attempts(self) -> Mapping[str, int]:
        """The ordered attempt of each run, in this bundle and others."""
        return {**self.awaited, **dict(self.schedule)}


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


def why_skipped(
    sweep: SweepPaths, run_id: str, ordered: Mapping[str, int], precedents: Mapping[str, Precedents]
) -> str:
    """Return why a run that never began is not worth its GPU minutes; "" if it is.

    It would probably repeat a failure of its cell, or of a cell with the same command, or its eager baseline has failed for
    good, so that nothing could be compared. ``precedents`` has those of each cell. An attempt in ``ordered`` that has not begun
    may still succeed.
    """
    cell, _, repeat = run_id.rpartition("-r")
    if not repeat.isdecimal() or sweep.run(run_id).attempt_numbers():
        return ""
    others, own = precedents.get(cell, Precedents()), _first_outcomes(sweep, cell, ordered)
    if repeat != "0" and (known := _lasting_failure(*own)):
        return f"not tried: {known}"
    eager = _first_outcomes(sweep, others.eager, ordered) if others.eager else (None, None)
    if known := _failure_of_eager(*eager, repeat, others.eager):
        return f"not tried: no eager run to compare with, since {known}"
    for first in others.same_command:
        outcome, _ = _first_outcomes(sweep, first, ordered)
        if outcome is not None and outcome.is_command_failure:
            return f"not tried: {first}-r0 has the same command but for numbers, and ended as {_ending(outcome)}"
    return ""


def _lasting_failure(first: Outcome | None, second: Outcome | None, of: str = "") -> str:
    """Describe the outcomes of repeats 0 and 1 if others would probably end like them; return "" if not.

    One failure by settings or installed software suffices. Any other failure counts once repeat 1 has confirmed it.
    """
    if first is None:
        return ""
    if first.repeats_alike:
        return f"repeat 0{of} ended as {_ending(first)}"
    return f"repeats 0 and 1{of} ended as {_ending(first)}" if second is not None and second.confirms(first) else ""


def _failure_of_eager(first: Outcome | None, second: Outcome | None, repeat: str, cell: str) -> str:
    """Describe the outcomes of the eager ``cell`` if a graphed ``repeat`` could not be compared; return "" if it could."""
    if first is None or first.outcome == "NUMERIC":
        return ""  # curves up to the first NaN can be compared
    if first.lacked_gpu_memory and second is None and repeat != "0":
        # Repeat 0 shows whether graphs fit. Others wait for the next eager run.
        return f"repeat 0 of {cell} ended as {_ending(first)}"
    return _lasting_failure(first, second, f" of {cell}")


def _first_outcomes(sweep: SweepPaths, cell: str, ordered: Mapping[str, int]) -> tuple[Outcome | None, Outcome | None]:
    """Return how repeats 0 and 1 of ``cell`` ended last, None where one has not."""
    return (_latest_outcome(sweep, f"{cell}-r0", ordered), _latest_outcome(sweep, f"{cell}-r1", ordered))


def _ending(failure: Outcome) -> str:
    named = f" ({failure.failure_class})" * (failure.failure_class not in ("", failure.outcome))
    return f"{failure.outcome}{named} in {failure.phase}"


def _latest_outcome(sweep: SweepPaths, run_id: str, ordered: Mapping[str, int]) -> Outcome | None:
    run = sweep.run(run_id)
    number = max(run.attempt_numbers(), default=0)
    try:
        return read_outcome(run.attempt(number)) if number >= max(1, ordered.get(run_id, 0)) else None
    except RecordError:
        return None


def runs_not_begun(bundle: BundlePaths, order: BundleOrder | None) -> frozenset[str]:
    """Return the ordered runs that nobody begins: no verdict needs them, or they would probably be in vain."""
    if order is None:
        return runs_not_needed(bundle)
    runs = (run_id for run_id, _ in order.schedule)
    skipped = {run_id for run_id in runs if why_skipped(bundle.sweep, run_id, order.attempts, order.precedents)}
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
