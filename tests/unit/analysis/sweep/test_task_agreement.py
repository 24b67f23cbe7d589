"""Put the losses of the eager cells of one task side by side."""

from __future__ import annotations

import math
from pathlib import Path

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.task_agreement import trained_cells
from launch.common.atomic_files import read_json, write_json
from launch.contract.paths import SweepPaths
from tests.records import AttemptRecord, write_sweep
from tests.report_text import report_text


def same_losses_but_for_one_step(run: AttemptRecord) -> None:
    workload = round(run.spec.training.learning_rate / 1e-3) - 1
    for step in run.metrics:
        step["loss"] = 5.0 - step["step"] / 100
    if workload == 1:
        run.metrics[40]["loss"] += 1.2
    if workload == 2:
        run.metrics[-1]["loss"] = math.nan


def as_one_task(sweep: SweepPaths) -> SweepPaths:
    plan = read_json(sweep.plan)
    write_json(sweep.plan, plan | {"cells": [cell | {"task_id": "same"} for cell in plan["cells"]]})
    return sweep


def test_eager_cells_of_one_task_are_put_beside_each_other(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3, edit=same_losses_but_for_one_step)
    assert trained_cells(compare_cells(load(sweep))) == (), "workloads of different tasks are not"
    ((first, second, third),) = trained_cells(compare_cells(load(as_one_task(sweep))))
    assert (first.first_loss, first.last_loss, first.steps) == (5.0, 3.81, 120)
    assert math.isclose(second.mean_loss, first.mean_loss + 0.01)
    assert math.isnan(third.last_loss) and math.isnan(third.mean_loss)


def test_the_report_shows_their_losses(tmp_path: Path) -> None:
    text = report_text(as_one_task(write_sweep(tmp_path, workloads=2, edit=same_losses_but_for_one_step)))
    assert "| 5.000000 | 3.810000 | 4.405000 | 120 |" in text and "| 5.000000 | 3.810000 | 4.415000 | 120 |" in text
