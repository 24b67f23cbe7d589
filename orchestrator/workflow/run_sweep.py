"""Seeing a sweep through: order what may be begun, hand it over, follow it, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.common.atomic_files import sync_file_system
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.errors import input_error
from orchestrator.output.next_commands import cancel_command, print_left_running, print_next_commands, suggest_after
from orchestrator.output.progress import print_excluded_nodes, print_orders, warn_unshared_store
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
from orchestrator.workflow.watch import watch

_OF_ONE_HOST = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm")))
"""Folders that each host usually has for itself."""


def run_sweep(
    paths: SweepPaths,
    plan: Plan,
    target: Target,
    policy: Policy,
    executor: Executor,
    *,
    wait: bool,
    conclude: Callable[[SweepPaths], int] | None = None,
) -> int:
    """Carry out what ``policy`` allows of ``plan``; the value is the exit code.

    Without waiting it is 0 once Slurm, or this host's queue, has taken the work. With nothing to do it is what the
    report says, or what stands in its place: ``conclude``.
    """
    states, busy = carry_out(paths, plan, target, policy, executor, wait=wait)
    code = 0
    if wait:
        code = _report(paths, states, anew=busy) if conclude is None else conclude(paths)
    print_next_commands(suggest_after(paths, plan, states))
    return code


def carry_out(
    paths: SweepPaths, plan: Plan, target: Target, policy: Policy, executor: Executor, *, wait: bool
) -> tuple[Mapping[str, RunState], bool]:
    """Have the runs made that ``policy`` allows; the state of every run, and whether anything ran or was to run."""
    scheduler = JobMonitor()
    with order_lock(paths):
        jobs = poll_jobs(paths, scheduler)  # whatever the executor: an earlier plan of this name may have jobs
        busy = _order(paths, plan, target, policy, jobs, watched=wait)
        if busy and executor == "local":
            start_queue(paths)
    retry = InfrastructureRetry(paths, plan, target, scheduler) if isinstance(target, Cluster) and wait else None
    try:
        if executor == "debug":
            run_in_foreground(paths)
        if busy and wait:
            _follow(paths, plan, target, executor, scheduler, retry)
    except KeyboardInterrupt:
        if executor == "debug":
            print_next_commands(suggest_after(paths, plan, read_states(paths, plan)))
        else:
            print_left_running(paths, plan)
        raise
    return _buried(paths, plan, scheduler.look(open_submissions(paths))), busy


def _follow(
    paths: SweepPaths,
    plan: Plan,
    target: Target,
    executor: Executor,
    scheduler: JobMonitor,
    retry: InfrastructureRetry | None,
) -> None:
    if isinstance(target, Cluster):
        watch(paths, plan, restart_queue=False, scheduler=scheduler, tend=retry,
              max_pending_minutes=target.profile.max_pending_minutes)  # fmt: skip
    else:
        watch(paths, plan, restart_queue=executor == "local")


def _order(paths: SweepPaths, plan: Plan, target: Target, policy: Policy, jobs: Jobs, *, watched: bool) -> bool:
    """Put ``plan`` on disk and hand over what may be begun; the value is whether anything runs or is to run.

    Raises:
        InputError: the sweep runs by another plan. Two plans at once would judge each other's runs.
    """
    live = sum(len(run_ids) for _, run_ids in live_runs(paths, jobs))
    if live and not is_planned(paths, plan):
        message = f"sweep {plan.name!r} is running by another plan ({live} runs run or wait)"
        raise input_error(
            "",
            message,
            f"wait for it, cancel it ({cancel_command(paths, plan)}), or name this one otherwise: name=...",
        )
    write_plan(paths, plan)
    states = _buried(paths, plan, jobs)
    ordered = attempts_to_begin(plan, states, target, policy)
    if isinstance(target, Cluster) and watched:
        # What an earlier command that watched would have begun again, had it lived.
        ordered = _joined(ordered, attempts_to_begin(plan, states, target, "infrastructure"))
    _withdraw_others(paths, plan, jobs)
    _hand_over(paths, plan, ordered, states, target, jobs)
    print_orders(states, ordered, runs_of_other_plans(paths, plan))
    return bool(ordered) or any(state.alive for state in states.values())


def _joined(first: Sequence[BundleOrder], second: Sequence[BundleOrder]) -> tuple[BundleOrder, ...]:
    """Of two orders for one bundle the longer one."""
    joined = {order.bundle_id: order for order in first}
    for order in second:
        joined[order.bundle_id] = max(order, joined.get(order.bundle_id, order), key=lambda order: len(order.schedule))
    return tuple(joined.values())


def _hand_over(
    paths: SweepPaths, plan: Plan, ordered: Sequence[BundleOrder], states: Mapping[str, RunState], target: Target,
    jobs: Jobs,
) -> None:  # fmt: skip
    if not isinstance(target, Cluster):
        write_orders(paths, ordered)
        with report_disk_errors(paths):
            sync_file_system(paths.root)
    elif ordered:
        special = {"%", "\\"} & set(str(paths.root.absolute()))
        if special:
            message = (
                f"{paths.root}: holds {min(special)}, which sbatch reads as a part of a pattern (filename pattern)"
            )
            raise input_error("--store", message, "name another folder, or another sweep: name=...")
        if any(paths.root.resolve().is_relative_to(folder) for folder in _OF_ONE_HOST):
            warn_unshared_store(paths)
        exclude = nodes_to_avoid(states, ordered, target)
        print_excluded_nodes(enqueue(paths, plan, ordered, target, jobs, exclude))


def _buried(paths: SweepPaths, plan: Plan, jobs: Jobs) -> Mapping[str, RunState]:
    """The state of every run, once attempts that died with their job have an outcome on disk."""
    states = read_states(paths, plan, jobs)
    return read_states(paths, plan, jobs) if close_dead_attempts(paths, states) else states


def _withdraw_others(paths: SweepPaths, plan: Plan, jobs: Jobs) -> None:
    """What an earlier plan ordered, and nobody lives to begin, is not to be taken up beside this plan's runs."""
    kept = {paths.bundle(bundle.bundle_id) for bundle in plan.bundles}
    kept.update(bundle for bundle, _ in live_runs(paths, jobs))
    with report_disk_errors(paths):
        for bundle in bundles(paths):
            if bundle not in kept:
                bundle.order.unlink(missing_ok=True)


def _report(paths: SweepPaths, states: Mapping[str, RunState], *, anew: bool) -> int:
    """Show the report, written ``anew`` or where the one on disk is older than a run; the value is its exit code."""
    code = None if anew else _reported(paths, states)
    if code is None:
        code = write_report(paths)
    print_report(paths)
    return code


def _reported(paths: SweepPaths, states: Mapping[str, RunState]) -> int | None:
    """The exit code of the report on disk, None where there is none or something is newer than it."""
    report = paths.report / "summary.json"
    try:
        written = min(report.stat().st_mtime, (paths.report / "report.md").stat().st_mtime)
        code = json.loads(report.read_bytes())["exit_code"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    newest = max(paths.plan.stat().st_mtime, newest_change(paths, states.values()))
    return int(code) if newest < written else None
