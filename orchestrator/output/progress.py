"""Print what a command does with runs: starts, adopts, retries or cancels them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from launch.common.text import count, duration, size
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.output.states import format_counts
from orchestrator.submit.slurm_queue import Submitted
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import other_writers


def print_orders(
    paths: SweepPaths,
    states: Mapping[str, RunState],
    orders: Sequence[BundleOrder],
    other_runs: int,
    submitted: Submitted,
) -> None:
    """Print which runs start now and which are kept. Every run of ``states`` counts once.

    ``other_runs`` is the number of runs of earlier plans of this name. ``submitted`` has the bundles that wait for room.
    """
    ordered = {run_id for order in orders for run_id, _ in order.schedule}
    alive = [state for state in states.values() if state.alive]
    starting = [state for state in states.values() if not state.alive and state.run_id in ordered]
    kept = [state for state in states.values() if not state.alive and state.run_id not in ordered]
    left = {
        state.run_id: state
        for state in kept
        if state.name in ("PLANNED", "INTERRUPTED", "CANCELLED", "NOT_NEEDED", "SKIPPED")
    }
    up_to = "up to " * any(order.looks for order in orders)
    parts = [f"{up_to}{count('run', len(starting))} to start"] if starting else []
    parts += [f"{len(alive)} already running or waiting, adopted"] if alive else []
    parts += [f"{len(kept) - len(left)} on disk"] if len(kept) > len(left) else []
    parts += [f"left as they are: {format_counts(left)}"] if left else []
    print("; ".join(parts) if parts else "nothing to run")
    for state in starting:
        if state.damaged:
            folder = paths.run(state.run_id).attempt(state.next_attempt - 1).root
            print(
                f"{state.run_id} runs again, as attempt {state.next_attempt}: {folder}/{state.damaged}. No attempt of it counts "
                f"until {folder} is moved away"
            )
    if submitted.left:
        waiting = _count_runs(order for order in orders if order.bundle_id in submitted.left)
        print(f"{waiting} of them wait until Slurm accepts more jobs ({submitted.limit})")
    if other_runs:
        print(f"{count('run', other_runs)} of earlier plans of this name are kept on disk; the report leaves them out")
    # Flush, so that the reader of a pipe sees the output before the first run starts.
    sys.stdout.flush()


def print_behind_jobs(runs: int, *, begin_later: bool) -> None:
    """Print how many runs cannot begin, because the job of their bundle is alive, and whether this command begins them later."""
    if begin_later:
        print(f"{count('more run', runs)} to start once the job of the same bundle has ended", flush=True)
    else:
        print(f"{count('run', runs)} left out, since a job of the same bundle still runs or waits", flush=True)


def warn_unshared_store(paths: SweepPaths) -> None:
    sys.stderr.write(
        f"{paths.root} is in a folder that is usually local to each host. No run starts unless the nodes of this cluster "
        "see it; choose another folder with --store\n"
    )


@cache
def warn_shared_store(folder: Path) -> None:
    """Print, once per process, that others can write to ``folder``. It holds sweeps, so they can decide what runs."""
    writers = other_writers(folder)
    if writers:
        sys.stderr.write(
            f"{folder}: {' and '.join(writers)} can write here, and can therefore choose what runs as you. chmod go-w removes "
            "this right; --store names another folder (docs/security.md)\n"
        )


def print_wait(line: str) -> None:
    """Print what a command waits for, beside its output."""
    print(line, file=sys.stderr, flush=True)


def print_cancelled(plan: Plan, cancelled: Sequence[str], states: Mapping[str, RunState], *, all_runs: bool) -> None:
    """Print how many runs were cancelled, those of earlier plans separately, then the states that ``status`` counts."""
    earlier = sum(run_id not in states for run_id in cancelled)
    if cancelled:
        apart = f", {earlier} of them of earlier plans" if earlier else ""
        print(f"cancelled {count('run', len(cancelled))} of {plan.name}{apart}; finished runs are kept")
    else:
        print(f"nothing to cancel: {f'no run of {plan.name}' if all_runs else 'none of these runs'} runs or waits")
    print(f"{plan.name}: {format_counts(states)}")


def print_pruned(sweep: str, files: int, total: int, kept: str, *, dry_run: bool) -> None:
    """Print one line: what was or would be deleted of a sweep, or why nothing was deleted."""
    verb = "would delete" if dry_run else "deleted"
    print(f"{sweep}: kept, {kept}" if kept else f"{sweep}: {verb} {count('file', files)}, {size(total)}")


def print_later_orders(waiting: Sequence[BundleOrder], retries: Sequence[BundleOrder], submitted: Submitted) -> None:
    """Print what a watching command submits: runs that waited for room, and retries after a failure of the infrastructure."""
    print_excluded_nodes(submitted.avoided)
    if retries:
        print(f"{count('run', _count_runs(retries))} to retry")
    left = _count_runs(order for order in waiting if order.bundle_id in submitted.left)
    if left < _count_runs(waiting):
        print(f"{count('waiting run', _count_runs(waiting) - left)} submitted{f'; {left} still wait' if left else ''}")


def print_room_wait(
    waiting: Sequence[BundleOrder], limit: str, seconds: float, pause: float, *, has_jobs: bool
) -> None:
    """Print how long runs have waited for room in Slurm's queue, and what fills it."""
    fills = "" if has_jobs else "; this sweep has no job in the queue, so other jobs fill it"
    print(
        f"waiting for {duration(seconds)} until Slurm accepts more jobs ({limit}): {count('run', _count_runs(waiting))}{fills}; next "
        f"try in {duration(pause)}",
        flush=True,
    )


def print_withdrawn(job_ids: Iterable[str]) -> None:
    for job_id in job_ids:
        print(f"job {job_id} is cancelled: each of its runs is skipped", flush=True)


def print_excluded_nodes(nodes: Sequence[str]) -> None:
    if nodes:
        print(f"excluded nodes: {', '.join(nodes)}; the infrastructure failed there")


def _count_runs(orders: Iterable[BundleOrder]) -> int:
    return sum(len(order.schedule) for order in orders)
