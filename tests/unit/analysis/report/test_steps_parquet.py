"""Test steps.parquet: it has one row per step, rounds nothing, and keeps values that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pyarrow import parquet

from analysis.report.write_report import write_report
from tests.records import AttemptRecord, unbegun, write_sweep


def nan_at_last(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[-1]["loss"] = float("nan")


def test_every_step_of_every_run_is_a_row(tmp_path: Path) -> None:
    written: dict[tuple[str, int], float] = {}

    def edit(run: AttemptRecord) -> None:
        nan_at_last(run)
        written.update({(run.spec.run_id, step["step"]): step["loss"] for step in run.metrics})

    sweep = write_sweep(tmp_path, steps=20, edit=edit)
    write_report(sweep)
    rows = parquet.read_table(sweep.report / "steps.parquet").to_pylist()
    found = {(row["run_id"], row["step"]): row["loss"] for row in rows}
    assert found.keys() == written.keys()
    assert all(found[key] == loss or (math.isnan(found[key]) and math.isnan(loss)) for key, loss in written.items())
    assert {row["phase"] for row in rows if row["graphed"]} == {"warmup", "capture", "settle", "measure"}


def test_row_groups_are_written_as_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = write_sweep(tmp_path, workloads=3, steps=20)
    write_report(sweep)
    whole = parquet.read_table(sweep.report / "steps.parquet")
    monkeypatch.setattr("analysis.report.steps_parquet.ROWS", 100)
    write_report(sweep)
    file = parquet.ParquetFile(sweep.report / "steps.parquet")
    assert file.num_row_groups == 2, "of 80 rows a workload, two workloads fill one"
    assert file.read().to_pylist() == whole.to_pylist()


def test_a_sweep_of_which_nothing_ran_has_an_empty_table(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, edit=unbegun)
    write_report(sweep)
    assert parquet.read_table(sweep.report / "steps.parquet").num_rows == 0
