"""Test that a plan is rejected if its cells have the specs of others, since the plan sets the margins and the number of
steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells
from tests.records import write_sweep


@pytest.mark.parametrize(("section", "change"), [("training", {"steps": 60}), ("training", {"deterministic": True})])
def test_a_plan_with_another_spec_is_no_evidence(tmp_path: Path, section: str, change: dict[str, Any]) -> None:
    sweep = write_sweep(tmp_path)
    plan = json.loads(sweep.plan.read_text())
    for cell in plan["cells"]:
        cell["spec"][section].update(change)
    sweep.plan.write_text(json.dumps(plan))
    verdict = compare_cells(load(sweep))[1].verdict
    assert verdict is not None and verdict.verdict == "INCOMPARABLE"
    assert "plan.json gives" in verdict.reason
