"""Why a set of captured parts fails: smaller sets are run in a sweep of their own beside its eager twin, by rounds, until
the smallest one that fails is known (orchestrator/bisect/scope_candidates.py decides).

That sweep is all there is to remember: asked again, ``bisect`` goes on with what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from analysis.sweep.cell_evidence import CellEvidence
from analysis.sweep.judge_cells import judge_cells
from analysis.sweep.judge_sweep import collect_workload, judge_workload
from launch.common.atomic_files import dumps, write_text
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan, Reason
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator.bisect.failure_status import FailureStatus, classify_failure, find_result
from orchestrator.bisect.scope_answer import ScopeAnswer, ScopeSearch, answer_to_json
from orchestrator.bisect.scope_candidates import Candidate, Conclusion, candidates_of, next_scopes
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.errors import input_error
from orchestrator.rules import violations
from orchestrator.sweeps.report_process import write_report
from orchestrator.sweeps.run_ids import find_by_run_id
from orchestrator.sweeps.store import report_disk_errors
from orchestrator.targets.slurm_cluster import Target


def cell_named(plan: Plan, wanted: str) -> Cell:
    """Return the cell whose runs have this id, or this prefix of it.

    Raises:
        InputError: no cell matches, or several do.
    """
    cells = plan.cell_of_run()
    cell_id = find_by_run_id(((run_id, cell.cell_id) for run_id, cell in cells.items()), wanted, repr(plan.name))
    return next(cell for cell in plan.cells if cell.cell_id == cell_id)


def search_of(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> ScopeSearch:
    """What to try for ``cell`` of ``plan``.

    Raises:
        InputError: it captures nothing, does not fail, fails without graphs too, or there is no smaller set to try.
    """
    if not cell.graphed:
        raise input_error(
            cell.cell_id, "is eager: it captures nothing that could be made smaller", "name a run of a graphed cell"
        )
    result = find_result(judge_workload(sweep, plan, cell.workload_id), cell.cell_id)
    stand = classify_failure(result)
    words = stand.words if stand else "a run has no outcome yet"
    candidates, left_out = _that_run(cell.run_spec, target)
    if len(candidates) < 2:
        raise input_error(cell.cell_id, f"there is no smaller set to try: {_why_none(cell.run_spec, left_out)} (its runs: {words})",
                    "other implementations capture parts: python -m orchestrator advise RECIPE lists what can be swept")  # fmt: skip
    if stand is None:
        raise input_error(
            cell.cell_id, f"is not known to fail for its graphs: {words}", f"resume {plan.name}, then bisect"
        )
    if stand.status != "fails":
        raise input_error(cell.cell_id, f"is not known to fail for its graphs: {words}", "name a run that DIVERGED or failed, whose eager twin did neither")  # fmt: skip
    if cell.run_spec.cuda_graph in left_out:
        reason = left_out[cell.run_spec.cuda_graph][0]
        raise input_error(f"{cell.cell_id} [{reason.rule}]", reason.message, reason.remedy)
    return ScopeSearch(plan, cell, words, stand.failure, candidates, left_out)


def _that_run(whole: RunSpec, target: Target) -> tuple[tuple[Candidate, ...], dict[CudaGraph, tuple[Reason, ...]]]:
    """The sets that can be tried on ``target``, the whole whatever is said of it, and the reasons against the others."""
    found = candidates_of(whole)
    specs = {one.graph: replace(whole, cuda_graph=one.graph) for one in found}
    refused = {
        graph: reasons for graph, spec in specs.items() if (reasons := violations(spec) or target.check_spec(spec))
    }
    return tuple(one for one in found if one.graph not in refused or one.graph == whole.cuda_graph), refused


def _why_none(whole: RunSpec, left_out: Mapping[CudaGraph, tuple[Reason, ...]]) -> str:
    reasons = {reason.rule: reason.message for graph, found in left_out.items() if graph != whole.cuda_graph for reason in found}  # fmt: skip
    if reasons:
        return "; ".join(f"[{rule}] {message}" for rule, message in reasons.items())
    if not whole.cuda_graph.implementation.takes_scope:
        return f"cuda_graph.impl={whole.cuda_graph.impl} takes no scope"
    return f"no scope captures less than {whole.cuda_graph.label}"


# --- what is run ----------------------------------------------------------------------------------------------------


def stands(sweep: SweepPaths, search: ScopeSearch, target: Target) -> dict[CudaGraph, FailureStatus]:
    """How the sets stand that have been tried, by what is on disk; ``sweep`` is the search's own. Their verdicts count as
    one family, as in its report."""
    results = judge_cells([_evidence_of(sweep, search, one, target) for one in search.candidates])
    found = {result.spec.cuda_graph: classify_failure(result, search.sought) for result in results}
    return {graph: stand for graph, stand in found.items() if stand is not None}


def _evidence_of(sweep: SweepPaths, search: ScopeSearch, one: Candidate, target: Target) -> CellEvidence:
    plan = plan_round(search, [one], target)
    graphed = plan.cells[-1]
    found = collect_workload(sweep, plan, graphed.workload_id)
    return next(cell for cell in found if cell.cell.cell_id == graphed.cell_id)


def plan_round(search: ScopeSearch, sets: Sequence[Candidate], target: Target) -> Plan:
    """The sweep that runs ``sets`` and their eager twin. The same sets give the same plan, in whatever round."""
    whole = search.cell.run_spec
    eager = CudaGraph("none", (), whole.cuda_graph.warmup_steps)
    specs = [replace(whole, cuda_graph=graph) for graph in (eager, *(one.graph for one in sets))]
    return plan_side_sweep(search.name, search.plan, search.cell, specs, "smaller sets", target)


def bisect(sweep: SweepPaths, search: ScopeSearch, target: Target, make: Callable[[Plan], None]) -> ScopeAnswer:
    """Rounds of ``make``, which has the runs of a plan made, until the answer is known or runs were lost.

    Raises:
        InputError: a round cannot run on ``target``.
    """
    before: tuple[Candidate, ...] = ()
    while True:
        found = stands(sweep, search, target)
        step = next_scopes(search.candidates, {graph: stand.status for graph, stand in found.items()})
        if isinstance(step, Conclusion):
            return ScopeAnswer(search, found, step)
        if step == before:
            return ScopeAnswer(search, found, None)
        before = step
        plan = plan_round(search, step, target)
        raise_if_rejected(plan)
        make(plan)


def write_answer(sweep: SweepPaths, answer: ScopeAnswer) -> Path:
    """Write the report of the search's own sweep, and beside it bisect.md, which is returned, and bisect.json."""
    path = sweep.report / "bisect.md"
    write_report(sweep)
    with report_disk_errors(sweep):
        write_text(path, answer.text)
        write_text(path.with_suffix(".json"), dumps(answer_to_json(answer), indent=1) + "\n")
    return path
