"""Decide which attempts a submission begins, by bundle. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from launch.contract.bundle import BundleOrder
from launch.contract.plan import Cell, Plan, PlannedBundle, Precedents
from launch.failures.job_outcome import never_started
from orchestrator.errors import input_error
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.sweeps.close_attempts import MOST_LAUNCHES
from orchestrator.sweeps.run_state import RunState
from orchestrator.targets.job_request import limits_of
from orchestrator.targets.slurm_cluster import Cluster, Target

Policy = Literal["new", "unfinished", "failed", "infrastructure"]
"""The runs that a submission may begin. "new": runs that never began. "unfinished": also runs that were interrupted or
cancelled, or whose infrastructure failed. "failed": also runs that failed by themselves. "infrastructure": the runs that a
watching command retries by itself."""
MOST_ATTEMPTS = 3
"""The number of attempts that a run gets by itself if its infrastructure keeps failing."""


def attempts_to_begin(
    plan: Plan, states: Mapping[str, RunState], target: Target, policy: Policy
) -> tuple[BundleOrder, ...]:
    """Return the attempts to start now, by bundle. Leave out bundles whose job runs or waits.

    A living supervisor on a host takes over additional orders. A bundle that no verdict has needed yet has no states and is
    left out.

    Raises:
        InputError: ``target`` cannot run one of them, because it has changed since the plan was made or is another target.
    """
    cells, schedules = plan.cell_of_run(), {}
    bundles = [bundle for bundle in plan.all_bundles if _is_free(bundle, states, target)]
    own = {run_id for bundle in bundles for run_id in bundle.run_ids if _may_begin(states[run_id], policy)}
    again = {cells[run_id].cell_id for run_id in own} if policy == "failed" else set()
    for bundle in bundles:
        alive = {run_id for run_id in bundle.run_ids if states[run_id].alive}
        skipped = {run_id for run_id in bundle.run_ids if states[run_id].name == "SKIPPED"}
        # Its supervisor begins a skipped run if those on which it depends fail no more.
        chosen = own.intersection(bundle.run_ids)
        chosen |= {run_id for run_id in skipped if not again.isdisjoint(_decisive(cells[run_id], plan))}
        wanted = _with_partners(bundle, cells, chosen)
        wanted -= {r for r in skipped - chosen if not _awaits_eager(cells[r], plan, states, wanted)}
        if policy == "infrastructure":
            # A run that failed by its own fault is not retried unasked, even with a partner: a success would hide the failure.
            wanted -= {r for r in wanted if states[r].ended_by_itself and not states[r].has_results}
        if wanted - alive:
            # The order replaces the one on disk, so it must repeat queued attempts.
            wanted = (wanted - alive) | {run_id for run_id in alive if states[run_id].name == "QUEUED"}
            schedules[bundle] = tuple((r, states[r].next_attempt) for r in bundle.run_ids if r in wanted)
    attempts = {run_id: number for schedule in schedules.values() for run_id, number in schedule}
    return tuple(_order(bundle, schedule, attempts, target, plan) for bundle, schedule in schedules.items())


def _is_free(bundle: PlannedBundle, states: Mapping[str, RunState], target: Target) -> bool:
    """Return whether the bundle may be ordered now: verdicts need it, and no job runs or waits for it."""
    if not states.keys() >= set(bundle.run_ids):
        return False
    alive = [states[run_id] for run_id in bundle.run_ids if states[run_id].alive]
    return not alive or not (isinstance(target, Cluster) or any(state.has_job for state in alive))


def _decisive(cell: Cell, plan: Plan) -> set[str]:
    """Return the cells whose failures may spare ``cell`` its runs."""
    others = plan.precedents.get(cell.cell_id, Precedents())
    return {cell.cell_id, others.eager, *others.same_command}


def _awaits_eager(cell: Cell, plan: Plan, states: Mapping[str, RunState], wanted: set[str]) -> bool:
    """Return whether a run of ``cell`` was skipped because its eager baseline failed, and that may succeed in ``wanted``."""
    eager = plan.precedents.get(cell.cell_id, Precedents()).eager
    return bool(eager) and states[f"{eager}-r0"].failed and not wanted.isdisjoint({f"{eager}-r0", f"{eager}-r1"})


def _may_begin(state: RunState, policy: Policy) -> bool:
    if policy == "infrastructure":
        return _may_begin_unasked(state)
    if state.name == "PLANNED":
        return True
    if state.name in ("INTERRUPTED", "CANCELLED") or (state.failed and not state.ended_by_itself):
        return policy in ("unfinished", "failed")
    return policy == "failed" and state.failed


def _may_begin_unasked(state: RunState) -> bool:
    """Return whether nodes, network or scheduler ended the run or kept it from starting, and nobody cancelled it."""
    if state.ended_by_itself or state.name == "CANCELLED":
        return False
    if state.abandoned:
        return state.launches < MOST_LAUNCHES
    given_up = state.outcome is not None and never_started(state.outcome)
    return state.failed and not given_up and state.next_attempt <= MOST_ATTEMPTS


def _with_partners(bundle: PlannedBundle, cells: Mapping[str, Cell], wanted: set[str]) -> set[str]:
    """Return ``wanted`` and the runs that must share an allocation with them, because speed is compared only within one.

    These are the eager run of each repeat with a wanted graphed run, and all graphed runs of a repeat whose eager run is
    wanted.
    """
    of_bundle = {cells[run_id].cell_id: cells[run_id] for run_id in bundle.run_ids}.values()
    chosen = wanted.difference(*(cell.repeat_ids for cell in of_bundle))
    for repeat in zip(*(cell.repeat_ids for cell in of_bundle), strict=True):
        hit = wanted.intersection(repeat)
        if hit:
            eager = {run_id for run_id in repeat if not cells[run_id].graphed}
            chosen |= set(repeat) if hit & eager else hit | eager
    return chosen


def _order(
    bundle: PlannedBundle,
    schedule: tuple[tuple[str, int], ...],
    attempts: Mapping[str, int],
    target: Target,
    plan: Plan,
) -> BundleOrder:
    """Return the order of ``schedule``. ``attempts`` has those that are ordered at the same time, in all bundles."""
    cells = plan.cell_of_run()
    runs = [cells[run_id] for run_id, _ in schedule]
    spec = runs[0].run_spec
    for reason in keep_sound_fixes(spec, (*target.check_spec(spec), *target.check_time(runs))):
        raise input_error(f"{runs[0].label} [{reason.rule}]", reason.message, reason.remedy)
    settings = vars(target.start_settings(spec))
    limits, looks = limits_of(runs), _looks(plan, [run_id for run_id, _ in schedule])
    found = {cells[run_id].cell_id: plan.precedents.get(cells[run_id].cell_id) for run_id in bundle.run_ids}
    precedents = {cell: others for cell, others in found.items() if others}
    firsts = {f"{first}-r0" for others in precedents.values() for first in others.same_command}
    awaited = {run_id: attempts[run_id] for run_id in sorted(firsts.difference(bundle.run_ids) & attempts.keys())}
    return BundleOrder(
        bundle.bundle_id, bundle.workload_id, schedule, limits, tracking=plan.tracking, looks=looks,
        precedents=precedents, awaited=awaited, **settings,
    )  # fmt: skip


def _looks(plan: Plan, run_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the runs before which the verdicts so far are judged: one for each number of repeats in the plan's looks."""
    cells = plan.cell_of_run()
    repeats = {run_id: cells[run_id].run_ids.index(run_id) for run_id in run_ids if run_id in cells[run_id].repeat_ids}
    blocks = itertools.pairwise(plan.looks)
    firsts = (next((run for run, repeat in repeats.items() if begin <= repeat < end), None) for begin, end in blocks)
    return tuple(filter(None, firsts))
