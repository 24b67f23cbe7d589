"""Collect all evidence of a cell from its own records and those of its eager baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.graphs.capture_cost import capture_cost
from analysis.graphs.replay_check import worst
from analysis.limits.roofline import cell_roofline
from analysis.limits.speedup_bound import cell_limit, eager_doubt
from analysis.limits.straggler import cell_straggler
from analysis.limits.throttling import throttle_bounds, throttling_of
from analysis.memory.peaks import cell_memory
from analysis.memory.shared_gpu import shared_runs, speed_doubt
from analysis.pairing.eager_baseline import EagerBaseline, eager_side
from analysis.pairing.flaky_attempts import contradictions, uncompared_attempts
from analysis.pairing.judge_pairs import judge_pairs
from analysis.pairing.pair import RESUME_FAILED, Pair, collect_pair, margins_for
from analysis.pairing.step_checks import StepChecks, collect_step_checks
from analysis.records.load import Records
from analysis.records.run import Attempt, Run, attempts_of
from analysis.speed.pair_speed import pool_pairs
from analysis.speed.speed_verdict import RatioBounds
from analysis.speed.step_time import cell_step_time
from analysis.sweep.cell_results import CellGraphs, CellIntegrity, CellLoss, CellResult, CellSpeed, PairResult
from analysis.sweep.loss_trajectory import loss_trajectory
from analysis.verdict.completeness import finite_steps, incomplete
from analysis.verdict.verdict import Verdict
from launch.contract.outcomes import RESULTS_INTACT
from launch.contract.plan import Cell, Margins
from launch.contract.records.step_metrics import METRICS
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class CellEvidence:
    """The evidence of one cell, without the other cells of its sweep.

    The verdicts of ``result`` use only the cell's own curves, and ``result`` has no speed-up yet. analysis.sweep.judge_cells
    corrects the verdicts over all cells, and derives the speed-up from the pairs, ``throttle_bounds`` and ``speed_doubt``.
    """

    result: CellResult
    throttle_bounds: RatioBounds = field(default_factory=RatioBounds)
    speed_doubt: str = ""
    repeats_option: str = "repeats="
    """That of the plan."""

    def without_records(self) -> CellEvidence:
        """Return this evidence without the records that attempts wrote during their runs, to free memory."""
        pairs = (
            replace(p, eager=p.eager and p.eager.without_records(), graphed=p.graphed.without_records())
            for p in self.result.pairs
        )
        runs = tuple(run.without_records() for run in self.result.runs)
        return replace(self, result=replace(self.result, runs=runs, pairs=tuple(pairs)))


def collect_evidence(records: Records) -> tuple[CellEvidence, ...]:
    """Return the evidence of each cell, in the plan's order. It is empty for cells that the plan does not run."""
    eager = {
        cell.workload_id: eager_side(records.runs[cell.cell_id], cell)
        for cell in records.plan.cells
        if cell.state == "run" and not cell.graphed
    }
    shared = shared_runs(records)
    return tuple(_cell(cell, records, eager.get(cell.workload_id), shared) for cell in records.plan.cells)


def _cell(cell: Cell, records: Records, baseline: EagerBaseline | None, shared: Mapping[str, int]) -> CellEvidence:
    if cell.state != "run":
        return CellEvidence(CellResult(cell, ()))
    runs, margins = records.runs[cell.cell_id], records.plan.margins
    skipped = records.skipped.get(cell.cell_id, {})
    if not runs and skipped:
        unmade = Verdict("INCOMPARABLE", next(iter(skipped.values())), RESUME_FAILED) if cell.graphed else None
        return CellEvidence(CellResult(cell, (), verdict=unmade, skipped=skipped))
    if cell.graphed:
        found = _graphed_cell(cell, runs, baseline or EagerBaseline((), {}), records, shared)
    else:
        found = _eager_cell(cell, runs, baseline, margins, shared)
    return replace(found, result=replace(found.result, skipped=skipped))


def _eager_cell(
    cell: Cell, runs: tuple[Run, ...], baseline: EagerBaseline | None, margins: Margins, shared: Mapping[str, int]
) -> CellEvidence:
    spec, repeats = cell.run_spec, [run for run in runs if not run.perturbed]
    attempts = attempts_of(repeats)
    flaky = {run.repeat: _eager_contradictions(run, baseline, margins_for(spec, margins)) for run in repeats}
    speed = _speed(spec, attempts)
    if spec.placement.device == "cuda":
        speed = replace(speed, timing_doubt=eager_doubt(attempts, spec.parallelism.world_size))
    result = CellResult(
        cell,
        runs,
        speed=speed,
        memory=cell_memory(_alone(repeats, shared), (), spec),
        loss=CellLoss(loss_trajectory(attempts), baseline.noise_floor if baseline else None),
        integrity=_integrity(runs, flaky, spec.training.steps),
        foreign_memory=_foreign(runs, shared),
    )
    return CellEvidence(result)


def _graphed_cell(
    cell: Cell, runs: tuple[Run, ...], baseline: EagerBaseline, records: Records, shared: Mapping[str, int]
) -> CellEvidence:
    spec, attempts, margins, looks = cell.run_spec, attempts_of(runs), records.plan.margins, records.plan.looks
    collected = _pool_speeds([collect_pair(run, baseline, spec, margins) for run in runs])
    verdicts, verdict = judge_pairs(collected, baseline, spec, margins, max(1, len(looks)), _elsewhere(cell, records))
    pairs = tuple(PairResult(**vars(pair), verdict=own) for pair, own in zip(collected, verdicts, strict=True))
    both = [(pair.eager, pair.graphed) for pair in pairs if pair.verdict.verdict != "INCOMPARABLE" and pair.eager]
    compared = _attempts_of_pairs(both)
    alone = _attempts_of_pairs([pair for pair in both if all(run.run_id not in shared for run in pair)])
    speed, ranks = _speed(spec, attempts, compared), spec.parallelism.world_size
    slowed = speed.throttling.eager.slowed if speed.throttling and speed.throttling.eager else ""
    bound = cell_limit(pairs, ranks, slowed) if spec.placement.device == "cuda" else None
    proofs = [pair.replay for pair in pairs if pair.replay]
    result = CellResult(
        cell,
        runs,
        pairs,
        None if _failed_as_expected(cell, runs) else verdict,
        replace(speed, bound=bound, timing_doubt=bound.doubt if bound else ""),
        cell_memory(_alone(runs, shared), alone, spec),
        CellGraphs(worst(proofs) if proofs else None, capture_cost(attempts), _step_checks(pairs, spec)),
        CellLoss(loss_trajectory(attempts)),
        _integrity(runs, {pair.repeat: pair.flaky_attempts for pair in pairs}, spec.training.steps),
        looks,
        foreign_memory=_foreign(runs, shared),
    )
    doubt = (bound.doubt or bound.eager_doubt) if bound else ""
    run_ids = [run.run_id for pair in both for run in pair]
    doubt = doubt or speed_doubt(run_ids, shared)
    return CellEvidence(result, throttle_bounds(pairs, ranks), doubt, records.plan.repeats_option)


def _alone(runs: Sequence[Run], shared: Mapping[str, int]) -> Sequence[Attempt]:
    """Return the attempts of ``runs`` that had their GPUs to themselves."""
    return attempts_of([run for run in runs if run.run_id not in shared])


def _foreign(runs: Sequence[Run], shared: Mapping[str, int]) -> Mapping[str, int]:
    return {run.run_id: shared[run.run_id] for run in runs if run.run_id in shared}


def _attempts_of_pairs(pairs: Sequence[tuple[Run, Run]]) -> list[tuple[Attempt, Attempt]]:
    return [(eager.attempt, graphed.attempt) for eager, graphed in pairs if eager.attempt and graphed.attempt]


def _elsewhere(cell: Cell, records: Records) -> dict[str, Attempt]:
    """Return the runs of the other graphed cells of the workload, by names such as "repeat 1 of full_iteration"."""
    others = (
        other
        for other in records.plan.cells
        if other.graphed and other.state == "run" and other.workload_id == cell.workload_id and other is not cell
    )
    return {
        f"repeat {run.repeat} of {other.run_spec.cuda_graph.label}": run.attempt
        for other in others
        for run in records.runs[other.cell_id]
        if run.attempt
    }


def _step_checks(pairs: Sequence[PairResult], spec: RunSpec) -> StepChecks | None:
    return collect_step_checks([(pair.repeat, pair.attempts[1]) for pair in pairs if pair.comparable], spec)


def _failed_as_expected(cell: Cell, runs: Sequence[Run]) -> bool:
    matching = (run.attempt is not None and run.attempt.outcome.matches(cell.expect) for run in runs)
    return cell.expect.outcome not in RESULTS_INTACT and all(matching)


def _pool_speeds(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    speeds = pool_pairs([pair.speed for pair in pairs])
    return tuple(replace(pair, speed=speed) for pair, speed in zip(pairs, speeds, strict=True))


def _speed(spec: RunSpec, attempts: Sequence[Attempt], compared: Sequence[tuple[Attempt, Attempt]] = ()) -> CellSpeed:
    """Measure the speed of a cell's own ``attempts``. ``compared`` has its pairs, as (eager, graphed)."""
    step_time, layout = cell_step_time(attempts), spec.parallelism
    if spec.placement.device != "cuda":
        return CellSpeed(step_time)
    return CellSpeed(
        step_time,
        throttling=throttling_of(attempts, compared, layout.world_size),
        straggler=cell_straggler(attempts, layout, step_time.milliseconds) if step_time else None,
        roofline=cell_roofline(spec, attempts),
    )


def _eager_contradictions(run: Run, baseline: EagerBaseline | None, margins: Margins) -> Mapping[int, str]:
    repeats = baseline.repeats.get(run.attempt.digests, {}) if baseline and run.attempt else {}
    return contradictions(run, tuple(repeats.values()), margins, first=0)


def _integrity(runs: Sequence[Run], flaky: Mapping[int, Mapping[int, str]], steps: int) -> CellIntegrity:
    """Collect the problems of ``runs`` with ``steps`` planned steps. ``flaky`` has descriptions by repeat and attempt."""
    successful = ((run, run.attempt) for run in runs if run.attempt is not None and run.attempt.outcome.results_intact)
    unsound = (
        *(reason for run in runs for reason in run.damaged),
        *(f"{run.run_id}: {reason}" for run, attempt in successful for reason in _unsound_records(attempt, steps)),
    )
    descriptions = (f"repeat {repeat}: {text}" for repeat, each in flaky.items() for text in each.values())
    uncompared = (f"repeat {run.repeat}: {text}" for run in runs for text in uncompared_attempts(run))
    return CellIntegrity(unsound, tuple(descriptions), tuple(uncompared))


def _unsound_records(attempt: Attempt, steps: int) -> tuple[str, ...]:
    """Return the defects in the records of a completed ``attempt`` with ``steps`` planned steps."""
    gap = incomplete(attempt.steps, np.arange(steps))
    # Logs may have no gradient norms.
    metrics = METRICS[:1] if attempt.made_elsewhere and np.isnan(attempt.steps.grad_norm).all() else METRICS
    finite = bool(finite_steps(attempt.steps, metrics).all())
    return (
        *attempt.problems,
        *((gap,) if gap else ()),
        *(() if finite else ("a loss or gradient norm is not finite",)),
    )
