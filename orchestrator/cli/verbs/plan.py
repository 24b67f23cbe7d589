"""The verb ``plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from analysis.memory.extrapolation import ProgramRuns
from analysis.memory.forecast import RankForecast, forecast
from launch.common.atomic_files import members
from launch.common.command_line import Parser
from launch.common.text import count, first_names
from orchestrator.cli.arguments import add_planning
from orchestrator.cli.planning import load_recipe, plan_recipe, read_named_cluster
from orchestrator.errors import input_error
from orchestrator.output.memory import print_memory
from orchestrator.output.plan import print_not_checked, print_plan
from orchestrator.output.print_json import print_json
from orchestrator.plan.planner import gpu_hours
from orchestrator.recipe.expand import ResolvedCell, expand, filter_cells
from orchestrator.rules import violations
from orchestrator.submit.batch_script import batch_scripts
from orchestrator.submit.executor import silence
from orchestrator.sweeps.store import Store
from orchestrator.targets.slurm_cluster import Cluster

FIGURES = ("peak", "needed", "peak_allocated", "basis")
TERM = ("name", "bytes", "source", "held")
EXAMPLE = "plan gpt_oss_20b --only cuda_graph.impl=transformer_engine"


def add_arguments(parser: Parser) -> None:
    add_planning(parser)
    parser.add_argument(
        "--explain",
        nargs=2,
        metavar=("memory", "CELL"),
        help="print the forecast of a cell's GPU memory instead, term by term; CELL is a label or an id, or the beginning of one",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None:
        return _explain(arguments)
    plan, check, _ = plan_recipe(arguments, read_named_cluster(arguments))
    target = check.target
    paths = Store(arguments.store).sweep(plan.name)
    scripts = batch_scripts(paths, plan, target) if isinstance(target, Cluster) else ()
    if arguments.json:
        more = {"gpu_hours": gpu_hours(plan), "batch_scripts": scripts, "not_checked": target.not_checked}
        forecasts = {
            cell_id: {name: getattr(rank, name) for name in FIGURES} for cell_id, rank in check.forecasts(plan).items()
        }
        print_json({**members(plan), **more, "memory": forecasts})
    else:
        print_plan(plan, gpu_hours(plan), check, scripts)
        print_not_checked(target.not_checked, silence())
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    """Explain the memory of a cell as GPUs would run it, whether or not this host can.

    Raises:
        InputError: the arguments do not name a single cell, or its memory cannot be forecast.
    """
    subject, name = arguments.explain
    if subject != "memory":
        raise input_error("--explain", f"{subject!r} is nothing that a plan explains", "write --explain memory CELL")
    recipe = load_recipe(arguments)
    cell = _find_cell(filter_cells(expand(recipe, "cuda"), arguments.only), name)
    ranks = _forecast(cell, ProgramRuns(Store(arguments.store).sweep(recipe.name)))
    if arguments.json:
        print_json({"cell_id": cell.spec.cell_id, "label": cell.label, "ranks": list(map(_to_json, ranks))})
    else:
        print_memory(cell.label, ranks)
    return 0


def _find_cell(cells: Sequence[ResolvedCell], name: str) -> ResolvedCell:
    names = [(cell, (cell.label, cell.spec.cell_id)) for cell in cells]
    exact = [cell for cell, own in names if name in own]
    found = exact or [cell for cell, own in names if any(one.startswith(name) for one in own)]
    if len(found) != 1:
        fix = f"name one by its label or id: {first_names([cell.label for cell in found or cells], 10)}"
        raise input_error("--explain memory", f"{name!r} is {count('cell', len(found))} of the recipe", fix)
    return found[0]


def _forecast(cell: ResolvedCell, program_runs: ProgramRuns) -> Sequence[RankForecast]:
    if reasons := violations(cell.spec):
        raise input_error("--explain memory", f"{cell.label} cannot work: {reasons[0].message}", reasons[0].remedy)
    if ranks := forecast(cell.spec):
        return ranks
    if rank := program_runs.extrapolate(cell.spec):
        return [rank]
    why, fix = "its ranks are on CPUs", "set resources.device to auto or cuda"
    if cell.spec.engine == "command":
        why = "the model of a user's program is unknown"
        fix = "run this sweep with two other numbers of one of its command.flags on GPUs, such as fewer layers"
    raise input_error("--explain memory", f"nothing is known of the GPU memory of {cell.label}: {why}", fix)


def _to_json(rank: RankForecast) -> dict[str, Any]:
    """Return a rank's terms by phase. A term has a name, bytes, a formula, a source and how it is held."""
    phases = {
        phase: [{"formula": term.formula, **{name: getattr(term, name) for name in TERM}} for term in terms]
        for phase, terms in rank.phases.items()
    }
    return {"stage": rank.stage, "worst_imbalance": rank.worst_imbalance, "phases": phases}
