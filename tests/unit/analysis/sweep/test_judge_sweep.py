"""Test that judging a sweep workload by workload gives the same results as all at once, and keeps no attempt's steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.load import Records, load
from analysis.sweep.cell_evidence import collect_evidence
from analysis.sweep.judge_cells import judge_cells
from analysis.sweep.judge_sweep import judge_sweep, judge_workload
from tests.records import write_sweep


def test_results_are_those_of_all_at_once_without_their_steps(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3)
    seen: list[Records] = []
    judged, whole = judge_sweep(sweep, seen.append), collect_evidence(load(sweep))
    assert judged.results == judge_cells([cell.without_records() for cell in whole])
    assert [len(records.runs) for records in seen] == [2, 2, 2]
    for run in (run for result in judged.results for run in result.runs):
        assert run.attempt is not None
        with pytest.raises(AttributeError, match="EndedAttempt"):
            _ = run.attempt.steps


def test_one_workload_is_loaded_again_with_its_steps(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3, steps=20)
    plan = load(sweep).plan
    found = judge_workload(sweep, plan, plan.cells[2].workload_id)
    assert [result.cell for result in found] == list(plan.cells[2:4])
    assert all(len(run.attempt.steps) == 20 for result in found for run in result.runs if run.attempt)
