"""Run a sweep: start the runs that may start, watch them, and write the report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launch.common.atomic_files import sync_file_system
from launch.common.text import count
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.records.digest import digest_records
from orchestrator.errors import SystemFault, input_error
from orchestrator.output.next_commands import (
    cancel_command,
    print_left_running,
    print_next_commands,
    resume_command,
    suggest_after,
)
from orchestrator.output.progress import (
    print_behind_jobs,
    print_excluded_nodes,
    print_orders,
    print_withdrawn,
    warn_shared_store,
    warn_unshared_store,
)
from orchestrator.output.progress_view import open_view
from orchestrator.output.report import print_delivered, print_report, print_tracking
from orchestrator.output.states import print_needed_runs
from orchestrator.submit.attempts_to_begin import Policy, attempts_to_begin, runs_behind_jobs
from orchestrator.submit.backlog import Backlog
from orchestrator.submit.executor import Executor
from orchestrator.submit.idle_jobs import withdraw_idle_jobs
from orchestrator.submit.local_queue import run_in_foreground, start_queue
from orchestrator.submit.slurm_queue import Submitted, enqueue, poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.report_process import (
    read_exit_code,
    read_needed_runs,
    read_records_digest,
    track_report,
    write_report,
)
from orchestrator.sweeps.run_state import RunState, live_runs, open_submissions, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import (
    bundles,
    is_planned,
    order_lock,
    read_plan,
    report_disk_errors,
    runs_of_other_plans,
    write_orders,
    write_plan,
)
from orchestrator.targets.slurm_cluster import Cluster, Target
from orchestrator.workflow.infrastructure_retry import InfrastructureRetry, nodes_to_avoid
from orchestrator.workflow.watch_host import watch_host
from orchestrator.workflow.watch_slurm import PendingTimeout, watch_slurm

_LOCAL_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm")))
"""Folders that are usually local to each host."""


def run_sweep(
    paths: SweepPaths, plan: Plan, target: Target, policy: Policy, executor: Executor, *, wait: bool,
    allow_empty: bool = False, conclude: Callable[[SweepPaths], int] | None = None
) -> int:  # fmt: skip
    """Run what ``policy`` allows. Return the exit code of the report, or of ``conclude`` if it is given.

    If the command does not wait, return 0 as soon as Slurm, or this host's queue, has accepted the runs.
    """
    states = carry_out(paths, plan, target, policy, executor, wait=wait)
    code = 0
    if wait:
        code = _report(paths, plan, allow_empty=allow_empty) if conclude is None else conclude(paths)
    print_next_commands(suggest_after(paths, plan, states, reported=wait))
    return code


def carry_out(
    paths: SweepPaths, plan: Plan, target: Target, policy: Policy, executor: Executor, *, wait: bool
) -> Mapping[str, RunState]:
    """Run what ``policy`` allows, then the runs that its verdicts need. Return the state of every run."""
    with report_disk_errors(paths):
        paths.root.mkdir(parents=True, exist_ok=True)
    command = _Command(paths, plan, target, executor, wait, JobMonitor(), Backlog(paths, policy))
    states = _run_started(command, _start_runs)
    if needed := _judge_needed_runs(paths, plan, states):
        print_needed_runs(needed)
        states = _run_started(command, partial(_start_needed_runs, needed))
    return states


@dataclass(frozen=True)
class _Command:
    """A command that runs ``plan``: where, whether it waits for the runs, and what it learns from Slurm meanwhile."""

    paths: SweepPaths
    plan: Plan
    target: Target
    executor: Executor
    wait: bool
    scheduler: JobMonitor
    backlog: Backlog


def _run_started(command: _Command, start: Callable[[_Command], bool]) -> Mapping[str, RunState]:
    """Start runs, watch them, and return the state of every run. ``start`` returns whether any run is running or waiting."""
    paths, plan, executor, backlog = command.paths, command.plan, command.executor, command.backlog
    with order_lock(paths):
        active = start(command)
        to_submit = resume_command(paths, plan, failed=backlog.policy == "failed")
        if backlog.waits and not command.wait:
            raise SystemFault(f"not every run has a job. When jobs have ended, this submits the rest:\n  {to_submit}")
        if active and executor == "local":
            start_queue(paths)
    try:
        if executor == "debug":
            run_in_foreground(paths)
        if active and command.wait:
            _watch(command)
    except KeyboardInterrupt:
        if executor == "debug":
            print_next_commands(suggest_after(paths, plan, read_states(paths, plan)))
        else:
            print_left_running(paths, plan, to_submit if backlog.waits else "")
        raise
    return _close_and_read(paths, plan, command.scheduler.look(open_submissions(paths)))


def _watch(command: _Command) -> None:
    paths, plan, target, scheduler = command.paths, command.plan, command.target, command.scheduler
    with open_view(plan) as view:
        if isinstance(target, Cluster):
            timeout = PendingTimeout(target.profile.max_pending_minutes)
            retry = InfrastructureRetry(paths, plan, target, scheduler, command.backlog)
            watch_slurm(paths, plan, view, scheduler, timeout, retry)
        else:
            watch_host(paths, plan, view, restart_queue=command.executor == "local")


def _start_runs(command: _Command) -> bool:
    """Write the plan and submit the runs that may start. Return whether any run is running or waiting now.

    Raises:
        InputError: the sweep is running under another plan, or has results of another recipe.
    """
    paths, plan, target, policy = command.paths, command.plan, command.target, command.backlog.policy
    # Ask Slurm with any executor, because an earlier plan of this name may have jobs.
    jobs = poll_jobs(paths, command.scheduler)
    print_withdrawn(withdraw_idle_jobs(paths, jobs))
    live = sum(len(run_ids) for _, run_ids in live_runs(paths, jobs))
    if live and not is_planned(paths, plan):
        message = f"sweep {plan.name!r} is already running with another plan ({count('run', live)} running or waiting)"
        # Two plans at the same time would judge each other's runs.
        fix = f"wait for it, cancel it ({cancel_command(paths, plan)}), or give this one another name: name=..."
        raise input_error("", message, fix)
    if policy == "new":
        _check_results_stay(paths, plan, jobs)
    write_plan(paths, plan)
    states = _close_and_read(paths, plan, jobs)
    # An earlier command that was killed while it watched may have left retries.
    unasked: tuple[Policy, ...] = ("infrastructure",) if isinstance(target, Cluster) and command.wait else ()
    orders = attempts_to_begin(plan, states, target, policy, *unasked)
    _delete_stale_orders(paths, plan, jobs)
    for folder in (paths.root.parent, paths.root) if orders else ():
        warn_shared_store(folder)
    active = _submit(command, orders, states)
    _leave_to_jobs(command, runs_behind_jobs(plan, states, target, policy))
    return active


def _leave_to_jobs(command: _Command, attempts: Mapping[str, int]) -> None:
    """Begin ``attempts``, by run, once the jobs of their bundles have ended. Tell how many there are."""
    if attempts:
        on_slurm = isinstance(command.target, Cluster)
        command.backlog.ask(command.plan, attempts if on_slurm else {})
        print_behind_jobs(len(attempts), begin_later=on_slurm and command.wait)


def _submit(command: _Command, orders: Sequence[BundleOrder], states: Mapping[str, RunState]) -> bool:
    """Submit ``orders``. Return whether any run is running or waiting now."""
    paths, plan, target = command.paths, command.plan, command.target
    submitted = Submitted()
    if isinstance(target, Cluster) and orders:
        _check_store(paths)
        nodes = nodes_to_avoid(states, orders, target)
        submitted = enqueue(paths, plan, orders, target, command.scheduler, nodes)
        print_excluded_nodes(submitted.avoided)
    elif not isinstance(target, Cluster):
        write_orders(paths, orders)
        with report_disk_errors(paths):
            sync_file_system(paths.root)
    command.backlog.replace(submitted)
    print_orders(paths, states, orders, runs_of_other_plans(paths, plan), submitted)
    return bool(orders) or any(state.alive for state in states.values())


def _judge_needed_runs(paths: SweepPaths, plan: Plan, states: Mapping[str, RunState]) -> frozenset[str]:
    """Return the runs that begin only if a verdict needs them, and that a verdict does need.

    Return none before all other runs have ended.
    """
    waits = any(state.alive or state.name == "PLANNED" for state in states.values())
    if waits or not any(state.finished for state in states.values()) or plan.runs_if_needed <= states.keys():
        return frozenset()
    _update_report(paths, plan)
    return read_needed_runs(paths, plan, states)


def _start_needed_runs(needed: Set[str], command: _Command) -> bool:
    """Submit the runs in ``needed``. Return whether any run is running or waiting now."""
    paths, plan = command.paths, command.plan
    # Another command may have been faster, or planned the sweep again.
    if not is_planned(paths, plan):
        return False
    states = _close_and_read(paths, plan, poll_jobs(paths, command.scheduler))
    planned = {run_id: RunState(run_id, "PLANNED", 1) for run_id in needed - states.keys()}
    orders = attempts_to_begin(plan, planned, command.target, "new")
    return _submit(command, orders, {**states, **planned})


def _check_results_stay(paths: SweepPaths, plan: Plan, jobs: Jobs) -> None:
    """Refuse ``plan`` if an earlier plan of this name has results and shares no run with it.

    The report covers only the newest plan, so a good report would become one without results. The same recipe may run in parts
    (`--only`), unless no cell can run, as on a host without GPUs.

    Raises:
        InputError: it is such a plan.
    """
    try:
        earlier = read_plan(paths)
    except (FileNotFoundError, SystemFault):
        return
    planned = plan.cell_of_run().keys()
    if (planned and earlier.recipe == plan.recipe) or earlier.cell_of_run().keys() & planned:
        return
    states = read_states(paths, earlier, jobs).values()
    results = sum(state.has_results for state in states)
    if results:
        message = (
            f"sweep {plan.name!r} has {count('run', results)} with results of {earlier.recipe_file}, but this recipe "
            f"({plan.recipe_file}, with its overrides) has none of its runs, so the report would lose them all"
        )
        free = next(
            name for k in itertools.count(2) if not paths.root.with_name(name := f"{plan.name[:60]}-{k}").exists()
        )
        raise input_error("", message, f"give this one another name: name={free}. Or delete {paths.root}")


def _check_store(paths: SweepPaths) -> None:
    """Raise InputError if sbatch misreads the path of the sweep; warn if nodes may not see it."""
    special = {"%", "\\"} & set(str(paths.root.absolute()))
    if special:
        message = f"{paths.root} contains {min(special)}, which sbatch reads as part of a filename pattern"
        raise input_error("--store", message, "choose another folder, or another name for the sweep: name=...")
    if any(paths.root.resolve().is_relative_to(folder) for folder in _LOCAL_FOLDERS):
        warn_unshared_store(paths)


def _close_and_read(paths: SweepPaths, plan: Plan, jobs: Jobs) -> Mapping[str, RunState]:
    """Write the outcomes of attempts that died with their job. Then return the state of every run."""
    states = read_states(paths, plan, jobs)
    return read_states(paths, plan, jobs) if close_dead_attempts(paths, states) else states


def _delete_stale_orders(paths: SweepPaths, plan: Plan, jobs: Jobs) -> None:
    """Delete the orders of an earlier plan that no live process will start."""
    kept = {paths.bundle(bundle.bundle_id) for bundle in plan.all_bundles}
    kept.update(bundle for bundle, _ in live_runs(paths, jobs))
    with report_disk_errors(paths):
        for bundle in bundles(paths):
            if bundle not in kept:
                bundle.order.unlink(missing_ok=True)


def _report(paths: SweepPaths, plan: Plan, *, allow_empty: bool) -> int:
    """Print the report on the records on disk. Return its exit code."""
    _update_report(paths, plan)
    print_report(paths)
    return read_exit_code(paths, allow_empty=allow_empty)


def _update_report(paths: SweepPaths, plan: Plan) -> None:
    """Write and track the report again if records have changed since. Print what trackers report."""
    if read_records_digest(paths) != digest_records(paths, plan.cell_of_run()):
        write_report(paths)
        print_tracking(paths, plan)
        print_delivered(track_report(paths, plan))
