"""Test that a plan is rejected if its cells have the specs of others, since the plan sets the margins and the number of
steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.load import load
from launch.common.atomic_files import RecordError
from tests.records import write_sweep


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("training", {"steps": 60}),
        ("training", {"deterministic": True}),
        ("model", {"vocab_size": []}),
        ("", {"step_checks": "2"}),
    ],
)
def test_a_plan_with_another_spec_is_no_evidence(tmp_path: Path, section: str, change: dict[str, Any]) -> None:
    sweep = write_sweep(tmp_path)
    plan = json.loads(sweep.plan.read_text())
    for cell in plan["cells"]:
        (cell["spec"][section] if section else cell["spec"]).update(change)
    sweep.plan.write_text(json.dumps(plan))
    with pytest.raises(RecordError, match=f"{sweep.plan}: cell .* has the spec of .*; run the sweep again to write"):
        load(sweep)
