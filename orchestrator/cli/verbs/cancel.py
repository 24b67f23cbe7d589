"""The verb ``cancel``."""

from __future__ import annotations

import argparse

from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_json
from orchestrator.output.print_json import print_json
from orchestrator.output.progress import print_cancelled, print_wait
from orchestrator.submit.cancel import cancel, choose
from orchestrator.sweeps.store import Store, read_plan

EXAMPLE = "cancel tiny_moe eager-1a2b3c4d5e-r0"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", help="name of a sweep")
    parser.add_argument(
        "run_ids", nargs="*", default=[], metavar="run", help="id, or unique prefix, of a run (default: all runs)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    paths = Store(arguments.store).find(arguments.sweep)
    plan = read_plan(paths)
    cancelled, states = cancel(paths, plan, choose(plan, arguments.run_ids), print_wait)
    if arguments.json:
        print_json({"cancelled": cancelled})
    else:
        print_cancelled(plan, cancelled, states, all_runs=not arguments.run_ids)
    return 0
