"""The separate sweep in which `bisect` runs variants of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from launch.common.atomic_files import write_json, write_text
from launch.contract.outcomes import Expectation
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan, Reason
from launch.contract.spec import RunSpec
from orchestrator.bisect.search import Answer, Search, answer_to_json
from orchestrator.errors import input_error
from orchestrator.plan.planner import make_plan
from orchestrator.recipe.expand import ResolvedCell, eager_baseline
from orchestrator.recipe.fields import Resources, Tracking
from orchestrator.recipe.recipe import Recipe
from orchestrator.sweeps.report_process import write_report
from orchestrator.sweeps.store import report_disk_errors
from orchestrator.targets.slurm_cluster import Target

LEAST_REPEATS = 2
"""The minimum number of repeats. One eager run gives no noise floor, so nothing could be DIVERGED."""
AnySearch = TypeVar("AnySearch", bound=Search)


def plan_side_sweep(search: Search, graphed: Sequence[RunSpec], target: Target) -> Plan:
    """Plan runs of ``graphed``, and of their eager baselines if the search compares.

    They run as the search's cell did. The same specs give the same plan.
    """
    cell, plan = search.cell, search.plan
    limits = Resources(minutes_per_run=cell.limits.run_seconds / 60, hang_minutes=cell.limits.hang_seconds / 60)
    baselines = [eager_baseline(spec) for spec in graphed] if search.compares else []
    specs = {run.cell_id: run for run in (*baselines, *graphed)}
    own = cell.label.removeprefix(cell.run_spec.cuda_graph.label).removeprefix(", ")
    cells = [ResolvedCell(spec, (own,) if own else (), Expectation(), limits) for spec in specs.values()]
    recipe = Recipe(
        name=search.name,
        file=Path(plan.recipe_file),
        repeats=max(LEAST_REPEATS, *(plan.looks[:1] or (len(cell.repeat_ids),))) if search.compares else 1,
        cluster=plan.cluster,
        equivalence=plan.margins,
        wandb=Tracking(mode="disabled"),
        text=f"# {search.specs} of {cell.cell_id}, of the sweep that this recipe made\n{plan.recipe}",
    )
    return make_plan(recipe, cells, target)


def run_search(
    read_answer: Callable[[SweepPaths, AnySearch, Target], Answer],
    sweep: SweepPaths,
    search: AnySearch,
    target: Target,
    execute: Callable[[Plan], None],
) -> Answer:
    """Execute the missing runs round by round, until none is missing or a round leaves them without outcomes.

    Args:
        read_answer: returns what the records of ``sweep`` show.
        sweep: the search's own sweep.
        execute: runs a plan in ``sweep``.

    Raises:
        InputError: a round cannot run on ``target``.
    """
    before: tuple[RunSpec, ...] = ()
    while (answer := read_answer(sweep, search, target)).missing and answer.missing != before:
        before = answer.missing
        plan = plan_side_sweep(search, before, target)
        for cell in plan.cells:
            raise_if_rejected(cell.label, cell.reasons)
        execute(plan)
    return answer


def raise_if_rejected(place: str, reasons: Iterable[Reason]) -> None:
    """Raise InputError with the first of ``reasons``, if there is any."""
    for reason in reasons:
        raise input_error(f"{place} [{reason.rule}]", reason.message, reason.remedy)


def write_answer(sweep: SweepPaths, answer: Answer) -> Path:
    """Write the answer as Markdown and JSON into the report folder of the search's sweep. Return the Markdown file."""
    path = sweep.report / f"{answer.search.purpose}.md"
    if answer.search.compares:
        write_report(sweep)
    with report_disk_errors(sweep):
        write_text(path, answer.text)
        write_json(path.with_suffix(".json"), answer_to_json(answer))
    return path
