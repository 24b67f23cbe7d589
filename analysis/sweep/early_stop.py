"""Decide whether a bundle with ``repeats: auto`` may stop: ``python -m analysis.sweep.early_stop BUNDLE_FOLDER``.

The supervisor asks before each further block of repeats. The verdicts are those of the report, from the same records and by the
same code. At each of a fixed number of looks they use an equal share of the error, and do not depend on the sweep's other
cells. They therefore do not change once the bundle stops (docs/speed.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from analysis.records.load import load_planned, without_runs
from analysis.sweep.cell_evidence import collect_evidence
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import judge_cells
from launch.common.atomic_files import write_json
from launch.common.parent_death import die_with_parent
from launch.common.typed_json import read_record
from launch.contract.bundle import BundleOrder, EarlyStop, runs_not_begun
from launch.contract.paths import BundlePaths
from launch.contract.plan import Cell, read_plan


def find_early_stop(bundle: BundlePaths) -> EarlyStop | None:
    """Judge the complete repeats if it is time for a look. Return which runs are not needed, or None.

    Raises:
        FileNotFoundError, RecordError: the plan or the order is missing or damaged.
        StopIteration: the plan does not have the bundle.
    """
    sweep, plan, order = bundle.sweep, read_plan(bundle.sweep), read_record(BundleOrder, bundle.order)
    workload = next(one.workload_id for one in plan.bundles if one.bundle_id == bundle.root.name)
    cells = [cell for cell in plan.cells if cell.workload_id == workload and cell.run_ids]
    repeats = complete_repeats(bundle, order, cells)
    if repeats not in plan.looks[:-1]:
        return None
    later = tuple(run_id for cell in cells for run_id in cell.repeat_ids[repeats:])
    # A cell whose later repeats are not ordered has made them before, and they count.
    waiting = {cell.cell_id for cell in cells if not dict(order.schedule).keys().isdisjoint(cell.repeat_ids[repeats:])}
    unmade = frozenset(run_id for run_id in later if not sweep.run(run_id).attempt_numbers())
    records = load_planned(sweep, without_runs(replace(plan, cells=tuple(cells)), unmade))
    results = judge_cells(collect_evidence(records), plan.judged_cells - sum(cell.graphed for cell in cells))
    waits = [result for result in results if result.cell.cell_id in waiting]
    return EarlyStop(repeats, plan.looks[-1], later) if are_final(waits) else None


def complete_repeats(bundle: BundlePaths, order: BundleOrder, cells: Sequence[Cell]) -> int | None:
    """Return how many repeats of ``cells``, all of one workload, have ended, or None if a later one has begun.

    Of a run that ``order`` begins again, earlier attempts do not count.
    """
    latest = ((run_id, number, bundle.sweep.run(run_id).attempts()[-1:]) for run_id, number in order.schedule)
    begun = {run_id: attempt for run_id, number, found in latest for attempt in found if attempt.number >= number}
    spared = runs_not_begun(bundle, order)
    left = {r for r, _ in order.schedule if not (begun[r].has_ended if r in begun else r in spared)}
    repeats = [set(repeat) for repeat in zip(*(cell.repeat_ids for cell in cells), strict=True)]
    made = next((number for number, repeat in enumerate(repeats) if repeat & left), len(repeats))
    return None if any(repeat & begun.keys() for repeat in repeats[made:]) else made


def are_final(results: Sequence[CellResult]) -> bool:
    """Return whether more repeats of one workload are unlikely to change any verdict.

    This is so if all runs of an eager cell failed by themselves. It is also so if each graphed cell always failed by itself,
    DIVERGED, or passes with a conclusive verdict on its speed.
    """
    eager = [result for result in results if not result.cell.graphed]
    graphed = [result for result in results if result.cell.graphed]
    return bool(graphed) and (any(map(_always_fails, eager)) or all(map(_is_final, graphed)))


def _is_final(result: CellResult) -> bool:
    verdict, speedup = result.verdict, result.speed.speedup
    if result.integrity.unsound_records or result.unfinished:
        return False
    if _always_fails(result) or (verdict and verdict.verdict == "DIVERGED"):
        return True
    return result.passes and speedup is not None and speedup.verdict != "INCONCLUSIVE"


def _always_fails(result: CellResult) -> bool:
    outcomes = [run.attempt.outcome if run.attempt else None for run in result.runs]
    return all(outcome and (outcome.is_own_failure or outcome.repeats_alike) for outcome in outcomes)


def main(folder: str) -> None:
    die_with_parent()
    bundle = BundlePaths(folder)
    if found := find_early_stop(bundle):
        write_json(bundle.early_stop, found)


if __name__ == "__main__":
    main(sys.argv[1])
