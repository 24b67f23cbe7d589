"""What is to be done, decided before anything is: judge cells, form bundles, order attempts. Pure.

``make_plan`` is the dry run; ``orders`` is what submission carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from launch.contract.bundle import BundleOrder
from launch.contract.plan import Cell, Limits, Plan, PlannedBundle, Reason
from launch.contract.spec import spec_to_json
from launch.contract.spec_ids import digest
from launch.failures.diagnose import is_infrastructure
from orchestrator.errors import input_error
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import violations
from orchestrator.sweeps.postmortem import MOST_LAUNCHES, never_began
from orchestrator.sweeps.run_state import RunState
from orchestrator.targets.host import Host
from orchestrator.targets.job_request import limits_of
from orchestrator.targets.slurm_cluster import Cluster

Target = Host | Cluster
"""What cells are judged against and bundles are placed on."""
Policy = Literal["new", "unfinished", "failed", "infrastructure"]
"""What a submission may begin: runs never begun; also those that were interrupted or cancelled, or whose infrastructure
failed; also those that failed by themselves. Last, what a command that watches begins again unasked."""
MOST_ATTEMPTS = 3
"""How often a run is made before its infrastructure is given up, as long as nobody asks."""


def make_plan(recipe: Recipe, cells: Sequence[ResolvedCell], target: Target) -> Plan:
    """Judge ``cells`` and put those that can run on ``target`` into bundles, one a workload."""
    judged = _without_idle_twins([_judge(cell, recipe, target) for cell in cells])
    judged = _without_idle_twins(_within_time(judged, target))
    return Plan(
        recipe.name,
        recipe.text,
        recipe.file.name,
        recipe.equivalence,
        tuple(cell for cell, _ in judged),
        _bundles([cell for cell, _ in judged]),
        _tracking(recipe),
        target.scheduler,
        target.cluster_name,
    )


def _judge(cell: ResolvedCell, recipe: Recipe, target: Target) -> tuple[Cell, bool]:
    rejections = violations(cell.spec)
    lacking: tuple[Reason, ...] = () if rejections else target.lacks(cell.spec)
    state: Literal["run", "rejected", "not_runnable"] = (
        "rejected" if rejections else "not_runnable" if lacking else "run"
    )
    runs = tuple(f"{cell.spec.cell_id}-r{repeat}" for repeat in range(recipe.repeats)) if state == "run" else ()
    planned = Cell(
        cell.spec.cell_id,
        cell.label,
        cell.spec.workload_id,
        cell.spec.task_id,
        spec_to_json(cell.spec),
        state,
        rejections or lacking,
        cell.expect,
        runs,
        Limits(cell.resources.minutes_per_run * 60, cell.resources.hang_minutes * 60),
    )
    return planned, cell.twin


def _without_idle_twins(judged: Sequence[tuple[Cell, bool]]) -> list[tuple[Cell, bool]]:
    """Leave out twins of which no graphed cell can run: nobody asked for them, and nothing would be compared."""
    served = {cell.workload_id for cell, _ in judged if cell.graphed and cell.state == "run"}
    return [(cell, twin) for cell, twin in judged if not twin or cell.workload_id in served]


def _within_time(judged: Sequence[tuple[Cell, bool]], target: Target) -> list[tuple[Cell, bool]]:
    """Runs of one workload share an allocation: where none lasts long enough for all, none of them is runnable."""
    lacking = {
        workload: target.lacks_time([cell for cell in cells for _ in cell.run_ids])
        for workload, cells in _by_workload(cell for cell, _ in judged).items()
    }
    return [
        (replace(cell, state="not_runnable", reasons=reasons, run_ids=()), twin)
        if cell.run_ids and (reasons := lacking[cell.workload_id])
        else (cell, twin)
        for cell, twin in judged
    ]


def _bundles(cells: Iterable[Cell]) -> tuple[PlannedBundle, ...]:
    return tuple(
        PlannedBundle(f"{workload}-{digest([c.cell_id for c in group])[:6]}", workload, _interleaved(group))
        for workload, group in _by_workload(cells).items()
    )


def _by_workload(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells that are to run."""
    workloads: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.run_ids:
            workloads.setdefault(cell.workload_id, []).append(cell)
    return workloads


def _interleaved(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Repeat by repeat, the eager run of each first: eager, graphed, ..., eager, graphed, ..."""
    return tuple(run_id for repeat in zip(*(cell.run_ids for cell in cells), strict=True) for run_id in repeat)


def gpu_hours(plan: Plan) -> float:
    """The most GPU hours that the plan can take: every run to its time limit. 0 on CPUs."""
    total = 0.0
    for cell in plan.cells:
        placement = cell.spec["placement"]
        if placement["device"] == "cuda":
            total += (
                placement["nodes"] * placement["ranks_per_node"] * len(cell.run_ids) * cell.limits.run_seconds / 3600
            )
    return total


def check_budget(hours: float, most: float | None) -> None:
    """Raises InputError where the plan may take more than ``most`` GPU hours."""
    if most is not None and not hours <= most:
        raise input_error("--max-gpu-hours", f"{most:g}: this plan may take {hours:.2f} GPU hours (every run to its limit)",
                    "pick cells with --only, lower resources.minutes_per_run or repeats, or raise the limit")  # fmt: skip


def attempts_to_begin(
    plan: Plan, states: Mapping[str, RunState], target: Target, policy: Policy
) -> tuple[BundleOrder, ...]:
    """The attempts to make now, by bundle; a bundle with none, or with a living supervisor, is left out.

    Raises:
        InputError: ``target`` cannot hold one of them: it has changed since the plan was made, or is another.
    """
    cells = plan.cell_of_run()
    made = []
    for bundle in plan.bundles:
        if any(states[run_id].alive for run_id in bundle.run_ids):
            continue
        wanted = _with_partners(bundle, cells, {r for r in bundle.run_ids if _may_begin(states[r], policy)})
        if policy == "infrastructure":
            wanted -= {run_id for run_id in wanted if _is_failure_of_its_own(states[run_id])}
        if wanted:
            schedule = tuple((r, states[r].next_attempt) for r in bundle.run_ids if r in wanted)
            made.append(_order(bundle, schedule, [cells[r] for r, _ in schedule], target, plan))
    return tuple(made)


def _may_begin(state: RunState, policy: Policy) -> bool:
    if policy == "infrastructure":
        return _may_begin_unasked(state)
    if state.name == "PLANNED":
        return True
    if state.name in ("INTERRUPTED", "CANCELLED") or (state.failed and not _is_result(state)):
        return policy in ("unfinished", "failed")
    return policy == "failed" and state.failed


def _may_begin_unasked(state: RunState) -> bool:
    """What a node, the network or the scheduler ended, or kept from beginning, and nobody called off."""
    if _is_result(state) or state.name == "CANCELLED":
        return False
    if state.abandoned:
        return state.launches < MOST_LAUNCHES
    given_up = state.outcome is not None and never_began(state.outcome)
    return state.failed and not given_up and state.next_attempt <= MOST_ATTEMPTS


def _is_result(state: RunState) -> bool:
    """Whether the run ended by itself, well or not: then its infrastructure has done its part."""
    return state.outcome is not None and not is_infrastructure(state.outcome)


def _is_failure_of_its_own(state: RunState) -> bool:
    """As a partner too it is not made again unasked: a success would hide the failure."""
    return _is_result(state) and state.outcome is not None and not state.outcome.results_intact


def _with_partners(bundle: PlannedBundle, cells: Mapping[str, Cell], wanted: set[str]) -> set[str]:
    """``wanted`` and what must run beside it, since speed is compared within one allocation only: the eager run of
    each repeat that has a graphed run in it, and every graphed run of a repeat whose eager run is made again."""
    repeats = list(zip(*[iter(bundle.run_ids)] * len({cells[r].cell_id for r in bundle.run_ids}), strict=True))
    chosen: set[str] = set()
    for repeat in repeats:
        hit = wanted.intersection(repeat)
        if hit:
            eager = {run_id for run_id in repeat if not cells[run_id].graphed}
            chosen |= set(repeat) if hit & eager else hit | eager
    return chosen


def _order(
    bundle: PlannedBundle, schedule: tuple[tuple[str, int], ...], runs: Sequence[Cell], target: Target, plan: Plan
) -> BundleOrder:
    spec = runs[0].run_spec
    for reason in (*target.lacks(spec), *target.lacks_time(runs)):
        raise input_error(f"{runs[0].label} [{reason.rule}]", reason.message, reason.remedy)
    placing = target.placing(spec)
    return BundleOrder(
        bundle.bundle_id,
        bundle.workload_id,
        schedule,
        limits_of(runs),
        placing.slots,
        placing.slot_names,
        plan.tracking,
        placing.step,
        placing.environment,
    )


def _tracking(recipe: Recipe) -> dict[str, Any] | None:
    settings = recipe.wandb
    if settings.mode == "disabled":
        return None
    return {**asdict(settings), "tags": list(settings.tags), "group": recipe.name}
