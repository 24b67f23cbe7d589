"""Decide which attempts a submission begins, by bundle. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Literal

from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import Outcome
from launch.contract.plan import Cell, Plan, PlannedBundle
from launch.contract.skipped_runs import why_skipped
from launch.failures.job_outcome import never_started
from orchestrator.errors import input_error
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.sweeps.close_attempts import MOST_LAUNCHES
from orchestrator.sweeps.run_state import RunState
from orchestrator.targets.job_request import limits_of
from orchestrator.targets.slurm_cluster import Cluster, Target

Policy = Literal["new", "unfinished", "failed", "infrastructure"]
"""The runs that a submission may begin. "new": runs that never began. "unfinished": also runs that were interrupted or
cancelled, or whose infrastructure failed, and failed ones that were ordered again and did not begin. "failed": also runs that
failed by themselves. "infrastructure": the runs that a watching command retries by itself."""
MOST_ATTEMPTS = 3
"""The number of attempts that a run gets by itself if its infrastructure keeps failing."""
_COMPLETED = Outcome("COMPLETED", "teardown", "", 0.0, 0.0)


def attempts_to_begin(
    plan: Plan, states: Mapping[str, RunState], target: Target, *policies: Policy, asked: Set[str] = frozenset()
) -> tuple[BundleOrder, ...]:
    """Return the attempts that one of ``policies`` starts now, by bundle, and those of the ``asked`` runs.

    Leave out bundles whose job runs or waits (:func:`runs_behind_jobs`). A living supervisor on a host takes over additional
    orders. A bundle that no verdict has needed yet has no states and is left out.

    Raises:
        InputError: ``target`` cannot run one of them, because it has changed since the plan was made or is another target.
    """
    schedules = {}
    bundles = [bundle for bundle in plan.all_bundles if _is_free(bundle, states, target)]
    of_bundles = {run_id for bundle in bundles for run_id in bundle.run_ids}
    wanted = _runs_to_begin(plan, bundles, states, asked & of_bundles)
    for policy in policies:
        chosen = {run_id for run_id in of_bundles if _may_begin(states[run_id], policy)}
        wanted |= _runs_to_begin(plan, bundles, states, chosen, unasked=policy == "infrastructure")
    for bundle in bundles:
        alive = {run_id for run_id in bundle.run_ids if states[run_id].alive}
        if chosen := wanted.intersection(bundle.run_ids) - alive:
            # The order replaces the one on disk, so it must repeat what waits and what runs.
            schedules[bundle] = tuple((r, _attempt(states[r])) for r in bundle.run_ids if r in chosen | alive)
    attempts = {run_id: number for schedule in schedules.values() for run_id, number in schedule}
    return tuple(_order(bundle, schedule, attempts, target, plan) for bundle, schedule in schedules.items())


def _attempt(state: RunState) -> int:
    """Return the number of the attempt that runs, or else of the next one."""
    return state.next_attempt - (state.name == "RUNNING")


def runs_behind_jobs(plan: Plan, states: Mapping[str, RunState], target: Target, policy: Policy) -> Mapping[str, int]:
    """Return the runs, each with its next attempt, that ``policy`` begins only after the job of their bundle has ended."""
    busy = [one for one in plan.all_bundles if states.keys() >= set(one.run_ids) and not _is_free(one, states, target)]
    left = (states[run_id] for bundle in busy for run_id in bundle.run_ids)
    return {state.run_id: state.next_attempt for state in left if not state.alive and _may_begin(state, policy)}


def _runs_to_begin(
    plan: Plan, bundles: Sequence[PlannedBundle], states: Mapping[str, RunState], first: Set[str], unasked: bool = False
) -> set[str]:
    """Return the ``first`` runs, those that were skipped and may begin once these succeed, and their partners."""
    chosen = {*first}
    # Verdicts that were settled by a failure are open once its run is tried again.
    failed = {run_id for run_id in chosen if states[run_id].failed}
    reopened = [bundle for bundle in bundles if not failed.isdisjoint(bundle.run_ids)]
    chosen |= {run_id for bundle in reopened for run_id in bundle.run_ids if states[run_id].name == "NOT_NEEDED"}
    skipped = {run_id for bundle in bundles for run_id in bundle.run_ids if states[run_id].name == "SKIPPED"}
    while freed := _would_begin(skipped - chosen, chosen, plan, states):
        chosen |= freed
    wanted = {run_id for bundle in bundles for run_id in _with_partners(bundle, plan.cell_of_run(), chosen)}
    wanted -= skipped - chosen
    if unasked:
        # A run that failed by its own fault is not retried unasked, even with a partner: a success would hide the failure.
        wanted -= {r for r in wanted - chosen if states[r].ended_by_itself and not states[r].has_results}
    return wanted


def _would_begin(skipped: Set[str], chosen: Set[str], plan: Plan, states: Mapping[str, RunState]) -> set[str]:
    """Return the ``skipped`` runs that would begin if every run of ``chosen`` completed."""

    def outcome_of(run_id: str) -> Outcome | None:
        if run_id in chosen:
            return _COMPLETED
        return states[run_id].outcome if run_id in states else None

    return {run_id for run_id in skipped if not why_skipped(run_id, outcome_of, plan.precedents)}


def _is_free(bundle: PlannedBundle, states: Mapping[str, RunState], target: Target) -> bool:
    """Return whether the bundle may be ordered now: verdicts need it, and no job runs or waits for it."""
    if not states.keys() >= set(bundle.run_ids):
        return False
    alive = [states[run_id] for run_id in bundle.run_ids if states[run_id].alive]
    return not alive or not (isinstance(target, Cluster) or any(state.has_job for state in alive))


def _may_begin(state: RunState, policy: Policy) -> bool:
    if policy == "infrastructure":
        return _may_begin_unasked(state)
    if state.name == "PLANNED":
        return True
    if state.name in ("INTERRUPTED", "CANCELLED") or (state.failed and (state.abandoned or not state.ended_by_itself)):
        return policy in ("unfinished", "failed")
    return policy == "failed" and state.failed


def _may_begin_unasked(state: RunState) -> bool:
    """Return whether nodes, network or scheduler ended the run or kept it from starting, and nobody cancelled it."""
    if state.abandoned and (state.failed or not state.finished):
        # If an outcome says CANCELLED, the run has been ordered again since.
        return state.launches < MOST_LAUNCHES and (state.finished or state.name != "CANCELLED")
    if state.ended_by_itself or state.name == "CANCELLED":
        return False
    given_up = state.outcome is not None and never_started(state.outcome)
    return state.failed and not given_up and state.next_attempt <= MOST_ATTEMPTS


def _with_partners(bundle: PlannedBundle, cells: Mapping[str, Cell], wanted: set[str]) -> set[str]:
    """Return ``wanted`` and the runs that must share an allocation with them, because speed is compared only within one.

    These are the eager run of each repeat with a wanted graphed run, and all graphed runs of a repeat whose eager run is
    wanted.
    """
    of_bundle = {cells[run_id].cell_id: cells[run_id] for run_id in bundle.run_ids}.values()
    chosen = wanted.intersection(bundle.run_ids).difference(*(cell.repeat_ids for cell in of_bundle))
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
