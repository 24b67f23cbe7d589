"""A sweep judged workload by workload, so that the steps of one workload are in memory and not those of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from analysis.records.load import Records, load_planned
from analysis.sweep.cell_evidence import CellEvidence, collect_evidence
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import judge_cells
from analysis.sweep.task_agreement import TaskComparison, Trained
from launch.common.text import code_name
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan, read_plan


@dataclass(frozen=True)
class SweepResults:
    """What came of a sweep: a result for each cell of the plan, in its order. Their attempts' steps have been let go."""

    plan: Plan
    results: tuple[CellResult, ...]
    trained: tuple[tuple[Trained, ...], ...]
    """Of each task that more than one eager cell has run, these cells in the plan's order."""


def judge_sweep(sweep: SweepPaths, see: Callable[[Records], None] = lambda records: None) -> SweepResults:
    """Judge ``sweep`` from its records; ``see`` is shown the whole records of each workload before they go. Labels of cells
    come out as every form of the report can show them.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    read, alike = read_plan(sweep), TaskComparison()
    plan = replace(read, cells=tuple(replace(cell, label=code_name(cell.label)) for cell in read.cells))
    evidence: dict[str, CellEvidence] = {}
    for cells in _workloads(plan.cells):
        records = load_planned(sweep, replace(plan, cells=cells))
        see(records)
        found = collect_evidence(records)
        alike.add((one.cell, one.runs) for one in found)
        evidence |= {one.cell.cell_id: one.without_records() for one in found}
    return SweepResults(plan, judge_cells([evidence[cell.cell_id] for cell in plan.cells]), alike.tasks)


def collect_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellEvidence, ...]:
    """Return the evidence of one workload, with all that its attempts wrote."""
    cells = tuple(cell for cell in plan.cells if cell.workload_id == workload_id)
    return collect_evidence(load_planned(sweep, replace(plan, cells=cells)))


def judge_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellResult, ...]:
    """Decide on each cell of one workload by itself."""
    return tuple(judge_cells([cell])[0] for cell in collect_workload(sweep, plan, workload_id))


def _workloads(cells: Iterable[Cell]) -> Iterator[tuple[Cell, ...]]:
    """The cells of each workload, those of one task one after another, else in the plan's order."""
    tasks: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        tasks.setdefault(cell.task_id, {}).setdefault(cell.workload_id, []).append(cell)
    return (tuple(workload) for workloads in tasks.values() for workload in workloads.values())
