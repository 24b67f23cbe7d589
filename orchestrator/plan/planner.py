"""Plan a sweep: judge its cells and put those that can run into bundles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

from launch.common.grouped import grouped
from launch.contract.plan import Cell, CellState, Limits, Plan, PlannedBundle, Reason
from launch.contract.spec import RunSpec, spec_to_json
from launch.contract.spec_ids import digest, run_id
from launch.frameworks.command_line import command_but_for_numbers
from launch.support import known_faults
from orchestrator.errors import input_error
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.plan.sound_fixes import keep_sound_fixes, refused_settings
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.fields import AUTO_LOOKS, most_repeats
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import refusals
from orchestrator.targets.slurm_cluster import Target


def make_plan(recipe: Recipe, cells: Sequence[ResolvedCell], target: Target, memory: MemoryCheck | None = None) -> Plan:
    """Judge ``cells``. Put those that can run on ``target`` into one bundle for each workload.

    Without ``memory``, no cell is set aside for its GPU memory.
    """
    added = {cell.spec.cell_id for cell in cells if cell.is_added_baseline}
    judged = [_judge(cell, recipe, target) for cell in cells]
    judged = _drop_unneeded(memory.set_aside(judged) if memory else judged, added)
    judged = _name_same_commands(_drop_unneeded(_limit_time(judged, target), added))
    perturbed = {} if recipe.perturbed else _perturbed_runs(judged, recipe)
    looks = AUTO_LOOKS if recipe.repeats == "auto" else ()
    return Plan(
        recipe.name,
        recipe.text,
        recipe.file.name,
        recipe.equivalence,
        tuple(_add_perturbed(cell, perturbed.get(cell.cell_id)) for cell in judged),
        _bundles(judged, looks),
        _tracking(recipe),
        target.scheduler,
        target.cluster_name,
        bundles_if_needed=_bundles_if_needed(judged, perturbed),
        looks=looks,
        published=recipe.published,
    )


def _judge(cell: ResolvedCell, recipe: Recipe, target: Target) -> Cell:
    state, reasons = _check(cell, target)
    repeats = range(most_repeats(recipe.repeats) if state == "run" else 0)
    run_ids = tuple(run_id(cell.spec.cell_id, repeat) for repeat in repeats)
    judged = Cell(
        cell.spec.cell_id,
        cell.label,
        cell.spec.workload_id,
        cell.spec.task_id,
        spec_to_json(cell.spec),
        state,
        reasons,
        cell.expect,
        run_ids,
        Limits(cell.resources.minutes_per_run * 60, cell.resources.hang_minutes * 60),
        known_faults=keep_sound_fixes(cell.spec, known_faults(cell.spec)) if state != "rejected" else (),
        refused_settings=refused_settings(cell.spec) if state == "run" and cell.spec.graphed else (),
    )
    perturbed = recipe.perturbed and state == "run" and _can_be_perturbed(cell.spec)
    return _add_perturbed(judged, _perturbed_id(judged)) if perturbed else judged


def _check(cell: ResolvedCell, target: Target) -> tuple[CellState, tuple[Reason, ...]]:
    """Return the state of ``cell`` and the reasons.

    It is "rejected" if rules forbid it on every device that the recipe allows, and "not_runnable" if only ``target`` cannot run
    it.
    """
    spec, here = cell.spec, refusals(cell.spec)
    if here and cell.resources.device == "auto":
        spec = replace(spec, placement=replace(spec.placement, device="cuda"))
    if here and (reasons := refusals(spec)):
        return "rejected", keep_sound_fixes(spec, reasons)
    reasons = keep_sound_fixes(spec, target.check_spec(spec)) or keep_sound_fixes(cell.spec, here)
    return "not_runnable" if reasons else "run", reasons


def _can_be_perturbed(spec: RunSpec) -> bool:
    return not (spec.graphed or spec.fault.is_set) and spec.first_compared < spec.training.steps


def _perturbed_id(cell: Cell) -> str:
    return run_id(cell.cell_id, len(cell.run_ids), perturbed=True)


def _add_perturbed(cell: Cell, perturbed: str | None) -> Cell:
    return replace(cell, run_ids=(*cell.run_ids, perturbed), perturbed=True) if perturbed else cell


def _perturbed_runs(cells: Sequence[Cell], recipe: Recipe) -> dict[str, str]:
    """Return the perturbed run that a verdict may need, by its eager cell.

    A verdict needs it only if eager repeats are equal. Without margins no verdict needs it: every difference is a divergence,
    whatever its cause.
    """
    graphed = {cell.workload_id for cell in cells if cell.graphed and cell.run_ids}
    eager = (cell for cell in cells if not cell.graphed and len(cell.run_ids) > 1 and cell.workload_id in graphed)
    margins = recipe.equivalence
    return {
        cell.cell_id: _perturbed_id(cell)
        for cell in eager
        if _can_be_perturbed(spec := cell.run_spec)
        and not spec.training.deterministic
        and max(margins.loss, margins.grad_norm) > 0
    }


def _drop_unneeded(cells: Sequence[Cell], added: Set[str]) -> list[Cell]:
    """Drop added eager baselines without a graphed cell that can run: nobody asked for them."""
    needed = {cell.workload_id for cell in cells if cell.graphed and cell.state == "run"}
    return [cell for cell in cells if cell.cell_id not in added or cell.workload_id in needed]


def _limit_time(cells: Sequence[Cell], target: Target) -> list[Cell]:
    """Make the cells of a workload not runnable if no allocation lasts for all of their runs, which share one."""
    too_long = {
        workload: target.check_time([cell for cell in group for _ in cell.run_ids])
        for workload, group in _by_workload(cells).items()
    }
    return [
        replace(cell, state="not_runnable", reasons=reasons, run_ids=())
        if cell.run_ids and (reasons := too_long[cell.workload_id])
        else cell
        for cell in cells
    ]


def _name_same_commands(cells: Sequence[Cell]) -> list[Cell]:
    """Give each cell of engine command the first one whose command is the same but for numbers."""
    firsts: dict[tuple[str, ...], str] = {}
    named = []
    for cell in cells:
        first = cell.cell_id
        if cell.should_complete and cell.spec["engine"] == "command":
            first = firsts.setdefault(command_but_for_numbers(cell.run_spec), first)
        named.append(replace(cell, same_command=first) if first != cell.cell_id else cell)
    return named


def _bundles(cells: Iterable[Cell], looks: tuple[int, ...]) -> tuple[PlannedBundle, ...]:
    # The id contains the looks, because runs that were not needed with these may be needed with others.
    return tuple(
        PlannedBundle(
            f"{workload}-{digest([*(c.cell_id for c in group), *looks])[:6]}", workload, _interleave(group, looks)
        )
        for workload, group in _by_workload(cells).items()
    )


def _bundles_if_needed(cells: Iterable[Cell], perturbed: Mapping[str, str]) -> tuple[PlannedBundle, ...]:
    """Return a separate bundle for each ``perturbed`` run, which begins when the other runs have ended."""
    return tuple(
        PlannedBundle(f"{cell.workload_id}-perturbed", cell.workload_id, (perturbed[cell.cell_id],))
        for cell in cells
        if cell.cell_id in perturbed
    )


def _by_workload(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells that will run, by workload."""
    return grouped((cell.workload_id, cell) for cell in cells if cell.run_ids)


def _interleave(cells: Sequence[Cell], looks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the runs repeat by repeat, every other repeat backwards: eager, graphed, graphed, eager, ...

    A machine that changes steadily, or is slower in every other run, then shifts the pairs of a cell in opposite directions. A
    perturbed run is last or, with ``looks``, follows the repeats before the first look.
    """
    repeats = zip(*(cell.repeat_ids for cell in cells), strict=True)
    interleaved = [run_id for number, repeat in enumerate(repeats) for run_id in repeat[:: -1 if number % 2 else 1]]
    first = looks[0] * len(cells) if looks else len(interleaved)
    perturbed = [cell.run_ids[-1] for cell in cells if cell.perturbed]
    return (*interleaved[:first], *perturbed, *interleaved[first:])


def gpu_hours(plan: Plan) -> float:
    """Return the most GPU hours that the plan can take: those with every run at its time limit. They are 0 on CPUs."""
    seconds = 0.0
    for cell in plan.cells:
        placement = cell.spec["placement"]
        if placement["device"] == "cuda":
            gpus = placement["nodes"] * placement["ranks_per_node"]
            seconds += gpus * len(cell.run_ids) * cell.limits.run_seconds
    return seconds / 3600


def check_budget(hours: float, most: float | None) -> None:
    """Check the plan's budget.

    Raises:
        InputError: the plan may take more than ``most`` GPU hours.
    """
    if most is None or hours <= most:
        return
    message = f"{most:g}: this plan may take {hours:.2f} GPU hours, if every run takes its time limit"
    fix = "pick cells with --only, lower resources.minutes_per_run or repeats, or raise the limit"
    raise input_error("--max-gpu-hours", message, fix)


def _tracking(recipe: Recipe) -> dict[str, Any] | None:
    settings = recipe.wandb
    if settings.mode == "disabled" and not recipe.tracking.tensorboard:
        return None
    return {**asdict(settings), **asdict(recipe.tracking), "tags": list(settings.tags), "group": recipe.name}
