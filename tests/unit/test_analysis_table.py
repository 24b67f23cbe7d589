"""steps.parquet: a row a step, nothing rounded, nothing that is not finite lost."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from analysis.report import write_report
from tests.records import AttemptRecord, write_sweep


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
    table = pd.read_parquet(sweep.report / "steps.parquet")
    found = {(run_id, step): loss for run_id, step, loss in zip(table.run_id, table.step, table.loss, strict=True)}
    assert found.keys() == written.keys()
    assert all(found[key] == loss or (math.isnan(found[key]) and math.isnan(loss)) for key, loss in written.items())
    assert set(table.loc[table.graphed, "phase"]) == {"warmup", "capture", "settle", "measure"}


def test_a_sweep_of_which_nothing_ran_has_an_empty_table(tmp_path: Path) -> None:
    def never(run: AttemptRecord) -> None:
        run.begun = False

    sweep = write_sweep(tmp_path, edit=never)
    write_report(sweep)
    assert len(pd.read_parquet(sweep.report / "steps.parquet")) == 0
