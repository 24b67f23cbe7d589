"""Find the other sweeps that hold the slots of this host for which a sweep's runs wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Plan
from launch.supervise.host_slots import held_slots
from orchestrator.errors import SystemFault
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import read_order


@dataclass(frozen=True)
class SlotHolder:
    """A slot that a run of another sweep holds."""

    slot: str
    sweep: SweepPaths
    run_id: str
    """Empty between two runs, or if this version cannot read the other sweep."""
    pid: int
    """The process id of its supervisor."""
    since: float
    """In seconds since the epoch."""


def slot_holders(sweep: SweepPaths, plan: Plan, states: Mapping[str, RunState]) -> list[SlotHolder]:
    """Return the holders of slots for which queued runs of ``plan`` wait, without this sweep's own runs."""
    if plan.scheduler != "host":
        return []
    waiting = (bundle for bundle in plan.bundles if any(states[r].name == "QUEUED" for r in bundle.run_ids))
    # All bundles of a host wait for the same slots.
    order = next((read_order(sweep.bundle(bundle.bundle_id)) for bundle in waiting), None)
    return list(_others(sweep, order.slot_names)) if order is not None else []


def _others(sweep: SweepPaths, names: tuple[str, ...]) -> Iterator[SlotHolder]:
    for held in held_slots(names):
        other = held.bundle.sweep
        if other.root.resolve() != sweep.root.resolve():
            yield SlotHolder(held.name, other, _running(held.bundle), held.pid, held.since)


def _running(bundle: BundlePaths) -> str:
    """Return the bundle's run that has begun and not ended, or ""."""
    try:
        order = read_order(bundle)
    except SystemFault:
        return ""
    attempts = [(run_id, bundle.sweep.run(run_id).attempt(k)) for run_id, k in order.schedule] if order else []
    return next((run_id for run_id, attempt in attempts if attempt.root.exists() and not attempt.has_ended), "")
