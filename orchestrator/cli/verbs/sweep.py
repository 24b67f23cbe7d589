"""The verb ``sweep``."""

from __future__ import annotations

import argparse

from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_allow_empty, add_no_wait, add_planning, redirect_messages
from orchestrator.cli.planning import plan_recipe
from orchestrator.cli.sweep_states import print_sweep_json
from orchestrator.output.memory import warn_of_memory
from orchestrator.output.plan import print_plan_summary, warn_changed_programs
from orchestrator.sweeps.changed_programs import changed_programs, edited_files
from orchestrator.sweeps.store import Store
from orchestrator.workflow.run_sweep import run_sweep

EXAMPLE = "sweep tiny_moe repeats=3"


def add_arguments(parser: Parser) -> None:
    add_planning(parser)
    add_no_wait(parser)
    add_allow_empty(parser)


def run(arguments: argparse.Namespace) -> int:
    with redirect_messages(arguments):
        plan, memory, executor = plan_recipe(arguments)
        print_plan_summary(plan)
        warn_of_memory(plan, memory)
        paths = Store(arguments.store).sweep(plan.name)
        warn_changed_programs(changed_programs(paths, plan), edited_files(paths, plan), plan, paths.root)
        wait, allow_empty = not arguments.no_wait, arguments.allow_empty
        code = run_sweep(paths, plan, memory.target, "new", executor, wait=wait, allow_empty=allow_empty)
    if arguments.json:
        print_sweep_json(paths, plan, has_report=not arguments.no_wait)
    return code
