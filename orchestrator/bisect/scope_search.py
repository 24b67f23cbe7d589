"""Find the smallest captured set that fails. Run smaller sets in rounds, in a separate sweep.

That sweep holds the whole state of the search, so the same command continues from what is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.sweep.cell_evidence import CellEvidence
from analysis.sweep.judge_cells import judge_cells
from analysis.sweep.judge_sweep import collect_workload
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan, Reason
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator import PROGRAM
from orchestrator.bisect.failure_status import NO_OUTCOME, FailureStatus, cause_unknown, classify_failure, judge_cell
from orchestrator.bisect.scope_answer import ScopeFindings, ScopeSearch, scope_answer
from orchestrator.bisect.scope_candidates import Conclusion, list_candidates, next_scopes
from orchestrator.bisect.search import Answer
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.errors import input_error
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.rules import refusals
from orchestrator.sweeps.find_run import find_by_run_id
from orchestrator.targets.slurm_cluster import Target


def find_cell(plan: Plan, prefix: str) -> Cell:
    """Return the cell of the run with this id or with a unique prefix of it.

    Raises:
        InputError: no cell matches, or several do.
    """
    cells = plan.cell_of_run()
    cell_id = find_by_run_id(((run_id, cell.cell_id) for run_id, cell in cells.items()), prefix, repr(plan.name))
    return next(cell for cell in plan.cells if cell.cell_id == cell_id)


def start_search(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> ScopeSearch:
    """Return the search for the smallest set of ``cell`` that fails.

    Raises:
        InputError: the cell captures nothing, does not fail or fails without graphs too, or no smaller set can be tried.
    """
    status = classify_failure(judge_cell(sweep, plan, cell))
    whole = cell.run_spec
    candidates, left_out = _try_on_target(whole, target)
    if len(candidates) < 2:
        description = status.description if status else NO_OUTCOME
        message = f"there is no smaller set to try: {_explain_no_candidates(whole, left_out)} (its runs: {description})"
        raise input_error(cell.cell_id, message, f"{PROGRAM} advise RECIPE lists implementations that capture parts")  # fmt: skip
    if status is None or status.status != "fails":
        fix = "name a run that DIVERGED or failed although its eager baseline did not"
        raise cause_unknown(plan, cell, status, "cause its failure", fix)
    raise_if_rejected(cell.cell_id, keep_sound_fixes(whole, left_out.get(whole.cuda_graph, ())))
    return ScopeSearch(plan, cell, status.description, status.failure, candidates, left_out)


def _try_on_target(whole: RunSpec, target: Target) -> tuple[tuple[RunSpec, ...], dict[CudaGraph, tuple[Reason, ...]]]:
    """Return the sets that ``target`` can run, always including the whole set, and why each other set is rejected."""
    candidates = list_candidates(whole)
    rejected = {
        spec.cuda_graph: reasons for spec in candidates if (reasons := refusals(spec) or target.check_spec(spec))
    }
    return tuple(one for one in candidates if one.cuda_graph not in rejected or one == whole), rejected


def _explain_no_candidates(whole: RunSpec, left_out: Mapping[CudaGraph, tuple[Reason, ...]]) -> str:
    graph = whole.cuda_graph
    reasons = {reason.rule: reason.message for other, found in left_out.items() if other != graph for reason in found}
    if reasons:
        return "; ".join(f"[{rule}] {message}" for rule, message in reasons.items())
    if not graph.implementation.takes_scope:
        return f"cuda_graph.impl={graph.impl} takes no scope"
    return f"no scope captures less than {graph.label}"


def read_answer(sweep: SweepPaths, search: ScopeSearch, target: Target) -> Answer:
    """Return what the records of the search's own ``sweep`` show."""
    statuses = _read_statuses(sweep, search, target)
    step = next_scopes(search.candidates, {graph: status.status for graph, status in statuses.items()})
    missing, conclusion = ((), step) if isinstance(step, Conclusion) else (step, Conclusion())
    return scope_answer(ScopeFindings(search, statuses, conclusion), missing)


def _read_statuses(sweep: SweepPaths, search: ScopeSearch, target: Target) -> dict[CudaGraph, FailureStatus]:
    """Return the status of each set on disk. Judge all as one family, as the report of ``sweep`` does."""
    results = judge_cells([_collect_evidence(sweep, search, one, target) for one in search.candidates])
    statuses = {result.spec.cuda_graph: classify_failure(result, search.sought) for result in results}
    return {graph: status for graph, status in statuses.items() if status is not None}


def _collect_evidence(sweep: SweepPaths, search: ScopeSearch, spec: RunSpec, target: Target) -> CellEvidence:
    plan = plan_side_sweep(search, [spec], target)
    graphed = plan.cells[-1]
    found = collect_workload(sweep, plan, graphed.workload_id)
    return next(cell for cell in found if cell.result.cell.cell_id == graphed.cell_id)
