"""Judge a sweep one workload at a time, so that memory holds only the steps of one workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from analysis.records.load import Records, load_planned, read_made
from analysis.sweep.cell_evidence import CellEvidence, collect_evidence
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import judge_cells
from launch.common.text import code_name
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan


@dataclass(frozen=True)
class SweepResults:
    """The results of a sweep, one for each cell, in the plan's order. Their attempts no longer contain steps."""

    plan: Plan
    results: tuple[CellResult, ...]


def judge_sweep(sweep: SweepPaths, see: Callable[[Records], None] = lambda records: None) -> SweepResults:
    """Judge ``sweep`` from its records. Call ``see`` with the records of each workload before their steps are dropped.

    Cell labels in the results are safe for every format of the report.

    Raises:
        FileNotFoundError: the folder has no plan.
        RecordError: the plan is damaged, or of another version.
    """
    recorded = read_made(sweep)
    plan = replace(recorded, cells=tuple(replace(cell, label=code_name(cell.label)) for cell in recorded.cells))
    evidence: dict[str, CellEvidence] = {}
    for workload_id in dict.fromkeys(cell.workload_id for cell in plan.cells):
        records = load_planned(sweep, _of_workload(plan, workload_id))
        see(records)
        collected = collect_evidence(records)
        evidence |= {one.result.cell.cell_id: one.without_records() for one in collected}
    return SweepResults(plan, judge_cells([evidence[cell.cell_id] for cell in plan.cells]))


def collect_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellEvidence, ...]:
    """Return the evidence of each cell of one workload, with all records of its attempts."""
    return collect_evidence(load_planned(sweep, _of_workload(plan, workload_id)))


def judge_workload(sweep: SweepPaths, plan: Plan, workload_id: str) -> tuple[CellResult, ...]:
    """Judge each cell of one workload on its own, without correction for multiple tests."""
    return tuple(judge_cells([cell])[0] for cell in collect_workload(sweep, plan, workload_id))


def _of_workload(plan: Plan, workload_id: str) -> Plan:
    return replace(plan, cells=tuple(cell for cell in plan.cells if cell.workload_id == workload_id))
