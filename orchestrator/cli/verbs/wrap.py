"""The verb ``wrap``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launch.common.checkout import describe_code
from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_allow_empty, add_budget, add_json, add_no_wait, add_target, redirect_messages
from orchestrator.cli.verbs import sweep
from orchestrator.recipe.wrapped_commands import WrappedCommands

EXAMPLE = "wrap --eager 'python train.py' --graphed 'python train.py --cuda-graphs'"
LEAST_STEPS = 110
"""Enough for a verdict of EQUIVALENT, which needs 100 after the capture."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--eager", required=True, metavar="COMMAND", help="the program without CUDA graphs")
    parser.add_argument("--graphed", required=True, metavar="COMMAND", help="the same program with them")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=LEAST_STEPS, metavar="N",
        help="compare so many optimizer steps, which the program must take; on a GPU three more (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that it starts (default: %(default)s)")
    add_budget(parser)
    add_target(parser)
    add_json(parser)
    add_no_wait(parser)
    add_allow_empty(parser)


def run(arguments: argparse.Namespace) -> int:
    workdir = Path.cwd()
    code = describe_code(workdir)["digest"]
    commands = WrappedCommands(
        arguments.eager, arguments.graphed, str(workdir), code, arguments.steps, arguments.repeats, arguments.ranks
    )
    text = commands.recipe
    with redirect_messages(arguments):
        print(f"# the same as a recipe (docs/your_own_job.md):\n{text}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrap.yaml"
        path.write_text(text)
        planned = {"recipe": path, "overrides": [], "only": []}
        return sweep.run(argparse.Namespace(**vars(arguments), **planned))
