"""Run a sweep: start the runs that may start, watch them, and write the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.common.atomic_files import sync_file_system
from launch.common.text import count
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.errors import input_error
from orchestrator.output.next_commands import cancel_command, print_left_running, print_next_commands, suggest_after
from orchestrator.output.progress import print_excluded_nodes, print_orders, warn_unshared_store
from orchestrator.output.progress_view import open_view
from orchestrator.output.report import print_report
from orchestrator.submit.attempts import Policy, attempts_to_begin
from orchestrator.submit.executor import Executor
from orchestrator.submit.local_queue import run_in_foreground, start_queue
from orchestrator.submit.slurm_queue import enqueue, poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.report_process import write_report
from orchestrator.sweeps.run_state import RunState, live_runs, newest_change, open_submissions, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import (
    bundles,
    is_planned,
    order_lock,
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
    conclude: Callable[[SweepPaths], int] | None = None
) -> int:  # fmt: skip
    """Run what ``policy`` allows and return the exit code: that of the report, or of ``conclude`` if it is given.

    Without waiting, it is 0 once Slurm, or the queue of this host, has accepted the runs.
    """
    states, ran = carry_out(paths, plan, target, policy, executor, wait=wait)
    code = 0
    if wait:
        code = _report(paths, states, is_stale=ran) if conclude is None else conclude(paths)
    print_next_commands(suggest_after(paths, plan, states))
    return code


def carry_out(
    paths: SweepPaths, plan: Plan, target: Target, policy: Policy, executor: Executor, *, wait: bool
) -> tuple[Mapping[str, RunState], bool]:
    """Run what ``policy`` allows. Return the state of every run, and whether any was running or started."""
    scheduler = JobMonitor()
    with order_lock(paths):
        # With any executor: an earlier plan of this name may have jobs.
        jobs = poll_jobs(paths, scheduler)
        active = _start_runs(paths, plan, target, policy, jobs, wait=wait)
        if active and executor == "local":
            start_queue(paths)
    try:
        if executor == "debug":
            run_in_foreground(paths)
        if active and wait:
            _watch(paths, plan, target, executor, scheduler)
    except KeyboardInterrupt:
        if executor == "debug":
            print_next_commands(suggest_after(paths, plan, read_states(paths, plan)))
        else:
            print_left_running(paths, plan)
        raise
    return _close_and_read(paths, plan, scheduler.look(open_submissions(paths))), active


def _watch(paths: SweepPaths, plan: Plan, target: Target, executor: Executor, scheduler: JobMonitor) -> None:
    with open_view(plan) as view:
        if isinstance(target, Cluster):
            timeout = PendingTimeout(target.profile.max_pending_minutes)
            retry = InfrastructureRetry(paths, plan, target, scheduler)
            watch_slurm(paths, plan, view, scheduler, timeout, retry)
        else:
            watch_host(paths, plan, view, restart_queue=executor == "local")


def _start_runs(paths: SweepPaths, plan: Plan, target: Target, policy: Policy, jobs: Jobs, *, wait: bool) -> bool:
    """Write ``plan`` and submit the runs that may start. Return whether any run runs or waits now.

    Raises:
        InputError: the sweep is running by another plan. Two plans at once would judge each other's runs.
    """
    live = sum(len(run_ids) for _, run_ids in live_runs(paths, jobs))
    if live and not is_planned(paths, plan):
        message = f"sweep {plan.name!r} is already running with another plan ({count('run', live)} running or waiting)"
        fix = f"wait for it, cancel it ({cancel_command(paths, plan)}), or give this one another name: name=..."
        raise input_error("", message, fix)
    write_plan(paths, plan)
    states = _close_and_read(paths, plan, jobs)
    orders = attempts_to_begin(plan, states, target, policy)
    if isinstance(target, Cluster) and wait:
        # An earlier command that was killed while it watched may have left retries.
        orders = _merge_orders(orders, attempts_to_begin(plan, states, target, "infrastructure"))
    _delete_stale_orders(paths, plan, jobs)
    if isinstance(target, Cluster) and orders:
        _check_store(paths)
        nodes = nodes_to_avoid(states, orders, target)
        print_excluded_nodes(enqueue(paths, plan, orders, target, jobs, nodes))
    elif not isinstance(target, Cluster):
        write_orders(paths, orders)
        with report_disk_errors(paths):
            sync_file_system(paths.root)
    print_orders(states, orders, runs_of_other_plans(paths, plan))
    return bool(orders) or any(state.alive for state in states.values())


def _merge_orders(first: Sequence[BundleOrder], second: Sequence[BundleOrder]) -> tuple[BundleOrder, ...]:
    """Merge orders; of two orders for one bundle, keep the longer one."""
    merged = {order.bundle_id: order for order in first}
    for order in second:
        merged[order.bundle_id] = max(order, merged.get(order.bundle_id, order), key=lambda order: len(order.schedule))
    return tuple(merged.values())


def _check_store(paths: SweepPaths) -> None:
    """Raise InputError if sbatch misreads the path of the sweep; warn if nodes may not see it."""
    special = {"%", "\\"} & set(str(paths.root.absolute()))
    if special:
        message = f"{paths.root} contains {min(special)}, which sbatch reads as part of a filename pattern"
        raise input_error("--store", message, "choose another folder, or another name for the sweep: name=...")
    if any(paths.root.resolve().is_relative_to(folder) for folder in _LOCAL_FOLDERS):
        warn_unshared_store(paths)


def _close_and_read(paths: SweepPaths, plan: Plan, jobs: Jobs) -> Mapping[str, RunState]:
    """Write the outcome of attempts that died with their job, then return the state of every run."""
    states = read_states(paths, plan, jobs)
    return read_states(paths, plan, jobs) if close_dead_attempts(paths, states) else states


def _delete_stale_orders(paths: SweepPaths, plan: Plan, jobs: Jobs) -> None:
    """Delete the orders of an earlier plan that no live process will start."""
    kept = {paths.bundle(bundle.bundle_id) for bundle in plan.bundles}
    kept.update(bundle for bundle, _ in live_runs(paths, jobs))
    with report_disk_errors(paths):
        for bundle in bundles(paths):
            if bundle not in kept:
                bundle.order.unlink(missing_ok=True)


def _report(paths: SweepPaths, states: Mapping[str, RunState], *, is_stale: bool) -> int:
    """Print the report, written again if it is stale or older than a run. Return its exit code."""
    code = None if is_stale else _read_exit_code(paths, states)
    if code is None:
        code = write_report(paths)
    print_report(paths)
    return code


def _read_exit_code(paths: SweepPaths, states: Mapping[str, RunState]) -> int | None:
    """Return the exit code of the report on disk; None if there is no report or a run is newer."""
    report = paths.report / "summary.json"
    try:
        written = min(report.stat().st_mtime, (paths.report / "report.md").stat().st_mtime)
        code = json.loads(report.read_bytes())["exit_code"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    newest = max(paths.plan.stat().st_mtime, newest_change(paths, states.values()))
    return int(code) if newest < written else None
