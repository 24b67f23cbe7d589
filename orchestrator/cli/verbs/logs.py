"""The verb ``logs``."""

from __future__ import annotations

import argparse

from launch.common.command_line import Parser
from launch.contract.paths import SweepPaths
from orchestrator.cli.follow_log import follow_log
from orchestrator.cli.run_logs import find_run, read_log
from orchestrator.output.visible_stream import raw_stdout
from orchestrator.sweeps.store import Store, read_plan

EXAMPLE = "logs torch_compile-1a2b3c4d5e-r0"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run_id", metavar="run", help="id, or unique prefix, of a run")
    parser.add_argument(
        "--rank", type=int, help="print only the log of this rank, without steps; the ranks of one torchrun share a log"
    )
    parser.add_argument("--attempt", type=int, help="print the log of this attempt (default: the latest)")
    parser.add_argument("--follow", action="store_true", help="keep printing until the attempt ends")


def run(arguments: argparse.Namespace) -> int:
    run_paths = find_run(Store(arguments.store), arguments.run_id)
    plan = read_plan(SweepPaths(run_paths.root.parent.parent))
    log = (follow_log if arguments.follow else read_log)(run_paths, plan, arguments.attempt, arguments.rank)
    for text in log:
        print(text, end="", flush=True, file=raw_stdout())
    return 0
