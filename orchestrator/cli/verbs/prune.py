"""The verb ``prune``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from launch.common.command_line import Parser
from launch.contract.exit_codes import ExitCode
from launch.contract.paths import SweepPaths
from orchestrator.cli.arguments import add_json, non_negative
from orchestrator.errors import input_error
from orchestrator.output.print_json import print_json
from orchestrator.output.progress import print_pruned
from orchestrator.sweeps.store import Store

EXAMPLE = "prune --older-than 30 --keep reports --dry-run"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "sweeps", nargs="*", default=[], metavar="sweep", help="name of a sweep (default: all, with --older-than)"
    )
    parser.add_argument(
        "--older-than",
        type=non_negative("number of days"),
        metavar="DAYS",
        help="delete only sweeps whose last run ended more than DAYS days ago",
    )
    parser.add_argument(
        "--keep",
        choices=("nothing", "reports"),
        default="nothing",
        help="reports: keep the reports and their records; delete only logs, the output of jobs and local copies of "
        "W&B runs",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, but delete nothing")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    # Imported here, as submitit takes long to load.
    from orchestrator.workflow.prune_sweeps import delete_leftovers, prune

    store = Store(arguments.store)
    if not arguments.sweeps and arguments.older_than is None:
        raise input_error("", "which sweeps?", "name them, or give their least age in days: prune --older-than 30")
    sweeps = [store.find(name) for name in arguments.sweeps or store.names()]
    if not arguments.dry_run:
        delete_leftovers(store)
    dry_run: bool = arguments.dry_run
    pruned = [
        prune(SweepPaths(sweep.root.absolute()), arguments.keep, arguments.older_than, dry_run=dry_run)
        for sweep in sweeps
    ]
    if arguments.json:
        print_json({"sweeps": [asdict(each) for each in pruned]})
    else:
        for each in pruned:
            print_pruned(each.sweep, each.files, each.bytes, each.kept, dry_run=dry_run)
    return ExitCode.UNFINISHED if any(each.fault for each in pruned) else ExitCode.PASS
