"""Test that runs before and after an edit of an imported module are not compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records.load import load
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from launch.contract.spec import RunSpec
from tests.records import AttemptRecord, Edit, unchanged, write_sweep

Version = Callable[[RunSpec], tuple[str, str]]
"""The digests of path and content of a run's module."""


def compared(
    root: Path, version: Version, imported: Callable[[RunSpec], bool] = lambda spec: True, change: Edit = unchanged
) -> CellResult:
    def edit(run: AttemptRecord) -> None:
        change(run)
        path, content = version(run.spec)
        modules = {"layers": {"path": "1", "content": "1"}}
        if imported(run.spec):
            modules["helper"] = {"path": path, "content": content}
        first = run.events[0][0]
        run.events[0].insert(1, {**first, "kind": "imports", "modules": modules})

    return compare_cells(load(write_sweep(root, edit=edit)))[1]


def edited(spec: RunSpec) -> tuple[str, str]:
    """Return the version of a module that changed before the last graphed run."""
    return "2", "new" if spec.graphed and spec.repeat == 1 else "old"


def test_an_edit_between_the_runs_of_a_pair_makes_it_incomparable(tmp_path: Path) -> None:
    verdict = compared(tmp_path, edited).verdict
    assert verdict and verdict.verdict == "INCOMPARABLE"
    assert "code.imports.helper: old (eager), new (graphed)" in verdict.reason
    assert "layers" not in verdict.reason


def test_repeats_before_and_after_an_edit_are_not_judged_together(tmp_path: Path) -> None:
    def rounded(run: AttemptRecord) -> None:
        for step in run.metrics[4:] if run.spec.graphed else ():
            step["loss"] += 1e-5

    result = compared(tmp_path, lambda spec: ("2", f"version {spec.repeat}"), change=rounded)
    assert [pair.verdict.evidence.eager_runs for pair in result.pairs if pair.verdict.evidence] == [1, 1]
    assert result.verdict and result.verdict.verdict == "INCONCLUSIVE"
    assert "eager repeat 1 ran with other code, libraries or data (code.imports.helper)" in result.verdict.reason
    assert result.verdict.fix.startswith("run all repeats with the same code")


@pytest.mark.parametrize(
    ("version", "imported"),
    [
        (lambda spec: ("2", "old"), lambda spec: True),
        (lambda spec: ("2", "old"), lambda spec: spec.graphed),
        (lambda spec: (str(spec.graphed), str(spec.graphed)), lambda spec: True),
    ],
    ids=["unchanged", "of one side", "two files of one name"],
)
def test_modules_without_an_edit_may_be_compared(
    tmp_path: Path, version: Version, imported: Callable[[RunSpec], bool]
) -> None:
    result = compared(tmp_path, version, imported)
    assert result.verdict and result.verdict.verdict == "BITWISE"
    assert all("imports" not in run.attempt.environment["code"] for run in result.runs if run.attempt)


def test_a_damaged_record_of_imports_is_named(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        run.events[0].insert(1, {**run.events[0][0], "kind": "imports", "modules": {"helper": "1"}})

    verdict = compare_cells(load(write_sweep(tmp_path, edit=edit)))[1].verdict
    assert verdict and verdict.verdict == "INCOMPARABLE" and "imports of rank 0 cannot be read" in verdict.reason
