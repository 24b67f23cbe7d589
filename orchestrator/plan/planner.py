"""Plan a sweep: judge its cells and put those that can run into bundles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from launch.contract.plan import Cell, Limits, Plan, PlannedBundle, Reason
from launch.contract.spec import spec_to_json
from launch.contract.spec_ids import digest
from orchestrator.errors import input_error
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import violations
from orchestrator.targets.slurm_cluster import Target


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
    lacking: tuple[Reason, ...] = () if rejections else target.check_spec(cell.spec)
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
    return planned, cell.is_added_baseline


def _without_idle_twins(judged: Sequence[tuple[Cell, bool]]) -> list[tuple[Cell, bool]]:
    """Leave out twins of which no graphed cell can run: nobody asked for them, and nothing would be compared."""
    served = {cell.workload_id for cell, _ in judged if cell.graphed and cell.state == "run"}
    return [(cell, twin) for cell, twin in judged if not twin or cell.workload_id in served]


def _within_time(judged: Sequence[tuple[Cell, bool]], target: Target) -> list[tuple[Cell, bool]]:
    """Runs of one workload share an allocation: where none lasts long enough for all, none of them is runnable."""
    lacking = {
        workload: target.check_time([cell for cell in cells for _ in cell.run_ids])
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


def _tracking(recipe: Recipe) -> dict[str, Any] | None:
    settings = recipe.wandb
    if settings.mode == "disabled":
        return None
    return {**asdict(settings), "tags": list(settings.tags), "group": recipe.name}
