"""What is to be done, decided before anything is: judge cells, form bundles, order attempts. Pure.

``make_plan`` is the dry run; ``orders`` is what submission carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Optional

from launch.record import BundleOrder, Cell, Limits, Plan, PlannedBundle, Reason
from launch.spec import digest, spec_to_json
from orchestrator.errors import wrong
from orchestrator.host import Host
from orchestrator.legality import illegal
from orchestrator.recipe import Recipe
from orchestrator.state import RunState
from orchestrator.sweep import ResolvedCell

Policy = Literal["new", "unfinished", "failed"]
"""What a submission may begin: runs never begun; also those interrupted or cancelled; also those that failed."""


def make_plan(recipe: Recipe, cells: Sequence[ResolvedCell], host: Host) -> Plan:
    """Judge ``cells`` and put those that can run here into bundles, one a workload."""
    judged = _without_idle_twins([_judge(cell, recipe, host) for cell in cells])
    bundles = _bundles([cell for cell, _ in judged])
    return Plan(
        recipe.name,
        recipe.text,
        recipe.file.name,
        recipe.equivalence,
        tuple(cell for cell, _ in judged),
        bundles,
        _tracking(recipe),
    )


def _judge(cell: ResolvedCell, recipe: Recipe, host: Host) -> tuple[Cell, bool]:
    rejections = illegal(cell.spec)
    lacking: tuple[Reason, ...] = () if rejections else host.lacks(cell.spec)
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


def _bundles(cells: Iterable[Cell]) -> tuple[PlannedBundle, ...]:
    workloads: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.run_ids:
            workloads.setdefault(cell.workload_id, []).append(cell)
    return tuple(
        PlannedBundle(f"{workload}-{digest([c.cell_id for c in group])[:6]}", workload, _interleaved(group))
        for workload, group in workloads.items()
    )


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


def check_budget(hours: float, most: Optional[float]) -> None:
    """Raises InputError where the plan may take more than ``most`` GPU hours."""
    if most is not None and not hours <= most:
        raise wrong("--max-gpu-hours", f"{most:g}: this plan may take {hours:.2f} GPU hours (every run to its limit)",
                    "pick cells with --only, lower resources.minutes_per_run or repeats, or raise the limit")  # fmt: skip


def orders(plan: Plan, states: Mapping[str, RunState], host: Host, policy: Policy) -> tuple[BundleOrder, ...]:
    """The attempts to make now, by bundle; a bundle with none, or with a living supervisor, is left out."""
    cells = plan.cell_of_run()
    made = []
    for bundle in plan.bundles:
        if any(states[run_id].alive for run_id in bundle.run_ids):
            continue
        wanted = _with_partners(bundle, cells, {r for r in bundle.run_ids if _may_begin(states[r], policy)})
        if wanted:
            schedule = tuple((r, states[r].next_attempt) for r in bundle.run_ids if r in wanted)
            made.append(_order(bundle, schedule, [cells[r] for r in bundle.run_ids], host, plan))
    return tuple(made)


def _may_begin(state: RunState, policy: Policy) -> bool:
    if state.name == "PLANNED":
        return True
    if state.name in ("INTERRUPTED", "CANCELLED"):
        return policy in ("unfinished", "failed")
    return policy == "failed" and state.failed


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
    bundle: PlannedBundle, schedule: tuple[tuple[str, int], ...], cells: Sequence[Cell], host: Host, plan: Plan
) -> BundleOrder:
    placement = cells[0].run_spec.placement
    return BundleOrder(
        bundle.bundle_id,
        bundle.workload_id,
        schedule,
        max((cell.limits for cell in cells), key=lambda limits: limits.run_seconds),
        placement.ranks_per_node if placement.device == "cuda" else 1,
        host.slot_names(placement.device),
        plan.tracking,
    )


def _tracking(recipe: Recipe) -> Optional[dict[str, Any]]:
    settings = recipe.wandb
    if settings.mode == "disabled":
        return None
    return {**asdict(settings), "tags": list(settings.tags), "group": recipe.name}
