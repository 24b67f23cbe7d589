"""Find the first layer that differs: run a cell and its eager baseline again, with digests of every layer's results.

The first trial is in deterministic mode, where eager runs agree bit for bit and only graphs can make a difference. If the
failure does not occur there, the second trial runs the cell as it was.
"""

from __future__ import annotations

from dataclasses import replace

from analysis.graphs.layer_divergence import DivergenceLocation, load_digests, locate
from analysis.pairing.pair import margins_for
from analysis.sweep.cell_results import CellResult, PairResult
from launch.common.atomic_files import RecordError
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Margins, Plan
from launch.contract.spec import RunSpec
from orchestrator.bisect.failure_status import DIVERGED, cause_unknown, classify_failure, judge_cell
from orchestrator.bisect.layer_answer import Finding, LayerAnswer, LayerSearch
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.rules import violations
from orchestrator.targets.slurm_cluster import Target

STEPS_PAST = 2
"""How many steps are digested after the last step at which a repeat failed."""


def start_search(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> LayerSearch:
    """Return the search for the first layer of ``cell`` that differs.

    Raises:
        InputError: the cell captures nothing, is not known to have other results, or cannot run with digests.
    """
    result = judge_cell(sweep, plan, cell)
    status = classify_failure(result)
    if status is None or (status.status, status.failure) != ("fails", DIVERGED):
        fix = "name a run that DIVERGED or ended NUMERIC, or bisect without --layers"
        raise cause_unknown(plan, cell, status, "change its results", fix)
    original = replace(cell.run_spec, digest_steps=_steps_to_digest(result, cell.run_spec))
    deterministic = replace(original, training=replace(original.training, deterministic=True))
    trials = (original,) if deterministic == original else (deterministic, original)
    # Reasons against the original settings come first: deterministic mode is not the user's choice.
    for trial in reversed(trials):
        raise_if_rejected(cell.cell_id, violations(trial) or target.check_spec(trial))
    return LayerSearch(plan, cell, status.description, trials)


def _steps_to_digest(result: CellResult, spec: RunSpec) -> int:
    """Return the steps up to a little past the last failure of a repeat; all steps if no single step fails."""
    failed = [pair.verdict for pair in result.pairs if pair.verdict.verdict == DIVERGED]
    steps = [v.deviation.step if v.deviation else spec.training.steps for v in failed]
    return min(max(steps) + 1 + STEPS_PAST, spec.training.steps)


def read_answer(sweep: SweepPaths, search: LayerSearch, target: Target) -> LayerAnswer:
    """Return what the records of ``sweep``, the search's own, show."""
    findings: list[Finding] = []
    for number, trial in enumerate(search.trials, 1):
        finding = _read_finding(sweep, search, trial, target)
        if finding is None:
            return LayerAnswer(search, search.trials[:number], tuple(findings))
        findings.append(finding)
        if finding.occurred_again:
            break
    return LayerAnswer(search, (), tuple(findings))


def _read_finding(sweep: SweepPaths, search: LayerSearch, trial: RunSpec, target: Target) -> Finding | None:
    """Return what the records of ``trial`` show; None while a run has no outcome."""
    plan = plan_side_sweep(search, [trial], target)
    result = judge_cell(sweep, plan, plan.cells[-1])
    margins = margins_for(search.cell.run_spec, search.plan.margins)
    pairs = tuple(_apply_margins(pair, margins) for pair in result.pairs)
    status = classify_failure(replace(result, pairs=pairs), DIVERGED)
    if status is None:
        return None
    try:
        return Finding(trial, status, _locate(sweep, result, trial))
    except RecordError as error:
        return Finding(trial, status, problem=str(error))


def _apply_margins(pair: PairResult, margins: Margins) -> PairResult:
    """Return ``pair``, INCONCLUSIVE instead of DIVERGED if it is within the ``margins`` of the original run.

    In deterministic mode any differing bit is DIVERGED, which need not be the original failure.
    """
    verdict, found = pair.verdict, pair.verdict.evidence
    near = found and found.max_loss_difference <= margins.loss and found.max_grad_norm_difference <= margins.grad_norm
    if verdict.verdict != DIVERGED or not near:
        return pair
    reason = f"{verdict.reason}: other bits, but within the margins of the original run"
    return replace(pair, verdict=replace(verdict, verdict="INCONCLUSIVE", reason=reason))


def _locate(sweep: SweepPaths, result: CellResult, spec: RunSpec) -> DivergenceLocation:
    eager = {pair.repeat: load_digests(sweep, pair.eager, spec) for pair in result.pairs if pair.eager is not None}
    graphed = {pair.repeat: load_digests(sweep, pair.graphed, spec) for pair in result.pairs}
    return locate(eager, graphed, spec)
