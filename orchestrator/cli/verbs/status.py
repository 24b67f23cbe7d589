"""The verb ``status``."""

from __future__ import annotations

import argparse
import sys

from launch.common.command_line import Parser
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.cli.arguments import add_json, redirect_messages
from orchestrator.cli.sweep_states import print_states_json, query_jobs
from orchestrator.errors import SystemFault
from orchestrator.output.jobs import print_job_problems
from orchestrator.output.next_commands import print_next_commands, suggest_after
from orchestrator.output.print_json import print_json
from orchestrator.output.states import (
    count_states,
    describe_full_disk,
    describe_slots,
    print_needed_runs,
    print_states,
    print_sweeps,
    warn_damage,
)
from orchestrator.sweeps.report_process import read_needed_runs
from orchestrator.sweeps.run_state import open_submissions, read_states
from orchestrator.sweeps.slot_holders import slot_holders
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import Store, file_sizes, read_plan

EXAMPLE = "status tiny_moe --watch"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", nargs="?", help="name of a sweep (default: list all sweeps)")
    parser.add_argument("--watch", action="store_true", help="keep showing the state until nothing runs")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    store = Store(arguments.store)
    if arguments.sweep is None:
        return _list_sweeps(store, as_json=arguments.json)
    paths = store.find(arguments.sweep)
    plan = read_plan(paths)
    if arguments.watch:
        with redirect_messages(arguments):
            _watch(paths, plan)
    if arguments.json:
        print_states_json(paths, plan)
        return 0
    jobs = query_jobs(open_submissions(paths))
    states = read_states(paths, plan, jobs)
    print_states(plan, states)
    warn_damage(paths, states)
    print_job_problems(jobs, states)
    waits = [*describe_full_disk(paths, states), *describe_slots(slot_holders(paths, plan, states))]
    print(*(f"{line}\n" for line in waits), sep="", end="")
    print_needed_runs(read_needed_runs(paths, plan, states))
    print_next_commands(suggest_after(paths, plan, states))
    return 0


def _watch(paths: SweepPaths, plan: Plan) -> None:
    # Imported only here: they load rich and submitit, which status does not need otherwise.
    from orchestrator.output.progress_view import open_view
    from orchestrator.workflow.watch_host import watch_host
    from orchestrator.workflow.watch_slurm import PendingTimeout, watch_slurm

    with open_view(plan) as view:
        if plan.scheduler == "slurm":
            watch_slurm(paths, plan, view, JobMonitor(), PendingTimeout(None))
        else:
            watch_host(paths, plan, view, restart_queue=False)


def _list_sweeps(store: Store, *, as_json: bool) -> int:
    """Print a line for each sweep. Report sweeps that cannot be read on standard error."""
    found, code = {}, 0
    for name in store.names():
        try:
            found[name] = (read_plan(store.sweep(name)), open_submissions(store.sweep(name)))
        except SystemFault as fault:
            print(f"error: {fault}", file=sys.stderr)
            code = fault.exit_code
    jobs = query_jobs([submission for _, submissions in found.values() for submission in submissions])
    rows = [
        (name, sum(file_sizes(store.sweep(name).root)), read_states(store.sweep(name), plan, jobs))
        for name, (plan, _) in found.items()
    ]
    if as_json:
        listed = [{"sweep": name, "bytes": on_disk, "runs": count_states(states)} for name, on_disk, states in rows]
        print_json({"sweeps": listed})
    else:
        print_sweeps(rows, store.root)
        print_job_problems(jobs, {})
    return code
