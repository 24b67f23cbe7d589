"""Test that the report shows published figures next to those of the sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.report.report_data import report_data
from analysis.report.sections.published import render
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.plan import read_plan
from tests.records import write_sweep


def test_figures_of_others_stand_above_those_of_passing_cells(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda")
    assert render(report_data(judge_sweep(sweep))) == []
    plan = replace(read_plan(sweep), published={"a guide, | eager": "467 to 520 ms"})
    results = replace(judge_sweep(sweep), plan=plan)
    head, _, figures = render(report_data(results))
    first, *own = figures.splitlines()[2:]
    assert head == "## Published figures" and first == "| a guide, \\| eager | 467 to 520 ms |"
    assert (
        own[0].startswith("| this sweep: A1, eager | ") and "graphed (BITWISE, " in own[1] and own[1].endswith(" ms |")
    )
