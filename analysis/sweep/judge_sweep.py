"""Judge a sweep one workload at a time, so that memory holds only the steps of one workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from analysis.records.load import Records, load_planned, read_made
from analysis.sweep.cell_evidence import CellEvidence, collect_evidence
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import judge_cells
from analysis.sweep.task_agreement import TaskComparison, Trained
from launch.common.text import code_name
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan


@dataclass(frozen=True)
class SweepResults:
    """The results of a sweep, one for each cell, in the plan's order. Their attempts no longer contain steps."""

    plan: Plan
    results: tuple[CellResult, ...]
    trained: tuple[tuple[Trained, ...], ...]
    """For each task with more than one eager cell that ran, these eager cells."""


def judge_sweep(sweep: SweepPaths, see: Callable[[Records], None] = lambda records: None) -> SweepResults:
    """Judge ``sweep`` from its records. Call ``see`` with the records of each workload before their steps are dropped.

    Cell labels in the results are safe for every format of the report.

    Raises:
        FileNotFoundError: the folder has no plan.
        RecordError: the plan is damaged, or of another version.
    """
    recorded, tasks = read_made(sweep), TaskComparison()
    plan = replace(recorded, cells=tuple(replace(cell, label=code_name(cell.label)) for cell in recorded.cells))
    evidence: dict[str, CellEvidence] = {}
    for cells in _workloads(plan.cells):
        records = load_planned(sweep, replace(plan, cells=cells))
        see(records)
        collected = collect_evidence(records)
        tasks.add((one.result.cell, one.result.runs) for one in collected)
        evidence |= {one.result.cell.cell_id: one.without_records() for one in collected}
    return SweepResults(plan, judge_cells([evidence[cell.cell_id] for cell in plan.cells]), tasks.tasks)


def collect_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellEvidence, ...]:
    """Return the evidence of each cell of one workload, with all records of its attempts."""
    cells = tuple(cell for cell in plan.cells if cell.workload_id == workload_id)
    return collect_evidence(load_planned(sweep, replace(plan, cells=cells)))


def judge_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellResult, ...]:
    """Judge each cell of one workload on its own, without correction for multiple tests."""
    return tuple(judge_cells([cell])[0] for cell in collect_workload(sweep, plan, workload_id))


def _workloads(cells: Iterable[Cell]) -> Iterator[tuple[Cell, ...]]:
    """Group cells by workload, in the plan's order. Workloads of one task follow each other."""
    tasks: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        tasks.setdefault(cell.task_id, {}).setdefault(cell.workload_id, []).append(cell)
    return (tuple(workload) for workloads in tasks.values() for workload in workloads.values())
