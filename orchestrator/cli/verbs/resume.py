"""The verb ``resume``."""

from __future__ import annotations

import argparse

from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_allow_empty, add_json, add_no_wait, add_target, redirect_messages
from orchestrator.cli.planning import find_target
from orchestrator.cli.sweep_states import print_sweep_json
from orchestrator.submit.attempts_to_begin import Policy
from orchestrator.submit.executor import check_executor, resolve_executor
from orchestrator.sweeps.store import Store, read_plan
from orchestrator.workflow.run_sweep import run_sweep

EXAMPLE = "resume tiny_moe --failed"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", help="name of a sweep")
    parser.add_argument(
        "--failed",
        action="store_true",
        help="also retry the runs whose outcome was unexpected, and begin the runs that were skipped for them",
    )
    add_target(parser)
    add_no_wait(parser)
    add_allow_empty(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    with redirect_messages(arguments):
        paths = Store(arguments.store).find(arguments.sweep)
        plan = read_plan(paths)
        executor = resolve_executor(arguments.executor)
        check_executor(plan, executor)
        target = find_target(arguments, executor, plan.cluster)
        policy: Policy = "failed" if arguments.failed else "unfinished"
        wait, allow_empty = not arguments.no_wait, arguments.allow_empty
        code = run_sweep(paths, plan, target, policy, executor, wait=wait, allow_empty=allow_empty)
    if arguments.json:
        print_sweep_json(paths, plan, has_report=not arguments.no_wait)
    return code
