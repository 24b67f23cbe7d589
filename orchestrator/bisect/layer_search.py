"""Which layer first computes something else where it is captured: a cell's runs are made again in a sweep of their own, eager
and graphed, with what each layer gives digested (launch/contract/records/layer_digests.py), and held against each other.

First in deterministic mode, where eager runs agree bit for bit and all that differs is a matter of graphs; where the failure
does not come back there, as the cell was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from analysis.graphs.layer_divergence import DivergenceLocation, load_digests, locate
from analysis.pairing.pair import margins_for
from analysis.sweep.cell_results import CellResult, PairResult
from analysis.sweep.judge_sweep import judge_workload
from launch.common.atomic_files import RecordError, dumps, write_text
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Margins, Plan
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator.bisect.failure_status import NUMBERS, classify_failure, find_result
from orchestrator.bisect.layer_answer import Finding, LayerAnswer, LayerSearch, answer_to_json
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.errors import input_error
from orchestrator.rules import violations
from orchestrator.sweeps.store import report_disk_errors
from orchestrator.targets.slurm_cluster import Target

STEPS_PAST = 2
"""How many steps are digested behind the last at which a repeat was seen to fail."""


def start_layer_search(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> LayerSearch:
    """What to make again of ``cell`` of ``plan``.

    Raises:
        InputError: it captures nothing, is not known to compute something else, or its layers cannot be digested.
    """
    if not cell.graphed:
        raise input_error(cell.cell_id, "is eager: there is nothing to hold it against", "name a run of a graphed cell")
    result = find_result(judge_workload(sweep, plan, cell.workload_id), cell.cell_id)
    stand = classify_failure(result)
    if stand is None:
        raise input_error(cell.cell_id, "is not known to compute something else for its graphs: a run has no outcome yet",
                    f"resume {plan.name}, then bisect")  # fmt: skip
    if (stand.status, stand.failure) != ("fails", NUMBERS):
        raise input_error(cell.cell_id, f"is not known to compute something else for its graphs: {stand.words}",
                    "name a run that DIVERGED or ended NUMERIC; bisect without --layers takes other failures too")  # fmt: skip
    as_it_was = replace(cell.run_spec, digest_steps=_steps_to_digest(result, cell.run_spec))
    deterministic = replace(as_it_was, training=replace(as_it_was.training, deterministic=True))
    trials = (as_it_was,) if deterministic == as_it_was else (deterministic, as_it_was)
    # What the run as it was cannot do is said before what it could not in deterministic mode.
    for reason in (reason for trial in reversed(trials) for reason in violations(trial) or target.check_spec(trial)):
        raise input_error(f"{cell.cell_id} [{reason.rule}]", reason.message, reason.remedy)
    return LayerSearch(plan, cell, stand.words, trials)


def _steps_to_digest(result: CellResult, spec: RunSpec) -> int:
    """A little past the step at which repeats were seen to fail; all where that is of no one step."""
    failed = [pair.verdict for pair in result.pairs if pair.verdict.verdict == NUMBERS]
    steps = [v.deviation.step if v.deviation else spec.training.steps for v in failed]
    return min(max(steps) + 1 + STEPS_PAST, spec.training.steps)


def plan_of(search: LayerSearch, trials: Sequence[RunSpec], target: Target) -> Plan:
    """The sweep of ``trials`` and their eager twins. The same trials give the same plan, in whatever round."""
    specs = [
        replace(trial, cuda_graph=graph)
        for trial in trials
        for graph in (CudaGraph("none", (), trial.cuda_graph.warmup_steps), trial.cuda_graph)
    ]
    return plan_side_sweep(search.name, search.plan, search.cell, specs, "runs with digested layers", target)


def bisect_layers(sweep: SweepPaths, search: LayerSearch, target: Target, make: Callable[[Plan], None]) -> LayerAnswer:
    """Trial by trial, made by ``make``, which has the runs of a plan made, until the failure has come back or runs were
    lost. ``sweep`` is the search's own.

    Raises:
        InputError: a trial cannot run on ``target``.
    """
    findings: list[Finding] = []
    for number, trial in enumerate(search.trials, 1):
        finding = _finding(sweep, search, trial, target)
        if finding is None:
            plan = plan_of(search, search.trials[:number], target)
            raise_if_rejected(plan)
            make(plan)
            finding = _finding(sweep, search, trial, target)
        if finding is None:
            return LayerAnswer(search, tuple(findings), lost=True)
        findings.append(finding)
        if finding.came_back:
            break
    return LayerAnswer(search, tuple(findings))


def _finding(sweep: SweepPaths, search: LayerSearch, trial: RunSpec, target: Target) -> Finding | None:
    """What is on disk of ``trial``; None while a run has no outcome."""
    plan = plan_of(search, [trial], target)
    graphed = plan.cells[-1]
    result = find_result(judge_workload(sweep, plan, graphed.workload_id), graphed.cell_id)
    margins = margins_for(search.cell.run_spec, search.plan.margins)
    stand = classify_failure(replace(result, pairs=tuple(_by_margins(pair, margins) for pair in result.pairs)), NUMBERS)
    if stand is None:
        return None
    try:
        return Finding(trial, stand, _located(sweep, result, trial))
    except RecordError as error:
        return Finding(trial, stand, problem=str(error))


def _by_margins(pair: PairResult, margins: Margins) -> PairResult:
    """``pair``, which has not failed as was sought where it is within ``margins``, those of the run that is looked into: in
    deterministic mode any other bit is DIVERGED."""
    verdict, found = pair.verdict, pair.verdict.evidence
    near = found and found.max_loss_difference <= margins.loss and found.max_grad_norm_difference <= margins.grad_norm
    if verdict.verdict != "DIVERGED" or not near:
        return pair
    reason = f"{verdict.reason}: other bits, but within the margins that the run looked into was judged by"
    return replace(pair, verdict=replace(verdict, verdict="INCONCLUSIVE", reason=reason))


def _located(sweep: SweepPaths, result: CellResult, spec: RunSpec) -> DivergenceLocation:
    eager = {pair.repeat: load_digests(sweep, pair.eager, spec) for pair in result.pairs if pair.eager is not None}
    graphed = {pair.repeat: load_digests(sweep, pair.graphed, spec) for pair in result.pairs}
    return locate(eager, graphed, spec)


def write_answer(sweep: SweepPaths, answer: LayerAnswer) -> Path:
    """Write layers.md, which is returned, and layers.json into the report's folder of the search's own sweep. There is no
    report: digesting takes time, and what it would say of speed is nobody's."""
    path = sweep.report / "layers.md"
    with report_disk_errors(sweep):
        write_text(path, answer.text)
        write_text(path.with_suffix(".json"), dumps(answer_to_json(answer), indent=1) + "\n")
    return path
