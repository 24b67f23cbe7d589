"""The verb ``doctor``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from launch.common.command_line import Parser
from launch.common.text import align
from launch.contract.exit_codes import ExitCode
from orchestrator.cli.arguments import add_json
from orchestrator.output.print_json import print_json
from orchestrator.sweeps.store import Store

EXAMPLE = "doctor --cluster example"
NOTE = "With --cluster it runs a job of one minute on one node.\n\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--cluster", metavar="NAME", help="check the Slurm cluster of this profile; '' means the default profile"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    # Imported here, as submitit takes long to load.
    from orchestrator.workflow.doctor import check_cluster, check_host

    store = Store(arguments.store).root
    checks = check_host(store) if arguments.cluster is None else check_cluster(arguments.cluster, store)
    if arguments.json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        fixes = [f"{check.name}: {check.fix}" for check in checks if check.fix]
        print(*align([(check.state, check.name, check.found) for check in checks]), *fixes, sep="\n")
    return ExitCode.FAILED if any(check.state == "fail" for check in checks) else ExitCode.PASS
