"""The verb ``plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from analysis.memory.calibration import CalibrationResult, calibrate, errors, measured_cells
from analysis.memory.extrapolation import ProgramRuns
from analysis.memory.forecast import RankForecast, forecast
from analysis.memory.measured_constants import MEASURED
from launch.common.atomic_files import members
from launch.common.command_line import Parser
from launch.common.text import count, first_names
from orchestrator.cli.arguments import add_planning
from orchestrator.cli.planning import load_recipe, plan_recipe, read_named_cluster
from orchestrator.errors import input_error
from orchestrator.output.memory import print_calibration, print_memory
from orchestrator.output.plan import print_not_checked, print_plan
from orchestrator.output.print_json import print_json
from orchestrator.plan.planner import gpu_hours
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.recipe.expand import ResolvedCell, expand, filter_cells
from orchestrator.rules import violations
from orchestrator.submit.batch_script import batch_scripts
from orchestrator.submit.executor import silence
from orchestrator.sweeps.site_constants import constants_file, read_constants, write_constants
from orchestrator.sweeps.store import Store, read_plan
from orchestrator.targets.slurm_cluster import Cluster

FIGURES = ("peak", "needed", "peak_allocated", "basis")
TERM = ("name", "bytes", "source", "held")
EXAMPLE = "plan gpt_oss_20b --only cuda_graph.impl=transformer_engine"


def add_arguments(parser: Parser) -> None:
    add_planning(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="fit the memory forecast to this site, from a finished sweep; name that sweep in place of the recipe",
    )
    parser.add_argument(
        "--explain",
        nargs=2,
        metavar=("memory", "CELL"),
        help="print only the memory forecast of one cell, term by term; CELL is a label or an id, or the beginning of one",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None:
        return _explain(arguments)
    if arguments.calibrate:
        return _calibrate(arguments)
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


def _calibrate(arguments: argparse.Namespace) -> int:
    """Learn the constants from a sweep, and write them unless the built-in ones are as good.

    Raises:
        InputError: there is no such sweep, or it has no run that shows anything.
    """
    store = Store(arguments.store)
    sweep = store.find(str(arguments.recipe))
    plan = read_plan(sweep)
    cells = measured_cells(sweep, plan)
    if not cells:
        fix = "name a sweep of engine torch_native or megatron, without fp8, compiled models or context parallelism"
        raise input_error("--calibrate", f"sweep {plan.name} has no complete run on GPUs that shows a constant", fix)
    site = calibrate(plan.name, cells)
    calibrated = CalibrationResult(site, len(cells), errors(cells, MEASURED), errors(cells, site.applied))
    file = constants_file(store.root, plan.cluster)
    if calibrated.is_better:
        write_constants(file, site)
    if arguments.json:
        print_json({**asdict(calibrated), "file": str(file) if calibrated.is_better else None})
    else:
        print_calibration(calibrated, file)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    """Explain the memory of a cell as GPUs would run it, whether or not this host can.

    Raises:
        InputError: the arguments do not name a single cell, or its memory cannot be forecast.
    """
    subject, name = arguments.explain
    if subject != "memory":
        raise input_error("--explain", f"a plan cannot explain {subject!r}", "write --explain memory CELL")
    recipe = load_recipe(arguments)
    cell = _find_cell(filter_cells(expand(recipe, "cuda"), arguments.only), name)
    if reasons := keep_sound_fixes(cell.spec, violations(cell.spec)):
        raise input_error("--explain memory", f"{cell.label} cannot work: {reasons[0].message}", reasons[0].remedy)
    store, cluster = Store(arguments.store), recipe.cluster if arguments.cluster is None else arguments.cluster
    constants = read_constants(constants_file(store.root, cluster))
    ranks = forecast(cell.spec, constants) or _extrapolate(cell, ProgramRuns(store.sweep(recipe.name)))
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
        raise input_error("--explain memory", f"{name!r} matches {count('cell', len(found))} of the recipe", fix)
    return found[0]


def _extrapolate(cell: ResolvedCell, program_runs: ProgramRuns) -> Sequence[RankForecast]:
    if rank := program_runs.extrapolate(cell.spec):
        return [rank]
    why, fix = "its ranks are on CPUs", "set resources.device to auto or cuda"
    if cell.spec.engine == "command":
        why = "the model of a user's program is unknown"
        fix = "run this sweep with two other numbers of one of its command.flags on GPUs, such as fewer layers"
    raise input_error("--explain memory", f"the GPU memory of {cell.label} cannot be forecast: {why}", fix)


def _to_json(rank: RankForecast) -> dict[str, Any]:
    """Return a rank's terms by phase. A term has a name, bytes, a formula, a source and how it is held."""
    phases = {
        phase: [{"formula": term.formula, **{name: getattr(term, name) for name in TERM}} for term in terms]
        for phase, terms in rank.phases.items()
    }
    return {"stage": rank.stage, "worst_imbalance": rank.worst_imbalance, "phases": phases}
