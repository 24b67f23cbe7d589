"""Test what a command prints about runs: every run counts once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Limits, Margins, Plan
from orchestrator.output.progress import print_cancelled, print_orders
from orchestrator.submit.slurm_queue import Submitted
from orchestrator.sweeps.run_state import RunState

ENDED = {name: Outcome(name, "measure", "bundle", 0.0, 1.0) for name in ("COMPLETED", "FAILED", "CANCELLED")}
STATES = [
    RunState("planned", "PLANNED", 1),
    RunState("waits", "QUEUED", 1, alive=True),
    RunState("runs", "RUNNING", 2, alive=True),
    RunState("interrupted", "INTERRUPTED", 2),
    RunState("never", "CANCELLED", 1),
    *(RunState(name.lower(), name, 2, outcome=outcome) for name, outcome in ENDED.items()),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("ordered", "said"),
    [
        (
            [],
            "2 already running or waiting, adopted; 2 on disk; left as they are: 2 CANCELLED, 1 INTERRUPTED, 1 PLANNED",
        ),
        (
            ["planned", "waits"],
            "1 run to start; 2 already running or waiting, adopted; 2 on disk; left as they are: 2 ",
        ),
        (
            ["failed", "never"],
            "2 runs to start; 2 already running or waiting, adopted; 1 on disk; left as they are: 1 ",
        ),
        ([state.run_id for state in STATES], "6 runs to start; 2 already running or waiting, adopted\n"),
    ],
)
def test_every_run_counts_once(capsys: pytest.CaptureFixture[str], ordered: list[str], said: str) -> None:
    states = {state.run_id: state for state in STATES}
    order = BundleOrder("b", "w", tuple((run_id, 2) for run_id in ordered), Limits(), slots=1, slot_names=("cpu",))
    print_orders(SweepPaths(Path("none")), states, [order], 0, Submitted())
    line = capsys.readouterr().out
    assert line.startswith(said)
    assert sum(map(int, re.findall(r"\d+", line))) == len(states)


def test_cancelled_runs_stand_beside_the_counts_of_status(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), ())
    print_cancelled(plan, ["never", "of_before"], {state.run_id: state for state in STATES[4:]}, all_runs=True)
    assert capsys.readouterr().out == (
        "cancelled 2 runs of x, 1 of them of earlier plans; finished runs are kept\nx: 2 CANCELLED, 1 COMPLETED, 1 FAILED\n"
    )
