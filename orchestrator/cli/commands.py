"""What each verb does: load, decide, act, print. Those that only tell what is on disk are in
orchestrator/cli/queries.py.

Imported above is what every verb needs; what only some need they import themselves, so that ``status`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.common.atomic_files import dumps
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan, plan_to_json
from orchestrator.cli.queries import compare, jobs_of, logs, messages, report, status
from orchestrator.errors import input_error
from orchestrator.output import terminal
from orchestrator.sweeps.run_state import open_submissions, read_states
from orchestrator.sweeps.store import Store, read_plan

if TYPE_CHECKING:
    from orchestrator.recipe.expand import ResolvedCell
    from orchestrator.recipe.recipe import Recipe
    from orchestrator.submit.attempts import Policy
    from orchestrator.submit.executor import Executor
    from orchestrator.targets.slurm_cluster import Target


def sweep(options: argparse.Namespace) -> int:
    from orchestrator.submit.executor import resolve_executor
    from orchestrator.workflow.run_sweep import run_sweep

    with messages(options):
        executor = resolve_executor(options.executor)
        planned, target = _plan(options, executor)
        terminal.plan_summary(planned)
        paths = Store(options.store).sweep(planned.name)
        code = run_sweep(paths, planned, target, "new", executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


def plan(options: argparse.Namespace) -> int:
    from orchestrator.plan.planner import gpu_hours
    from orchestrator.submit.batch_script import batch_scripts
    from orchestrator.submit.executor import resolve_executor
    from orchestrator.targets.slurm_cluster import Cluster

    planned, target = _plan(options, resolve_executor(options.executor))
    paths = Store(options.store).sweep(planned.name)
    scripts = batch_scripts(paths, planned, target) if isinstance(target, Cluster) else ()
    if options.json:
        further = {"gpu_hours": gpu_hours(planned), "batch_scripts": [asdict(script) for script in scripts]}
        print(dumps({**plan_to_json(planned), **further}, indent=1))
    else:
        terminal.print_plan(planned, gpu_hours(planned), scripts)
    return 0


def advise(options: argparse.Namespace) -> int:
    from orchestrator.advise.eager_sweep import advice_recipe, eager_alone, write_advice
    from orchestrator.submit.executor import resolve_executor
    from orchestrator.workflow.run_sweep import run_sweep

    with messages(options):
        executor = resolve_executor(options.executor)
        recipe, cells, target = _cells(options, executor)
        planned = _judged(options, advice_recipe(recipe), eager_alone(cells), target)
        terminal.plan_summary(planned)
        paths = Store(options.store).sweep(planned.name)
        code = run_sweep(paths, planned, target, "new", executor, wait=True, conclude=write_advice)
    if options.json:
        print((paths.report / "advice.json").read_text(), end="")
    return code


def bisect(options: argparse.Namespace) -> int:
    from orchestrator.bisect.scope_search import cell_named
    from orchestrator.plan.input_files import check_inputs
    from orchestrator.plan.planner import check_budget, gpu_hours
    from orchestrator.submit.executor import resolve_executor
    from orchestrator.workflow.run_sweep import carry_out

    with messages(options):
        store = Store(options.store)
        origin = store.find(options.sweep)
        planned = read_plan(origin)
        cell = cell_named(planned, options.run)
        executor = resolve_executor(options.executor)
        target = _target(executor, options, planned.cluster)

        def make(round_of_sets: Plan) -> None:
            check_budget(gpu_hours(round_of_sets), options.max_gpu_hours)
            check_inputs(round_of_sets)
            terminal.plan_summary(round_of_sets)
            carry_out(_beside(origin, round_of_sets.name), round_of_sets, target, "unfinished", executor, wait=True)

        find = _first_layer if options.layers else _smallest_set
        answer, code = find(origin, planned, cell, target, make)
        terminal.answer(answer)
    if options.json:
        print(answer.with_suffix(".json").read_text(), end="")
    return code


def _smallest_set(
    origin: SweepPaths, planned: Plan, cell: Cell, target: Target, make: Callable[[Plan], None]
) -> tuple[Path, int]:
    """The answer's file, and the exit code."""
    from orchestrator.bisect.scope_search import bisect, search_of, write_answer

    search = search_of(origin, planned, cell, target)
    paths = _beside(origin, search.name)
    answer = bisect(paths, search, target, make)
    return write_answer(paths, answer), answer.exit_code


def _first_layer(
    origin: SweepPaths, planned: Plan, cell: Cell, target: Target, make: Callable[[Plan], None]
) -> tuple[Path, int]:
    """The answer's file, and the exit code."""
    from orchestrator.bisect.layer_search import bisect_layers, start_layer_search, write_answer

    search = start_layer_search(origin, planned, cell, target)
    paths = _beside(origin, search.name)
    answer = bisect_layers(paths, search, target, make)
    return write_answer(paths, answer), answer.exit_code


def _beside(sweep: SweepPaths, name: str) -> SweepPaths:
    return SweepPaths(sweep.root.with_name(name))


def cancel(options: argparse.Namespace) -> int:
    from orchestrator.submit.cancel import cancel, choose

    paths = Store(options.store).find(options.sweep)
    planned = read_plan(paths)
    going = cancel(paths, planned, choose(planned, options.runs))
    if options.json:
        print(json.dumps({"cancelled": going}))
    else:
        terminal.cancelled(planned, len(going), chosen=bool(options.runs))
    return 0


def resume(options: argparse.Namespace) -> int:
    from orchestrator.submit.executor import check_executor, resolve_executor
    from orchestrator.workflow.run_sweep import run_sweep

    with messages(options):
        paths = Store(options.store).find(options.sweep)
        planned = read_plan(paths)
        executor = resolve_executor(options.executor)
        check_executor(planned, executor)
        target = _target(executor, options, planned.cluster)
        policy: Policy = "failed" if options.failed else "unfinished"
        code = run_sweep(paths, planned, target, policy, executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


def export(options: argparse.Namespace) -> int:
    from orchestrator.export.export_cell import export
    from orchestrator.recipe.expand import expand, filter_cells
    from orchestrator.recipe.recipe import load

    cells = filter_cells(expand(load(options.recipe, options.overrides), "cuda"), options.only)
    # Twins were added for comparison; they are meant where nothing else is left.
    for cell in [cell for cell in cells if not cell.twin] or cells:
        exported = export(cell.spec, options.to, options.release)
        print(f"# {cell.label}\n{exported.text}\n")
        for note in exported.notes:
            print(f"not said of {cell.label}: {note}", file=sys.stderr)
    return 0


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "sweep": sweep,
    "plan": plan,
    "advise": advise,
    "status": status,
    "report": report,
    "compare": compare,
    "bisect": bisect,
    "logs": logs,
    "cancel": cancel,
    "resume": resume,
    "export": export,
}


def _plan(options: argparse.Namespace, executor: Executor) -> tuple[Plan, Target]:
    recipe, cells, target = _cells(options, executor)
    return _judged(options, recipe, cells, target), target


def _cells(options: argparse.Namespace, executor: Executor) -> tuple[Recipe, Sequence[ResolvedCell], Target]:
    """The recipe, those of its cells that were picked, and what they are to be judged against."""
    from orchestrator.recipe.expand import expand, filter_cells
    from orchestrator.recipe.recipe import load

    recipe = load(options.recipe, options.overrides)
    target = _target(executor, options, recipe.cluster)
    return recipe, filter_cells(expand(recipe, target.device), options.only), target


def _judged(options: argparse.Namespace, recipe: Recipe, cells: Sequence[ResolvedCell], target: Target) -> Plan:
    from orchestrator.plan.input_files import check_inputs
    from orchestrator.plan.planner import check_budget, gpu_hours, make_plan

    planned = replace(make_plan(recipe, cells, target), only=tuple(options.only))
    check_budget(gpu_hours(planned), options.max_gpu_hours)
    check_inputs(planned)
    return planned


def _target(executor: Executor, options: argparse.Namespace, named: str) -> Target:
    """What runs are placed on; ``named`` is the profile of the recipe, or of the plan."""
    asked = options.cluster
    if executor == "slurm":
        from orchestrator.targets.profile_file import load_profile
        from orchestrator.targets.slurm_cluster import find_cluster

        return find_cluster(load_profile(named if asked is None else asked), Store(options.store).root)
    from orchestrator.submit.executor import outage
    from orchestrator.targets.host import this_host

    if asked is not None:
        raise input_error("--cluster", f"{asked}: profiles are for Slurm, and runs would be made on this host",
                    "leave it out, or submit with --executor slurm")  # fmt: skip
    if options.executor == "auto" and (words := outage()):
        terminal.outage(words)
    if named:
        terminal.unused_cluster(named)
    return this_host()


def _print_json(options: argparse.Namespace, paths: SweepPaths, planned: Plan) -> None:
    """The report's JSON, or the runs' states where nobody waited for a report."""
    if options.json and options.no_wait:
        jobs = jobs_of(open_submissions(paths))
        print(dumps(terminal.states_to_json(planned, read_states(paths, planned, jobs), jobs), indent=1))
    elif options.json:
        print((paths.report / "report.json").read_text(), end="")
