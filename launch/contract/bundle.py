"""A supervisor's order (bundle.json), the attempts that it has begun (begun.jsonl), and the runs not needed (early_stop.json)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from launch.common.atomic_files import RecordError, parse_json
from launch.common.file_lock import Owner
from launch.common.grouped import grouped
from launch.common.regular_file import read_regular
from launch.common.typed_json import from_json, read_record
from launch.contract.cancellation import read_cancellation
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Limits, Precedents
from launch.contract.skipped_runs import OutcomeOf, why_skipped


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

    def graphed_partners(self) -> Mapping[str, Sequence[str]]:
        """Return the ordered graphed runs that are compared with each eager run."""
        runs = ((run_id, *run_id.rpartition("-r")) for run_id, _ in self.schedule)
        found = ((self.precedents.get(cell, Precedents()).eager, repeat, run_id) for run_id, cell, _, repeat in runs)
        return grouped((f"{eager}-r{repeat}", run_id) for eager, repeat, run_id in found if eager)


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


def read_intact_order(bundle: BundlePaths) -> BundleOrder | None:
    """Return the order of the bundle's supervisor, or None if there is none or it is damaged."""
    with contextlib.suppress(FileNotFoundError, RecordError):
        return read_record(BundleOrder, bundle.order)
    return None


def runs_not_needed(bundle: BundlePaths) -> frozenset[str]:
    """Return the runs that nobody begins, since the bundle's verdicts are settled. A damaged record names none."""
    try:
        return frozenset(read_record(EarlyStop, bundle.early_stop).run_ids)
    except (FileNotFoundError, RecordError):
        return frozenset()


def latest_outcomes(sweep: SweepPaths, order: BundleOrder | None) -> OutcomeOf:
    """Return a function that reads, once, how a run ended last.

    It returns None if the run has not ended, if its outcome is damaged, or if it failed and ``order`` begins it again.
    """
    ordered = order.attempts if order else {}

    @cache
    def latest_outcome(run_id: str) -> Outcome | None:
        number = max(sweep.run(run_id).attempt_numbers(), default=0)
        try:
            outcome = read_outcome(sweep.run(run_id).attempt(number)) if number else None
        except RecordError:
            return None
        begins_again = ordered.get(run_id, 0) > number
        return None if outcome and begins_again and not outcome.results_intact else outcome

    return latest_outcome


def runs_not_begun(bundle: BundlePaths, order: BundleOrder | None) -> frozenset[str]:
    """Return the ordered runs that nobody begins: no verdict needs them, or they would probably be in vain.

    The latter includes an eager run with results that is ordered again only for graphed runs that nobody begins.
    """
    spared = runs_not_needed(bundle)
    if order is None:
        return spared
    outcome_of, ordered = latest_outcomes(bundle.sweep, order), {run_id for run_id, _ in order.schedule}
    unbegun = {run_id for run_id in ordered if not bundle.sweep.run(run_id).attempt_numbers()}
    spared |= {run_id for run_id in unbegun if why_skipped(run_id, outcome_of, order.precedents)}
    partners = {run_id: graphed for run_id, graphed in order.graphed_partners().items() if spared.issuperset(graphed)}
    outcomes = {run_id: outcome_of(run_id) for run_id in ordered & partners.keys()}
    return spared | {run_id for run_id, outcome in outcomes.items() if outcome and outcome.results_intact}


def attempts_due(bundle: BundlePaths) -> Mapping[str, int]:
    """Return the ordered attempt of each run, whether it has begun or not, without cancelled runs and those that nobody begins."""
    order, cancelled = read_intact_order(bundle), read_cancellation(bundle)
    spared = runs_not_begun(bundle, order)
    due = {run_id: number for run_id, number in (order.schedule if order else ()) if run_id not in spared}
    return {run_id: number for run_id, number in due.items() if not (cancelled and cancelled.covers(run_id))}


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
