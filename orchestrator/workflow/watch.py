"""Following a sweep until nothing of it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from rich.live import Live
from rich.table import Table

from launch.common.file_lock import was_killed
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan
from orchestrator.output.jobs import describe_job
from orchestrator.output.states import format_counts, format_steps
from orchestrator.slurm.command import poll_interval
from orchestrator.submit.local_queue import has_pending, start_queue
from orchestrator.sweeps.run_state import RunState, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.workflow.watch_slurm import PendingTimeout, Tend, follow

POLL_SECONDS = 0.5
LOST_POLLS = 4
"""Looks in a row that find work ordered and nobody alive to do it, before it counts as lost."""
MOST_RESTARTS = 3
"""How often one watch starts another queue in the place of one that was killed."""


def watch(
    paths: SweepPaths,
    plan: Plan,
    *,
    restart_queue: bool,
    scheduler: JobMonitor | None = None,
    tend: Tend | None = None,
    max_pending_minutes: float | None = None,
) -> dict[str, RunState]:
    """Show the sweep until nothing of it runs or waits; the value is the state of every run then.

    ``restart_queue``: where this host's queue was killed with work left, start another. ``scheduler`` is Slurm, for a
    sweep whose bundles are its jobs; ``tend`` submits what is to be made again, and is called after each new look at it;
    ``max_pending_minutes`` is how long a job may wait while this command tends the sweep.
    """
    view = _LiveView(plan) if sys.stdout.isatty() else _LineView(plan)
    try:
        if scheduler is not None:
            return follow(paths, plan, view, scheduler, tend, PendingTimeout(max_pending_minutes))
        return _follow_host(paths, plan, view, restart_queue)
    finally:
        view.close()


def _follow_host(
    paths: SweepPaths, plan: Plan, view: _LineView | _LiveView, restart_queue: bool
) -> dict[str, RunState]:
    restarts = MOST_RESTARTS if restart_queue else 0
    quiet = 0
    while quiet < LOST_POLLS:
        begun = time.monotonic()
        states = read_states(paths, plan)
        view.update(states)
        # While a queue starts, or takes the place of another, nothing may be alive for a moment.
        quiet = 0 if any(state.alive for state in states.values()) else quiet + 1
        if quiet and not has_pending(paths):
            return states
        if quiet and restarts and was_killed(paths.queue_lock):
            restarts -= 1
            start_queue(paths)
        time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))
    view.say(
        f"Some runs never began: each supervisor ended at once. {paths.root / 'queue.log'} and "
        f"{paths.root / 'submitit'} hold why."
    )
    return states


class Progress:
    """The share of a sweep that is done, and the time left by the pace of its runs: while none ran, behind another sweep or
    in Slurm's queue, no pace was seen."""

    LEAST_SECONDS = 5.0
    """Of running, before a pace is told."""

    def __init__(self, cells: Mapping[str, Cell], clock: Callable[[], float] = time.monotonic) -> None:
        self._cells = cells
        self._clock = clock
        self._last = clock()
        self._running = False
        self._ran = 0.0
        self._first: float | None = None

    def of(self, states: Mapping[str, RunState]) -> tuple[float, str]:
        now = self._clock()
        if self._running:
            self._ran += now - self._last
        self._last, self._running = now, any(state.name == "RUNNING" for state in states.values())
        shares = [self._share(run_id, state) for run_id, state in states.items()]
        done = sum(shares) / max(1, len(shares))
        if self._first is None:
            self._first = done
        gained = done - self._first
        if gained <= 0 or self._ran < self.LEAST_SECONDS:
            return done, "estimating the time left"
        return done, f"about {_duration(self._ran / gained * (1 - done))} left"

    def _share(self, run_id: str, state: RunState) -> float:
        if state.finished or state.name == "INTERRUPTED":
            return 1.0
        steps: int = self._cells[run_id].spec["training"]["steps"]
        return min(1.0, state.steps_done / max(1, steps))


class _LineView:
    """A line whenever a run changes its state: for logs and pipes."""

    def __init__(self, plan: Plan) -> None:
        self._cells = plan.cell_of_run()
        self._progress = Progress(self._cells)
        self._shown: dict[str, str] = {}

    def update(self, states: Mapping[str, RunState]) -> None:
        done, left = self._progress.of(states)
        for run_id, state in states.items():
            if self._shown.get(run_id) != state.name and state.name not in ("PLANNED", "QUEUED"):
                message = f": {state.outcome.message}" if state.outcome and state.outcome.message else ""
                label = self._cells[run_id].label
                print(f"[{done:4.0%}, {left}] {state.name:10} {run_id}  {label}{message}", flush=True)
            self._shown[run_id] = state.name

    def say(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        return None


class _LiveView:
    """A table that redraws itself, the runs that matter now first."""

    MOST_ROWS = 20
    ORDER: Mapping[str, int] = {"RUNNING": 0, "FAILED": 1, "COMPLETED": 2, "QUEUED": 3, "PLANNED": 3}

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cells = plan.cell_of_run()
        self._progress = Progress(self._cells)
        self._live = Live(refresh_per_second=4)
        self._live.start()

    def update(self, states: Mapping[str, RunState]) -> None:
        done, left = self._progress.of(states)
        table = Table(title=f"{self._plan.name}: {done:.0%}, {left}", caption=format_counts(states))
        headings = ["run", "cell", "state", "steps", *(["job"] if self._plan.scheduler == "slurm" else [])]
        for heading in headings:
            table.add_column(heading, no_wrap=heading not in ("cell", "job"))
        rows = sorted(states.items(), key=lambda item: self.ORDER.get(item[1].name, 1))
        for run_id, state in rows[: self.MOST_ROWS]:
            cell = self._cells[run_id]
            row = (run_id, cell.label, state.name, format_steps(state, cell), describe_job(state))
            table.add_row(*row[: len(headings)])
        if len(rows) > self.MOST_ROWS:
            table.add_row("...", f"and {len(rows) - self.MOST_ROWS} more")
        self._live.update(table)

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
