"""Test the view of a watched sweep: the estimated time left, names without markup, and each new line once."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from launch.contract.paths import SweepPaths
from launch.contract.plan import read_plan
from orchestrator.output.progress_view import LineView, LiveView, Progress, print_new
from orchestrator.output.states import describe_slots
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slot_holders import SlotHolder
from tests.records import write_sweep

STEPS = 10


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_time_left_uses_the_pace_of_the_runs_without_the_time_in_the_queue(tmp_path: Path) -> None:
    cells = read_plan(write_sweep(tmp_path, steps=STEPS)).cell_of_run()
    first, *others = cells
    clock = Clock()
    progress = Progress(cells, clock)

    def told(seconds: float, name: str, steps: int) -> str:
        """Return the view after ``seconds``. The first of the four runs has a state, and the others wait."""
        clock.seconds = seconds
        states = {run_id: RunState(run_id, "QUEUED", 1) for run_id in others}
        return progress.update({first: RunState(first, name, 1, alive=True, steps_done=steps), **states})[1]  # type: ignore[arg-type]

    assert len(cells) == 4
    assert told(0, "QUEUED", 0) == "estimating the time left"
    assert told(3600, "QUEUED", 0) == "estimating the time left"
    assert told(3601, "RUNNING", 0) == "estimating the time left"
    assert told(3611, "RUNNING", 5) == "about 70 s left"
    assert told(3615, "QUEUED", 7) == "about 66 s left"
    assert told(7200, "QUEUED", 7) == "about 66 s left", "it was requeued: nothing runs"


def test_a_line_says_why_a_run_is_skipped_and_that_none_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(write_sweep(tmp_path))
    run_ids = list(plan.cell_of_run())
    LineView(plan).update({run_id: RunState(run_id, "SKIPPED", 1, why_unbegun="not tried: x") for run_id in run_ids})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(run_ids)
    assert all(line.startswith("[100%, no run left] SKIPPED ") and line.endswith(": not tried: x") for line in lines)


def test_a_live_table_shows_names_as_they_are(tmp_path: Path) -> None:
    plan = read_plan(write_sweep(tmp_path, steps=STEPS))
    cells = tuple(replace(cell, label="[/red]\x1b[2J") for cell in plan.cells)
    shown = io.StringIO()
    with Live(console=Console(file=shown, width=200), auto_refresh=False) as live:
        view = LiveView(replace(plan, cells=cells), live)
        view.update({run_id: RunState(run_id, "QUEUED", 1) for run_id in plan.cell_of_run()})
        view.print("[/bold]\x1b[2J")
    assert "[/red]\\x1b[2J" in shown.getvalue() and "[/bold]\\x1b[2J" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


def test_the_holder_of_a_slot_is_named_once_however_many_runs_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view, printed = LineView(read_plan(write_sweep(tmp_path))), set[str]()
    for run_id, pid in (("first", 1), ("", 1), ("second", 1), ("third", 2)):
        held = SlotHolder("cpu", SweepPaths(tmp_path / "other"), run_id, pid, since=0.0)
        printed = print_new(view, printed, describe_slots([held]))
    assert [line.partition("(")[2][:9] for line in capsys.readouterr().out.splitlines()] == ["process 1", "process 2"]
