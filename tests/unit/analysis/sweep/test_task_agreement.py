"""Compare the eager cells of one task: by how much they differ, and that a value that is not finite always shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

from analysis.records.load import load
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.task_agreement import TaskComparison, Trained
from launch.common.atomic_files import read_json, write_json
from tests.records import AttemptRecord, write_sweep
from tests.report_text import report_text


def same_loss_but_for_one_step(run: AttemptRecord) -> None:
    workload = round(run.spec.training.learning_rate / 1e-3) - 1
    for step in run.metrics:
        step["loss"], step["grad_norm"] = 5.0 - step["step"] / 100, 2.0
    if workload == 1:
        run.metrics[40]["loss"] += 0.25
        run.metrics[41]["grad_norm"] = 3.0
    if workload == 2:
        run.metrics[50]["loss"] = math.nan
        del run.metrics[60:]


def as_one_task(result: CellResult) -> CellResult:
    return dataclasses.replace(result, cell=dataclasses.replace(result.cell, task_id="same"))


def trained_alike(results: Iterable[CellResult]) -> tuple[tuple[Trained, ...], ...]:
    alike = TaskComparison()
    alike.add((result.cell, result.runs) for result in results)
    return alike.tasks


def test_differences_are_from_the_first_cell_of_the_task(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3, edit=same_loss_but_for_one_step)
    results = compare_cells(load(sweep))
    assert trained_alike(results) == (), "workloads of different tasks are not put beside each other"
    (task,) = trained_alike(map(as_one_task, results))
    first, second, third = task
    assert (first.loss_difference, first.grad_norm_difference, first.steps) == (0.0, 0.0, 120)
    assert (second.loss_difference, second.loss_step, second.grad_norm_difference) == (0.25, 40, 0.5)
    assert (second.first_loss, second.last_loss) == (5.0, 3.81)
    assert math.isnan(third.loss_difference) and (third.loss_step, third.steps) == (50, 60)


def test_the_step_of_a_difference_is_no_count_of_steps(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=2, edit=same_loss_but_for_one_step)
    plan = read_json(sweep.plan)
    write_json(sweep.plan, plan | {"cells": [cell | {"task_id": "same"} for cell in plan["cells"]]})
    text = report_text(sweep)
    assert "| 5.000000 | 3.810000 | 2.50e-01 at step 40 (120 steps compared) | 0.5 |" in text
