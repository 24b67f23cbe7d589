"""Test that the report shows published figures next to those of the sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.report.report_data import report_data
from analysis.report.sections.published import render
from analysis.sweep.judge_sweep import judge_sweep
from analysis.verdict.verdict import Verdict
from launch.contract.plan import read_plan
from tests.records import write_sweep


def test_figures_of_others_stand_above_those_of_cells_that_may_be_right(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda")
    assert render(report_data(judge_sweep(sweep))) == []
    plan = replace(read_plan(sweep), published={"a guide, | eager": "467 to 520 ms"})
    results = replace(judge_sweep(sweep), plan=plan)
    data = report_data(results)
    eager, sound = data.ran
    head, _, figures = render(data)
    first, *own = figures.splitlines()[2:]
    assert head == "## Published figures" and first == "| a guide, \\| eager | 467 to 520 ms |"
    (own,) = own
    assert own.startswith(f"| this sweep: A1 `{sound.spec.cuda_graph.label}`, eager to graphed (BITWISE, ")
    assert own.endswith(" ms |")
    undecided, diverged = (
        render(replace(data, sweep=replace(data.sweep, results=(eager, replace(sound, verdict=Verdict(word, "why"))))))[
            2
        ]
        for word in ("INCONCLUSIVE", "DIVERGED")
    )
    assert "eager to graphed (INCONCLUSIVE) | " in undecided and "this sweep" not in diverged
