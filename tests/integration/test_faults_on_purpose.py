"""Test that faults which a recipe requests occur in real runs, that each is named correctly, and that the next run is
complete."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from launch.contract.records.events import read_events
from tests.gallery import CLASS_OF
from tests.integration.host import Host, recipe
from tests.records import read_metrics

STEP = 8
ENDS: list[dict[str, Any]] = [
    {"fault.kind": "exception", "expect": {"outcome": "FAILED", "phase": "measure"}},
    {"fault.kind": "nan", "expect": {"outcome": "NUMERIC", "phase": "measure"}},
    {"fault.kind": "segfault", "expect": {"outcome": "FAILED", "phase": "measure"}},
    {"fault.kind": "host_kill", "expect": {"outcome": "FAILED", "phase": "measure"}},
]
HANGS = [{"fault.kind": "hang", "resources.hang_minutes": 1.0, "expect": {"outcome": "HANG", "phase": "measure"}}]
WHOLE = {"fault.kind": "none"}
SAYS = {
    "hang": "launch/train/fault_injection.py",  # The stack of the hanging rank contains it.
    "segfault": "Fatal Python error: Segmentation fault",
}


@pytest.mark.parametrize(
    "points", [ENDS, pytest.param(HANGS, marks=pytest.mark.slow)], ids=["ends at once", "hangs for a minute"]
)
def test_each_fault_ends_its_run_as_what_it_is_and_no_other(host: Host, points: list[dict[str, Any]]) -> None:
    content = recipe("gallery", steps=12, sweep={"points": [*points, WHOLE]}, fault={"step": STEP})
    done = host.run("sweep", host.write(content), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr  # Each run ended as expected.
    assert re.search(rf"\b{len(points)} cells? failed as expected", done.stdout), done.stdout
    *failed, whole = host.run_ids("gallery")
    for run_id, point in zip(failed, points, strict=True):
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
        assert SAYS.get(kind, "") in attempt.log(0).read_text()
    assert host.outcome("gallery", whole).outcome == "COMPLETED"
    assert not any("purpose" in str(event) for event in read_events(host.sweep("gallery").run(whole).attempt(1), 0))

    host.wait_for_nobody()
