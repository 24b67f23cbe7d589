"""Find the first layer that differs: run a cell once more, with step checks that compare what each layer gives."""

from __future__ import annotations

from dataclasses import replace

from analysis.records.load import load_planned
from analysis.sweep.cell_results import CellResult
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan
from launch.contract.spec import RunSpec
from orchestrator.bisect.failure_status import DIVERGED, cause_unknown, classify_failure, judge_cell
from orchestrator.bisect.layer_answer import LayerAnswer, LayerSearch
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.rules import violations
from orchestrator.targets.slurm_cluster import Target

STEPS_PAST = 2
"""How many steps may be checked after the last step at which a repeat failed."""
MOST_CHECKS = 20
"""A check takes as long as a few steps."""


def start_search(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> LayerSearch:
    """Return the search for the first layer of ``cell`` that differs.

    Raises:
        InputError: the cell captures nothing, is not known to have other results, or cannot run with checks of layers.
    """
    result = judge_cell(sweep, plan, cell)
    status = classify_failure(result)
    if status is None or (status.status, status.failure) != ("fails", DIVERGED):
        fix = "name a run that DIVERGED or ended NUMERIC, or bisect without --layers"
        raise cause_unknown(plan, cell, status, "change its results", fix)
    trial = _with_checks(result, cell.run_spec)
    raise_if_rejected(cell.cell_id, violations(trial) or target.check_spec(trial))
    return LayerSearch(plan, cell, status.description, trial)


def _with_checks(result: CellResult, spec: RunSpec) -> RunSpec:
    """Check steps up to a little past the last failure of a repeat; up to the last step if no single step fails."""
    failed = [pair.verdict for pair in result.pairs if pair.verdict.verdict == DIVERGED]
    last = max(v.deviation.step + STEPS_PAST if v.deviation else spec.training.steps for v in failed)
    # A failure in the capture's own step is sought in the next one.
    steps = min(max(last, spec.first_compared) + 1, spec.training.steps)
    return replace(spec, layer_check_steps=steps, step_checks=min(steps - spec.first_compared, MOST_CHECKS))


def read_answer(sweep: SweepPaths, search: LayerSearch, target: Target) -> LayerAnswer:
    """Return what the records of ``sweep``, the search's own, show."""
    (cell,) = plan_side_sweep(search, [search.trial], target).cells
    ((run,),) = load_planned(sweep, replace(search.plan, cells=(cell,))).runs.values()
    if run.attempt is None or not run.attempt.outcome.is_informative:
        return LayerAnswer(search, (search.trial,))
    return LayerAnswer(search, (), run.attempt)
