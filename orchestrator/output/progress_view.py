"""Show a sweep while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.common.text import duration, escape_invisible, one_line
from launch.contract.plan import Cell, Plan
from orchestrator.output.jobs import describe_job
from orchestrator.output.states import format_counts, format_steps
from orchestrator.output.visible_stream import raw_stdout
from orchestrator.sweeps.run_state import RunState

LEAST_SECONDS = 5.0
"""The least running time before the remaining time is estimated."""
MOST_ROWS = 20
"""The most runs that the live table shows."""
_FIRST_ROWS = {"RUNNING": 0, "FAILED": 1, "COMPLETED": 2, "QUEUED": 3, "PLANNED": 3}
"""The order of states in the live table. Other states have 1."""


class Progress:
    """The share of a sweep that is done, and an estimate of the remaining time.

    The estimate uses the pace of the runs. It leaves out the time in which no run ran, for example in Slurm's queue.
    """

    def __init__(self, cells: Mapping[str, Cell], clock: Callable[[], float] = time.monotonic) -> None:
        self._cells = cells
        self._clock = clock
        self._last = clock()
        self._is_running = False
        self._seconds = 0.0
        self._first: float | None = None

    def update(self, states: Mapping[str, RunState]) -> tuple[float, str]:
        """Return the share that is done, from 0 to 1, and the remaining time in words."""
        now = self._clock()
        if self._is_running:
            self._seconds += now - self._last
        self._last, self._is_running = now, any(state.name == "RUNNING" for state in states.values())
        done = sum(self._share(run_id, state) for run_id, state in states.items()) / max(1, len(states))
        if self._first is None:
            self._first = done
        if done >= 1:
            return done, "no run left"
        gained = done - self._first
        if gained <= 0 or self._seconds < LEAST_SECONDS:
            return done, "estimating the time left"
        return done, f"about {duration(self._seconds / gained * (1 - done))} left"

    def _share(self, run_id: str, state: RunState) -> float:
        if state.finished or state.name in ("INTERRUPTED", "NOT_NEEDED", "SKIPPED"):
            return 1.0
        steps: int = self._cells[run_id].spec["training"]["steps"]
        return min(1.0, state.steps_done / max(1, steps))


class LineView:
    """Print a line whenever the state of a run changes, for logs and pipes."""

    def __init__(self, plan: Plan) -> None:
        self._cells = plan.cell_of_run()
        self._progress = Progress(self._cells)
        self._names: dict[str, str] = {}

    def update(self, states: Mapping[str, RunState]) -> None:
        done, left = self._progress.update(states)
        for run_id, state in states.items():
            if self._names.get(run_id) != state.name and state.name not in ("PLANNED", "QUEUED"):
                reason = state.outcome.message if state.outcome else state.why_unbegun
                message = f": {one_line(reason)}" if reason else ""
                label = self._cells[run_id].label
                self.print(f"[{done:4.0%}, {left}] {state.name:10} {run_id}  {label}{message}")
            self._names[run_id] = state.name

    def print(self, line: str) -> None:
        print(line, flush=True)


class LiveView:
    """Redraw a table whose first rows are the runs that matter now."""

    def __init__(self, plan: Plan, live: Live) -> None:
        self._plan = plan
        self._cells = plan.cell_of_run()
        self._progress = Progress(self._cells)
        self._live = live

    def update(self, states: Mapping[str, RunState]) -> None:
        done, left = self._progress.update(states)
        table = Table(title=f"{self._plan.name}: {done:.0%}, {left}", caption=format_counts(states))
        headings = ["run", "cell", "state", "steps", *(["job"] if self._plan.scheduler == "slurm" else [])]
        for heading in headings:
            table.add_column(heading, no_wrap=heading not in ("cell", "job"))
        rows = sorted(states.items(), key=lambda item: _FIRST_ROWS.get(item[1].name, 1))
        for run_id, state in rows[:MOST_ROWS]:
            cell = self._cells[run_id]
            row = (run_id, cell.label, state.name, format_steps(state, cell), describe_job(state))
            # Show it as text, not as rich's markup.
            table.add_row(*(Text(escape_invisible(word)) for word in row[: len(headings)]))
        if len(rows) > MOST_ROWS:
            table.add_row("...", f"and {len(rows) - MOST_ROWS} more")
        self._live.update(table)

    def print(self, line: str) -> None:
        self._live.console.print(escape_invisible(line), markup=False, highlight=False, soft_wrap=True)


View: TypeAlias = LineView | LiveView


@contextlib.contextmanager
def open_view(plan: Plan) -> Iterator[View]:
    # Collect garbage more often: over days of watching, uncollected cycles would fill the memory.
    gc.set_threshold(100_000)
    if sys.stdout.isatty():
        with Live(console=Console(file=raw_stdout()), refresh_per_second=4) as live:
            yield LiveView(plan, live)
    else:
        yield LineView(plan)


def print_new(view: View, printed: set[str], lines: Sequence[str]) -> set[str]:
    """Print the lines that the previous poll did not have. Return all lines of this poll."""
    for line in lines:
        if line not in printed:
            view.print(line)
    return set(lines)
