"""The verb ``export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from analysis.verdict.verdict import PASSES
from launch.common.atomic_files import read_json
from launch.common.command_line import Parser
from launch.common.text import first_names
from launch.contract.spec import RunSpec
from orchestrator import PROGRAM
from orchestrator.cli.arguments import add_recipe
from orchestrator.cli.planning import load_recipe
from orchestrator.errors import input_error
from orchestrator.export.export_cell import export
from orchestrator.recipe.expand import expand, filter_cells
from orchestrator.sweeps.store import Store, read_plan

EXAMPLE = "export qwen3_8l --to megatron-lm --only cuda_graph.impl=full_iteration"
NOTE = "Settings of a cell that the target cannot express are listed on standard error, one per line.\n\n"


def add_arguments(parser: Parser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--to", required=True, choices=("megatron-lm", "bridge"), help="print the flags of a cell for this program"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="print only the fastest passing cell of each task; name a sweep in place of the recipe",
    )


def run(arguments: argparse.Namespace) -> int:
    for label, spec in _best_cells(arguments) if arguments.best else _cells(arguments):
        exported = export(spec, arguments.to)
        print(f"# {label}\n{exported.text}\n")
        for note in exported.notes:
            print(f"note on {label}: {note}", file=sys.stderr)
    return 0


def _cells(arguments: argparse.Namespace) -> list[tuple[str, RunSpec]]:
    """Return the cells of the recipe. Leave out eager baselines that were added for comparison, unless nothing else is left."""
    cells = filter_cells(expand(load_recipe(arguments), "cuda"), arguments.only)
    meant = [cell for cell in cells if not cell.is_added_baseline] or cells
    return [(cell.label, cell.spec) for cell in meant]


def _best_cells(arguments: argparse.Namespace) -> list[tuple[str, RunSpec]]:
    """Return the fastest cell of each task of a sweep, by its report. The report ranks only graphed cells that pass.

    Raises:
        InputError: an option is for recipes only, the sweep has no report, or none of its cells is ranked.
    """
    if arguments.overrides or arguments.only:
        raise input_error(
            "--best",
            "reads a sweep whose cells have run, so it cannot select or change them",
            "leave out --only and key=value",
        )
    paths = Store(arguments.store).find(str(arguments.recipe))
    plan, file = read_plan(paths), paths.report / "report.json"
    again = f"write it: {PROGRAM} report {plan.name}"
    if not file.is_file():
        raise input_error(str(file), "there is no report", again)
    report = read_json(file)
    ids = {(cell["task_id"], cell["label"]): cell["cell_id"] for cell in report["cells"]}
    best = {ids[task["task_id"], task["cells"][0]["label"]] for task in report["rankings"] if task["cells"]}
    found = [(cell.label, cell.run_spec) for cell in plan.cells if cell.cell_id in best]
    if not found:
        missing = first_names([_why_unranked(cell) for cell in report["cells"] if cell["impl"] != "none"])
        fix = f"{PROGRAM} report {plan.name} says more; a recipe and --only print any cell"
        raise input_error(plan.name, f"no graphed cell is ranked fastest: {missing or 'the sweep has none'}", fix)
    return found


def _why_unranked(cell: Mapping[str, Any]) -> str:
    verdict, speed = cell["verdict"], cell["speed"]
    if verdict is None or verdict["verdict"] not in PASSES:
        return f"{cell['label']} is {verdict['verdict'] if verdict else cell['outcome']}"
    reason = f", since {speed['reason']}" if speed and speed["reason"] else ""
    return f"no speed of {cell['label']} was judged{reason}"
