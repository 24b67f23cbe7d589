"""The verdict on the graphed cell of a sweep whose records a test edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.records.load import load
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from analysis.verdict.verdict import Verdict
from launch.contract.paths import SweepPaths
from tests.records import AttemptRecord, Edit, write_sweep


def graphed_result(sweep: SweepPaths) -> CellResult:
    return next(result for result in compare_cells(load(sweep)) if result.cell.graphed)


def for_graphed(change: Edit) -> Edit:
    return lambda run: change(run) if run.spec.graphed else None


def judged(root: Path, edit: Edit, **options: Any) -> CellResult:
    return graphed_result(write_sweep(root, edit=edit, **options))


def verdict_in(sweep: SweepPaths) -> Verdict:
    found = graphed_result(sweep).verdict
    assert found is not None
    return found


def verdict_of(root: Path, edit: Edit, **options: Any) -> Verdict:
    return verdict_in(write_sweep(root, edit=edit, **options))


def shorten(run: AttemptRecord) -> None:
    del run.metrics[100:]


def other_code(run: AttemptRecord) -> None:
    run.environment["digests"]["code"] = "other00000"
