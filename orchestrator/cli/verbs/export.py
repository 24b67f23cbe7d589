"""The verb ``export``."""

from __future__ import annotations

import argparse
import sys

from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_recipe
from orchestrator.export.export_cell import export
from orchestrator.recipe.expand import expand, filter_cells
from orchestrator.recipe.recipe import load

EXAMPLE = "export qwen3_8l --to megatron-lm --only cuda_graph.impl=full_iteration"
NOTE = "Settings of a cell that the target cannot express are listed on standard error, one per line.\n\n"


def add_arguments(parser: Parser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--to", required=True, choices=("megatron-lm", "bridge"), help="print the flags of this program"
    )


def run(arguments: argparse.Namespace) -> int:
    cells = filter_cells(expand(load(arguments.recipe, arguments.overrides), "cuda"), arguments.only)
    # Eager baselines are added for comparison. They are meant only if nothing else is left.
    for cell in [cell for cell in cells if not cell.is_added_baseline] or cells:
        exported = export(cell.spec, arguments.to)
        print(f"# {cell.label}\n{exported.text}\n")
        for note in exported.notes:
            print(f"not exported from {cell.label}: {note}", file=sys.stderr)
    return 0
