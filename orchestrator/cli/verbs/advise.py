"""The verb ``advise``."""

from __future__ import annotations

import argparse
from functools import partial

from launch.common.command_line import Parser
from launch.contract.exit_codes import ExitCode
from orchestrator.advise.eager_sweep import advice_recipe, inspected_eager_cells, own_graphs, write_advice
from orchestrator.advise.nsys_profile import read_profile, render_profile
from orchestrator.advise.render import describe_limits
from orchestrator.cli.arguments import add_planning, redirect_messages
from orchestrator.cli.planning import load_cells, memory_check, plan_cells
from orchestrator.errors import input_error
from orchestrator.output.plan import print_plan_summary
from orchestrator.sweeps.store import Store
from orchestrator.workflow.run_sweep import run_sweep

EXAMPLE = "advise launch_bound"


def add_arguments(parser: Parser) -> None:
    add_planning(parser)
    parser.add_argument(
        "--nsys",
        action="store_true",
        help="describe a profile of Nsight Systems; name its .nsys-rep file, or the .sqlite export, in place of the recipe",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.nsys:
        return _describe_profile(arguments)
    with redirect_messages(arguments):
        recipe, cells, target, executor = load_cells(arguments)
        plan = plan_cells(
            arguments, advice_recipe(recipe), inspected_eager_cells(cells), memory_check(arguments, recipe, target)
        )
        print_plan_summary(plan)
        if limits := describe_limits(plan):
            print(limits)
        conclude = partial(write_advice, own=own_graphs(cells))
        paths = Store(arguments.store).sweep(plan.name)
        code = run_sweep(paths, plan, target, "new", executor, wait=True, conclude=conclude)
    if arguments.json:
        print((paths.report / "advice.json").read_text(), end="")
    return code


def _describe_profile(arguments: argparse.Namespace) -> int:
    if arguments.json or arguments.overrides or arguments.only:
        raise input_error("--nsys", "takes one file, and neither --json, --only nor key=value", "advise --nsys FILE")
    print(render_profile(arguments.recipe, read_profile(arguments.recipe)), end="")
    return ExitCode.PASS
