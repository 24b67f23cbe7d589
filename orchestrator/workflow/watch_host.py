"""Watch a sweep that this host runs."""

from __future__ import annotations

import time

from launch.common.file_lock import was_killed
from launch.common.poll_interval import poll_interval
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.output.progress_view import View, print_new
from orchestrator.output.states import describe_full_disk, describe_slots
from orchestrator.submit.local_queue import has_pending, start_queue
from orchestrator.sweeps.run_state import read_states
from orchestrator.sweeps.slot_holders import slot_holders

POLL_SECONDS = 0.5
LOST_POLLS = 4
"""The number of consecutive polls without a live process after which ordered runs count as lost."""
MOST_RESTARTS = 3
"""The most queues that one watch starts to replace killed ones."""


def watch_host(paths: SweepPaths, plan: Plan, view: View, *, restart_queue: bool) -> None:
    """Show the sweep until no run is running or waiting. With ``restart_queue``, replace a queue that was killed."""
    restarts = MOST_RESTARTS if restart_queue else 0
    lost_polls = 0
    printed: set[str] = set()
    while lost_polls < LOST_POLLS:
        begun = time.monotonic()
        states = read_states(paths, plan)
        view.update(states)
        waits = [*describe_full_disk(paths, states), *describe_slots(slot_holders(paths, plan, states))]
        printed = print_new(view, printed, waits)
        # For a moment no process may be alive, while a queue starts or replaces another.
        lost_polls = 0 if any(state.alive for state in states.values()) else lost_polls + 1
        if lost_polls and not has_pending(paths):
            return
        if lost_polls and restarts and was_killed(paths.queue_lock):
            restarts -= 1
            start_queue(paths)
        time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))
    view.print(
        "Some runs never began: each supervisor ended at once. For the cause, see "
        f"{paths.root / 'bundles'}/*/supervisor.log"
    )
