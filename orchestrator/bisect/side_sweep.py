"""A sweep beside another, in which one of its cells is looked into: what its runs are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.contract.outcomes import Expectation
from launch.contract.plan import Cell, Plan
from launch.contract.spec import RunSpec
from orchestrator.errors import input_error
from orchestrator.plan.planner import make_plan
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.fields import Resources, Tracking
from orchestrator.recipe.recipe import Recipe
from orchestrator.targets.slurm_cluster import Target

LEAST_REPEATS = 2
"""Eager repeats without which nothing is known to have DIVERGED."""


def side_sweep_name(plan: Plan, cell: Cell, purpose: str) -> str:
    """The name of the sweep that looks into ``cell`` of ``plan``. A cell's digest is all that tells it from others of its
    sweep."""
    return f"{plan.name}-{purpose}-{cell.cell_id.rpartition('-')[2]}"


def plan_side_sweep(name: str, plan: Plan, cell: Cell, specs: Sequence[RunSpec], what: str, target: Target) -> Plan:
    """The sweep ``name`` of ``specs``, run as ``cell`` of ``plan`` was. The same specs give the same plan.

    Args:
        what: they are of the cell, for who reads the recipe: "smaller sets".
    """
    limits = Resources(minutes_per_run=cell.limits.run_seconds / 60, hang_minutes=cell.limits.hang_seconds / 60)
    cells = [ResolvedCell(spec, _settings(cell, spec), Expectation(), limits) for spec in specs]
    recipe = Recipe(
        name=name,
        file=Path(plan.recipe_file),
        base={},
        axes=(),
        repeats=max(LEAST_REPEATS, len(cell.run_ids)),
        cluster=plan.cluster,
        equivalence=plan.margins,
        wandb=Tracking(mode="disabled"),
        text=f"# {what} of {cell.cell_id}, of the sweep that this recipe made\n{plan.recipe}",
        presets={},
    )
    return make_plan(recipe, cells, target)


def _settings(cell: Cell, spec: RunSpec) -> tuple[str, ...]:
    """Those of ``cell``, and what ``spec`` has besides."""
    whole = cell.run_spec
    own = cell.label.removeprefix(whole.cuda_graph.label).removeprefix(", ")
    deterministic = spec.training.deterministic and not whole.training.deterministic
    return (*((own,) if own else ()), *(("deterministic=true",) if deterministic else ()))


def raise_if_rejected(plan: Plan) -> None:
    """Raises InputError where a cell of ``plan`` cannot be run."""
    for cell in plan.cells:
        for reason in cell.reasons:
            raise input_error(f"{cell.label} [{reason.rule}]", reason.message, reason.remedy)
