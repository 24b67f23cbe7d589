"""Faults that a recipe asks for come about in real runs, and each is told for what it is; the run behind them is whole."""

from __future__ import annotations

import math
from typing import Any

from launch.contract.records.events import read_events
from tests.gallery import CLASS_OF
from tests.integration.host import Host, recipe
from tests.records import read_metrics

STEP = 8
POINTS: list[dict[str, Any]] = [
    {"fault.kind": "exception", "expect": {"outcome": "FAILED", "phase": "measure"}},
    {"fault.kind": "nan", "expect": {"outcome": "NUMERIC", "phase": "measure"}},
    {"fault.kind": "segfault", "expect": {"outcome": "FAILED", "phase": "measure"}},
    {"fault.kind": "host_kill", "expect": {"outcome": "FAILED", "phase": "measure"}},
    {"fault.kind": "hang", "resources.hang_minutes": 1.0, "expect": {"outcome": "HANG", "phase": "measure"}},
    {"fault.kind": "none"},
]


def test_each_fault_ends_its_run_as_what_it_is_and_no_other(host: Host) -> None:
    content = recipe("gallery", steps=12, sweep={"points": POINTS}, fault={"step": STEP})
    done = host.run("sweep", host.write(content), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr  # each as expected
    assert "5 cells failed as expected" in done.stdout
    *failed, whole = host.run_ids("gallery")
    for run_id, point in zip(failed, POINTS, strict=False):
        kind = point["fault.kind"]
        outcome, attempt = host.outcome("gallery", run_id), host.sweep("gallery").run(run_id).attempt(1)
        assert (outcome.outcome, outcome.phase) == (point["expect"]["outcome"], "measure"), outcome
        assert outcome.failure_class == CLASS_OF[kind] and outcome.remedy
        assert outcome.rank == (None if kind == "hang" else 0)
        notes = [event["message"] for event in read_events(attempt, 0) if event["kind"] == "note"]
        assert any(f"fault.kind={kind}, fault.step={STEP}" in note for note in notes)
        steps = list(read_metrics(attempt))
        assert [step.step for step in steps] == list(range(STEP + 1 if kind == "nan" else STEP - 1))
        assert all(math.isfinite(step.loss) for step in steps[:STEP])
    assert host.outcome("gallery", whole).outcome == "COMPLETED"
    assert not any("purpose" in str(event) for event in read_events(host.sweep("gallery").run(whole).attempt(1), 0))

    hang, segfault = (host.sweep("gallery").run(failed[index]).attempt(1).log(0).read_text() for index in (4, 2))
    assert "launch/train/fault_injection.py" in hang, "a stack of the rank that hung"
    assert "Fatal Python error: Segmentation fault" in segfault
    host.wait_for_nobody()
