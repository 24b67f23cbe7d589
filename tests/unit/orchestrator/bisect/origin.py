"""Write the sweep that a bisection begins from, and the records of the bisection's runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from launch.common.atomic_files import write_json
from launch.contract.outcomes import Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Margins, Plan, PlannedBundle
from launch.contract.spec import CudaGraph, RunSpec, spec_from_json
from tests.records import STARTED, Edit, attempt_record, write_attempt, written_cell

ORIGIN = "origin"


def ended(outcome: Any, phase: Any) -> Outcome:
    return Outcome(outcome, phase, "bundle000", STARTED, STARTED + 9, 0, outcome, "said so", "r")


def written(root: Path, spec: RunSpec, edit: Edit, repeats: int = 2) -> tuple[SweepPaths, Plan, Cell]:
    """Write a sweep of ``spec`` and its eager baseline. Return the cell of ``spec``."""
    sweep = SweepPaths(root / ORIGIN)
    eager = dataclasses.replace(spec, cuda_graph=CudaGraph(warmup_steps=spec.cuda_graph.warmup_steps))
    cells = tuple(written_cell(one, repeats) for one in (eager, spec))
    run_ids = tuple(cell.run_ids[repeat] for repeat in range(repeats) for cell in cells)
    bundle = PlannedBundle("bundle000", spec.workload_id, run_ids)
    plan = Plan(ORIGIN, f"name: {ORIGIN}\n", "origin.yaml", Margins(), cells, (bundle,))
    write_json(sweep.plan, plan)
    make_runs(sweep, plan, edit)
    return sweep, plan, cells[1]


def make_runs(sweep: SweepPaths, plan: Plan, edit: Edit) -> list[str]:
    """Write records in place of runs. Return the runs that had none, in order."""
    made = []
    for run_id, cell in plan.cell_of_run().items():
        if not sweep.run(run_id).attempt(1).root.exists():
            record = attempt_record(spec_from_json(cell.spec_of(cell.run_ids.index(run_id))))
            edit(record)
            write_attempt(sweep, record)
            made.append(run_id)
    return made
