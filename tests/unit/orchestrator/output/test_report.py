"""Test the table of cells that ends a report on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.common.atomic_files import write_json
from launch.contract.paths import SweepPaths
from orchestrator.output.report import print_report


@pytest.mark.parametrize(("verdict", "said"), [("FASTER", "FASTER"), (None, "no verdict")])
def test_a_speed_up_stands_beside_its_verdict_without_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: str | None, said: str
) -> None:
    cell = {"name": "A1", "label": "full_iteration", "impl": "full_iteration", "outcome": "COMPLETED"}
    judged = {"unexpected": False, "verdict": {"verdict": "BITWISE"}, "max_loss_difference": 0.0}
    speed = {"ratio": 1.44, "pairs": 3, "verdict": verdict}
    content = {
        "summary": {"headline": "**Nothing** passes", "notes": ["`A1`"]},
        "total_cells": 1,
        "cells": [cell | judged | {"speed": speed}],
    }
    paths = SweepPaths(tmp_path)
    write_json(paths.report / "summary.json", content)
    print_report(paths)
    text = capsys.readouterr().out
    assert text.startswith("\nNothing passes\n- A1\n")
    assert f"1.44x over 3 pairs, {said}\n" in text
